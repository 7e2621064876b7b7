# SPDX-License-Identifier: Apache-2.0
"""Why vLLM did not start: the one line of its log that says so, among its tracebacks."""

from __future__ import annotations

import re

# "(EngineCore pid=7) ERROR 12-01 05:12:46 [core.py:900] ", each part of which may be missing.
_PREFIX = re.compile(r"^(?:\(\S+ pid=\d+\) ?)?(?:ERROR \S+ \S+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)): (\S.*)$")
_USAGE = re.compile(r"^\S+: (error: \S.*)$")
# What the other processes say of it.
_CONSEQUENCES = ("Engine core initialization failed", "Engine process failed to start")
_VALIDATION = re.compile(r"validation errors? for \w+$")
MOST_CHARACTERS = 600


def cause(log: str) -> str | None:
    """Return the first exception of a log that is no consequence of another, None without one.

    Python prints the exception that began a chain first.
    """
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    for number, line in enumerate(lines):
        found = _EXCEPTION.match(line)
        if found is None:
            if usage := _USAGE.match(line):
                return usage[1][:MOST_CHARACTERS]
            continue
        kind, text = found[1].rpartition(".")[2], found[2]
        if text.startswith(_CONSEQUENCES):
            continue
        if _VALIDATION.search(text):  # the reason is in the lines below
            text = " ".join(
                [text + ":", *(part.strip() for part in lines[number + 1 : number + 3])]
            )
        return f"{kind}: {text}"[:MOST_CHARACTERS]
    return None
