#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the policy's settings into README.md and .env.example, from the fields of `Settings`.

Both files keep a section between markers; the rest of them is left alone. Exit status 0: written
(with --check: both are up to date). 1: --check and one is not. 2: a file cannot be read or
written, or has no markers.
"""

import argparse
import sys
import textwrap
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from lab.files import replace_file, replace_section
from lab.modules import load_module

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "vllm/v1/core/computecache_policy.py"


def settings() -> tuple["Field[Any]", ...]:
    """The fields of `Settings` in the policy of this checkout."""
    return fields(load_module("computecache_policy", POLICY).Settings)


def variable(setting: "Field[Any]") -> str:
    """The environment variable of a setting."""
    return f"COMPUTECACHE_{setting.name.upper()}"


def bounds(setting: "Field[Any]") -> str:
    """What a setting may be, in words."""
    if choices := setting.metadata.get("choices"):
        return " or ".join(choices)
    return f"{setting.metadata['low']:,} to {setting.metadata['high']:,}"


def readme_table() -> str:
    """README's table: variable, default, bounds, meaning."""
    rows = ["| variable | default | may be | meaning |", "| --- | ---: | --- | --- |"]
    for setting in settings():
        name, meaning = variable(setting), setting.metadata["help"]
        rows.append(f"| `{name}` | `{setting.default}` | {bounds(setting)} | {meaning} |")
    return "\n".join(rows) + "\n"


def env_lines() -> str:
    """.env.example's lines: each setting at its default, its meaning as a comment above it."""
    lines = []
    for setting in settings():
        meaning = f"{bounds(setting)}. {setting.metadata['help'].replace('`', '')}"
        lines += textwrap.wrap(meaning, 98, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"{variable(setting)}={setting.default}")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is not so")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--env-example", type=Path, default=ROOT / ".env.example")
    arguments = parser.parse_args(argv)
    stale = []
    try:
        for path, body, comment in (
            (arguments.readme, readme_table(), ("<!-- ", " -->")),
            (arguments.env_example, env_lines(), ("# ", "")),
        ):
            before = path.read_text()
            after = replace_section(before, body, "settings", comment)
            if after != before:
                stale.append(path)
                if not arguments.check:
                    replace_file(path, after.encode())
    except (OSError, ValueError) as error:
        print(f"settings_table: {error}", file=sys.stderr)
        return 2
    for path in stale if arguments.check else ():
        print(f"{path} is not what Settings says: run this tool", file=sys.stderr)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
