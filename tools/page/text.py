# SPDX-License-Identifier: Apache-2.0
"""How numbers are written in docs/results.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SERVERS = ("unpatched", "lru", "active16", "active32", "active64", "roomy")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers come formatted."""
    lines: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def named(name: str) -> str:
    return name.replace("active", "active ")


def yes(holds: bool) -> str:
    return "met" if holds else "**missed**"


def ratio_text(found: tuple[float, float, float, int] | None) -> str:
    if found is None:
        return "-"
    if found[3] == 1:
        return f"{found[0]:.3f} (n=1)"
    return f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f}, n={found[3]})"
