# SPDX-License-Identifier: Apache-2.0
"""Request traces, read by the reader of tools/lab: the one arrow from scripts/ to tools/.

Both sides read the same files and have to agree on what a bad one is. A command here has only
scripts/ on its path, so the repository's tools/ folder is added behind everything else.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from lab.traces import TraceError, TraceRow, read_rows


@dataclass(frozen=True)
class TraceFile:
    """A trace with the name it was asked for by; its requests are in order of time."""

    path: Path
    rows: list[TraceRow]


def trace_file(text: str) -> TraceFile:
    """An argparse type: a trace is read, or refused with file, line and fault, before any server
    is asked."""
    try:
        return TraceFile(Path(text), read_rows(Path(text)))
    except TraceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
