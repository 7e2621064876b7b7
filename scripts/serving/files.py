# SPDX-License-Identifier: Apache-2.0
"""Where this repository is, and how its scripts replace a file that something else may read."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def replace_file(path: Path, content: str | bytes) -> None:
    """Give a file new content in one step: whoever reads it finds the old or the new one, whole.

    A file that exists keeps its permissions and, where this process may give it away, its owner; a
    link stays a link to the file that is replaced. Raises OSError, and then nothing has changed.
    """
    path = path.resolve()
    data = content.encode() if isinstance(content, str) else content
    old = path.stat() if path.exists() else None
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")

    def create(name: str, flags: int) -> int:
        # What replaces a file may hold the same secrets: nobody else reads it meanwhile.
        return os.open(name, flags, 0o666 if old is None else 0o600)

    try:
        with open(part, "xb", opener=create) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if old is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), old.st_mode & 0o7777)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # a signal may come right after the replacing
        raise
