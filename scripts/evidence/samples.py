# SPDX-License-Identifier: Apache-2.0
"""The rows that a cell keeps of its requests."""

from __future__ import annotations

from serving.requests import Result


def samples(results: list[Result]) -> list[list]:
    """One row a request: kind, TTFT and whole time in ms, prompt and cached tokens."""
    return [
        [
            r.request.kind,
            round(r.ttft_ms, 3),
            round(r.total_ms, 3),
            len(r.request.prompt),
            r.cached_tokens,
        ]
        for r in results
    ]


def middle_ms(rows: list[list]) -> float:
    return sorted(row[1] for row in rows)[len(rows) // 2] if rows else float("nan")
