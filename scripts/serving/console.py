# SPDX-License-Identifier: Apache-2.0
"""What commands tell a person: progress on stderr, and the time."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime


def say(text: str) -> None:
    """Tell the operator about progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


_T0 = time.monotonic()


def progress(text: str) -> None:
    """Progress on stderr, with seconds since the start."""
    print(f"[{time.monotonic() - _T0:6.1f}s] {text}", file=sys.stderr, flush=True)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


FEWEST_SAMPLES = {"p95": 20, "p99": 100}  # below, the percentile lies between the largest two
FEW_MARK = "*"
FEW_NOTE = f"{FEW_MARK} of fewer than {FEWEST_SAMPLES['p95']} samples: near the slowest of them"


def of_few(samples: int, percentile: str = "p95") -> str:
    """Return FEW_MARK for a percentile of so few samples that it is none, else nothing."""
    return FEW_MARK if samples < FEWEST_SAMPLES[percentile] else ""
