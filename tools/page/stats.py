# SPDX-License-Identifier: Apache-2.0
"""Numbers from the raw cells of gpu_evidence.py: merged parts, percentiles, paired ratios."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES = 4000
SEED = 20260
# What rows were before a cell named its columns; the part `trace` left the first one out.
UNNAMED_COLUMNS = ("kind", "ttft_ms", "total_ms", "prompt_tokens", "cached_tokens")


class NoEvidence(ValueError):
    """The folder holds nothing to report on; the message says what was looked for."""


def load(files: Iterable[Path]) -> dict[str, dict]:
    """Return the parts by name; files of one part are put together.

    A cell that two files have is taken from the later one.
    Raises NoEvidence when there is no file, or one is no part.
    """
    parts: dict[str, dict] = {}
    for file in files:
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or not {"part", "cells", "calls"} <= set(found):
            raise NoEvidence(f"{file} was not written by scripts/gpu_evidence.py")
        if found["part"] not in parts:
            parts[found["part"]] = found
            continue
        into = parts[found["part"]]
        shift = len(into["calls"])
        into["calls"] += found["calls"]
        into["servers"] += found["servers"]
        into["errors"] += [one | {"call": one["call"] + shift} for one in found["errors"]]
        for key, cell in found["cells"].items():
            into["cells"][key] = cell | {"call": cell["call"] + shift}
        into["complete"] = into["complete"] or found["complete"]
    if not parts:
        raise NoEvidence("there is no JSON file of scripts/gpu_evidence.py")
    return parts


def samples(cell: dict, key: str = "samples") -> list[dict[str, Any]]:
    """The requests that a cell keeps under `key`, each by the names of the cell's columns.

    scripts/evidence/samples.py owns the names. ttft_ms is in ms, prompt_tokens in tokens.
    """
    rows = cell[key]
    names = cell.get("columns") or UNNAMED_COLUMNS[-len(rows[0]) :] if rows else ()
    return [dict(zip(names, row, strict=True)) for row in rows]


def ttfts_ms(rows: Iterable[dict[str, Any]], kind: str | None = None) -> list[float]:
    """The times to first token of samples, of one kind or of all."""
    return [row["ttft_ms"] for row in rows if kind is None or row["kind"] == kind]


def server_name(cell: dict) -> str:
    return cell["server"].split(":")[1]


def percentiles(values: Iterable[float], at: tuple[int, ...] = (50, 95, 99)) -> list[float]:
    """Return the percentiles, NaN when there is no value."""
    values = list(values)
    return list(np.percentile(values, at)) if values else [float("nan")] * len(at)


def median(values: Iterable[float]) -> float:
    """Return the 50th percentile, NaN when there is no value."""
    return percentiles(values, (50,))[0]


def limits_ms(cells: Iterable[dict]) -> dict[int, float]:
    """Return the median TTFT of a hit with no flood before it, by hot tokens, in their order."""
    found: dict[int, list[float]] = {}
    for cell in cells:
        found.setdefault(cell["hot_tokens"], []).extend(ttfts_ms(samples(cell, "limit")))
    return {hot: median(found[hot]) for hot in sorted(found)}


def paired_ratio(a: dict, b: dict) -> tuple[float, float, float, int] | None:
    """Return the geometric mean of a/b over the keys both have, its 95 % interval and their number.

    The interval is a bootstrap over keys (rounds); NaN for one key. None when none is paired.
    """
    keys = sorted(set(a) & set(b))
    if not keys:
        return None
    logs = np.log([a[key] / b[key] for key in keys])
    draws = np.random.default_rng(SEED).integers(0, len(logs), (RESAMPLES, len(logs)))
    low, high = np.percentile(logs[draws].mean(axis=1), (2.5, 97.5))
    if len(keys) == 1:
        low = high = np.nan
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(keys)


def percentile_ratios(
    a: list[list[float]], b: list[list[float]], at: tuple[int, ...] = (50, 95, 99)
) -> list[tuple[float, float, float]]:
    """Return the ratio a/b of each percentile of all runs together, with its 95 % interval.

    a, b: times of equal requests in equal order, one list a run. The interval is a bootstrap over
    requests: it says nothing of how much a restart or another machine moves.
    """
    over, under = np.array(a), np.array(b)
    draws = np.random.default_rng(SEED).integers(0, over.shape[1], (RESAMPLES // 4, over.shape[1]))
    whole = np.percentile(over, at) / np.percentile(under, at)
    drawn = [np.percentile(over[:, d], at) / np.percentile(under[:, d], at) for d in draws]
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
    return [(float(v), float(x), float(y)) for v, x, y in zip(whole, low, high, strict=True)]


def goodput(cells: list[dict], budget_ms: float) -> tuple[float, float]:
    """Return the share of requests whose TTFT is inside the budget, and how many a second."""
    times = [ms for cell in cells for ms in ttfts_ms(samples(cell))]
    inside = sum(ms <= budget_ms for ms in times)
    return inside / len(times), inside / sum(cell["elapsed_s"] for cell in cells)


def prefill(cells: list[dict]) -> tuple[int, int]:
    """Return the prompt tokens computed and those saved by the cache."""
    rows = [row for cell in cells for row in samples(cell)]
    saved = sum(row["cached_tokens"] for row in rows)
    return sum(row["prompt_tokens"] for row in rows) - saved, saved


def rounds(cells: Iterable[dict], name: str, value: Callable[[dict], float]) -> dict[int, float]:
    """Return value(cell) by round, for the cells of server `name`."""
    return {cell["round"]: value(cell) for cell in cells if server_name(cell) == name}


def mean_ttft_ms(cell: dict) -> float:
    return float(np.mean(ttfts_ms(samples(cell))))


def kept(cells: list[dict], kind: str = "") -> list[int]:
    """Return the fewest tokens still cached at each replay in turn, over the cells (seeds)."""
    replays = [
        [r["cached_tokens"] for r in c["replays"] if r["kind"].startswith(kind)] for c in cells
    ]
    return [min(values) for values in zip(*replays, strict=True)]


def fallbacks(parts: dict[str, dict]) -> int:
    """Return the most fallbacks that any policy had counted when a cell ended."""
    cells = [cell for part in parts.values() for cell in part["cells"].values()]
    counters = [c["policy"]["counters"] for c in cells if isinstance(c.get("policy"), dict)]
    return max((found.get("fallbacks", 0) for found in counters), default=0)
