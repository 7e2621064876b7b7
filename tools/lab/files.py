# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: whole or not at all, or one generated section of a document."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def replace_section(
    document: str, body: str, name: str = "policy", comment: tuple[str, str] = ("<!-- ", " -->")
) -> str:
    """``document`` with ``body`` between the markers of the generated section ``name``.

    ``comment`` is how the document's language begins and ends one.
    Raises ValueError unless both markers are there once, in order.
    """
    opening, closing = comment
    begin, end = (f"{opening}{side} generated: {name}{closing}" for side in ("begin", "end"))
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document needs one line {begin!r} and one line {end!r}")
    head, rest = document.split(begin)
    if end not in rest:
        raise ValueError(f"{end!r} stands before {begin!r}")
    return f"{head}{begin}\n{body}{end}{rest.split(end)[1]}"
