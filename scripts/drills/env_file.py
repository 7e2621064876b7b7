# SPDX-License-Identifier: Apache-2.0
"""The bytes of a `.env` file with one setting switched: one line, every other byte kept."""

from __future__ import annotations

import re


class EnvFileError(RuntimeError):
    """The file cannot be switched safely; the message says what to mend."""


def _lines(data: bytes, name: str) -> list[re.Match[bytes]]:
    # What precedes the name may be blanks or `export`, never a comment sign.
    start = rb"^[ \t]*(?:export[ \t]+)?" + re.escape(name.encode())
    return list(re.finditer(start + rb"[ \t]*=[^\r\n]*", data, re.MULTILINE))


def setting_line(data: bytes, name: str) -> bytes | None:
    """Return the line that sets `name`, without its line end; None when there is none.

    Raises EnvFileError when there are several: which one wins differs between readers.
    """
    found = _lines(data, name)
    if len(found) > 1:
        raise EnvFileError(f"{name} is set {len(found)} times in .env: keep one")
    return found[0].group() if found else None


def with_setting_line(data: bytes, name: str, line: bytes | None) -> bytes:
    """Return the file with `name`'s line replaced, added at the end, or (None) taken out again."""
    found = _lines(data, name)
    if line is not None and [whole.group() for whole in _lines(line, name)] != [line]:
        # It may come from a record that something else has written.
        raise EnvFileError(f"{name} of .env cannot be set by a line that does more than that")
    if found:
        start, end = found[0].span()
        # An added line goes with the line end it was added with.
        return data[:start] + (data[end + 1 :] if line is None else line + data[end:])
    if line is None:
        return data
    if data and not data.endswith(b"\n"):
        raise EnvFileError(".env does not end with a line end: add one")
    return data + line + b"\n"
