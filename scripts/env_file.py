# SPDX-License-Identifier: Apache-2.0
"""Switch COMPUTECACHE_MODE in a `.env` file: one line, atomically, every other byte kept."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

NAME = "COMPUTECACHE_MODE"
LINE = re.compile(rb"^[ \t]*(?:export[ \t]+)?COMPUTECACHE_MODE[ \t]*=[^\r\n]*", re.MULTILINE)


class EnvFileError(RuntimeError):
    """The file cannot be switched safely; the message says what to mend."""


def mode_line(data: bytes) -> bytes | None:
    """Return the file's COMPUTECACHE_MODE line without its line end, None when it has none.

    Raises EnvFileError when there are several: which one wins differs between readers.
    """
    found = LINE.findall(data)
    if len(found) > 1:
        raise EnvFileError(f"{NAME} is set {len(found)} times in .env: keep one")
    return found[0] if found else None


def with_mode_line(data: bytes, line: bytes | None) -> bytes:
    """Return the file with its mode line replaced, added at the end, or (None) taken out again."""
    present = mode_line(data)
    if line is None:
        # Undo what the branch below appends; the line end before it belongs to the file.
        return data if present is None else data.removesuffix(b"\n").removesuffix(present)
    if present is not None:
        return LINE.sub(lambda match: line, data)
    if data and not data.endswith(b"\n"):
        raise EnvFileError(".env does not end with a line end: add one")
    return data + line + b"\n"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's bytes in one step, keeping its permissions; a link's target is replaced."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o7777
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as part:
        try:
            part.write(data)
            part.flush()
            os.fsync(part.fileno())
            os.fchmod(part.fileno(), mode)
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise
