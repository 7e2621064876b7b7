# SPDX-License-Identifier: Apache-2.0
"""The rows that a cell keeps of its requests, and the names of their columns.

JSON has a row as a list; a cell with such rows says the names beside them, as `columns`, and
tools/page reads the rows by those names.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from serving.requests import Result, WorkloadError


class Sample(NamedTuple):
    """One request: its kind, times to the first and to the last token, prompt and cached tokens."""

    kind: str
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached_tokens: int


COLUMNS = Sample._fields


def samples(results: Iterable[Result]) -> list[Sample]:
    """One row a request. Raises WorkloadError for one that was not answered completely."""
    return [_sample(result) for result in results]


def _sample(result: Result) -> Sample:
    ttft_ms, total_ms, cached = result.ttft_ms, result.total_ms, result.cached_tokens
    if ttft_ms is None or total_ms is None or cached is None:
        raise WorkloadError(f"a {result.request.kind} request has no times or no cached tokens")
    prompt_tokens = len(result.request.prompt)
    return Sample(result.request.kind, round(ttft_ms, 3), round(total_ms, 3), prompt_tokens, cached)


def median_ttft_ms(rows: Iterable[Sample]) -> float:
    """The time to first token in the middle, the upper one of two; NaN without rows."""
    times = [row.ttft_ms for row in rows]
    return statistics.median_high(times) if times else float("nan")
