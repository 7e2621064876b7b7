# SPDX-License-Identifier: Apache-2.0
"""The JSON files that a run leaves, one a part, and how a later run goes on from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from serving.console import now
from serving.files import replace_file


class Store:
    """The parts' JSON files, written whole after every change, to two folders.

    A file has `calls`, what each call of the script that added to it ran on, and `cells`, which
    say by number in which call they were measured. `names` are the parts to go on from.
    """

    def __init__(self, out: Path, state: Path, meta: dict, names: Iterable[str]) -> None:
        self.folders, self.meta = (out, state), meta
        self.parts: dict[str, dict] = {}
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (file := state / f"{name}.json").exists():
                self.parts[name] = json.loads(file.read_text())
                self.write(name)

    def part(self, name: str) -> dict:
        return self.parts.setdefault(
            name,
            {
                "part": name,
                "complete": False,
                "calls": [],
                "servers": [],
                "cells": {},
                "errors": [],
            },
        )

    def cell(self, part: str, key: str) -> dict | None:
        return self.part(part)["cells"].get(key)

    def add(self, part: str, key: str, data: dict) -> None:
        self.part(part)["cells"][key] = {"at": now(), "call": self._call(part), **data}
        self.write(part)

    def error(self, part: str, key: str, text: str) -> None:
        error = {"at": now(), "call": self._call(part), "key": key, "error": text}
        self.part(part)["errors"].append(error)
        self.write(part)

    def failed(self, part: str) -> bool:
        """Whether something of this part failed in this call."""
        calls = self.part(part)["calls"]
        return any(calls[e["call"]] == self.meta for e in self.part(part)["errors"])

    def end(self, part: str, complete: bool, servers: list[dict]) -> None:
        """Say whether the part has all it wants, and how the servers were started."""
        self.part(part).update(complete=complete, servers=servers)
        if self.part(part)["cells"]:
            self.write(part)

    def write(self, part: str) -> None:
        text = json.dumps(self.part(part), separators=(",", ":"))
        for folder in self.folders:
            replace_file(folder / f"{part}.json", text)

    def _call(self, part: str) -> int:
        calls = self.part(part)["calls"]
        if self.meta not in calls:
            calls.append(self.meta)
        return calls.index(self.meta)
