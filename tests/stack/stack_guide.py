# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of docs/operations.md: which are run, which are left out and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/operations.md"


@dataclass(frozen=True)
class Apart:
    """A block that is not run: the reason, and the words that each of its commands has."""

    reason: str
    words: str


# A block's name is its section and its number there.
RUN = (
    "Without a GPU 1",
    "Before the first start 1",
    "First start 1",
    "First start 2",
    "Let `up` check first 1",
    "Canary, promote, roll back 1",
    "Canary, promote, roll back 2",
    "Canary, promote, roll back 3",
    *(f"Pause and delete {number}" for number in range(1, 6)),
)
APART = {
    "Before the first start 2": Apart("it shows a GPU to a container", "--gpus all"),
    "From another machine 1": Apart("it is typed on another machine", "ssh -N"),
}


def blocks(page: str) -> dict[str, str]:
    """Return the text of each fenced block of a page by its name, in the page's order."""
    found: dict[str, str] = {}
    section, numbers, inside = "", dict[str, int](), None
    for line in page.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            if inside is None:
                inside = []
                continue
            numbers[section] = numbers.get(section, 0) + 1
            found[f"{section} {numbers[section]}"] = "\n".join(inside)
            inside = None
        elif inside is not None:
            inside.append(line)
        elif line.startswith("#"):
            section = line.lstrip("#").strip()
    return found


def faults(page: str) -> list[str]:
    """Return what RUN and APART do not know of a page, or know and it does not have."""
    found = blocks(page)
    known = [*RUN, *APART]
    said = [f"block {name!r} is neither in RUN nor in APART" for name in found if name not in known]
    said += [f"there is no block {name!r} any more" for name in known if name not in found]
    said += [
        f"block {name!r} is left out because {apart.reason}; `{command}` could be run"
        for name, apart in APART.items()
        for command in found.get(name, "").replace("\\\n", " ").splitlines()
        if apart.words not in command
    ]
    return said
