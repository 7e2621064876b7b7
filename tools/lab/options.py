# SPDX-License-Identifier: Apache-2.0
"""Options that every replay of traces takes."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.cells import DEFAULT_CONCURRENCY
from lab.peers import PEERS


def list_of(kind: Callable[[str], float], least: float) -> Callable[[str], list]:
    """An argparse type: comma separated numbers above or at ``least``."""

    def parse(text: str) -> list:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(math.isfinite(v) and v >= least for v in values):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers >= {least}, like 16,32")
        return values

    return parse


def file_to_write(text: str) -> Path:
    """An argparse type: a file in a folder that can be written, known before the work and not after
    hours of it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: the folder {path.parent} cannot be written")
    return path


def names_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    spelling = {name.lower(): name for name in choices}

    def parse(text: str) -> list[str]:
        names = text.lower().replace("-", "").split(",")
        if unknown := [name for name in names if name not in spelling]:
            raise argparse.ArgumentTypeError(f"unknown {unknown}: choose from {','.join(choices)}")
        return [spelling[name] for name in names]

    return parse


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every replay of traces takes."""
    parser.add_argument("--concurrency", type=int, default=DEFAULT_CONCURRENCY, help="default 8")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--peer", type=names_of(PEERS), default=[], help="list of " + ",".join(PEERS)
    )
    parser.add_argument("--policy", type=Path, help="try this policy file, not the installed one")


def check_common_arguments(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> argparse.Namespace:
    """Ends the program with usage and status 2 where argparse alone cannot see the fault."""
    for name in ("concurrency", "workers"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name} is {value}, expected an integer >= 1")
    if arguments.policy and not arguments.policy.is_file():
        parser.error(f"--policy {arguments.policy}: no such file")
    return arguments
