# SPDX-License-Identifier: Apache-2.0
"""The numbers behind a verdict: pairs of repetitions, and a bootstrap over them.

Repetition r of the k-th lru visit and repetition r of the k-th candidate visit had the same
prompts: that pair is what is drawn again and again.
"""

from __future__ import annotations

import numpy as np

from serving.summary import PERCENTILES, Report

RESAMPLES = 2000
CONFIDENCE_PERCENT = 95


def pair_repetitions(baselines: list[Report], candidates: list[Report]) -> list[dict]:
    """Return one {"baseline": [...], "candidate": [...]} of results for each pair of repetitions.

    An lru visit without a candidate visit of its own joins the last one's pairs.
    """
    pairs: dict[tuple[int, int], dict] = {}
    for side, reports in (("baseline", baselines), ("candidate", candidates)):
        for visit_number, report in enumerate(reports):
            for result in report["results"]:
                if result["repetition"] is not None:
                    unit = (min(visit_number, len(candidates) - 1), result["repetition"])
                    pair = pairs.setdefault(unit, {"baseline": [], "candidate": []})
                    pair[side].append(result)
    return [pairs[unit] for unit in sorted(pairs)]


def _values(pairs: list[dict], side: str, kinds: set[str], name: str) -> np.ndarray:
    rows = [[r[name] for r in pair[side] if r["kind"] in kinds] for pair in pairs]
    width = max(map(len, rows), default=0)
    return np.array([row + [np.nan] * (width - len(row)) for row in rows], dtype=float)


def _with_both(
    pairs: list[dict], kinds: set[str], name: str
) -> tuple[list[dict], np.ndarray, np.ndarray]:
    """Return the pairs in which both sides have a value, and those values, a row a pair.

    Where the plan was cut off, the later repetitions lack the kinds that come late.
    """
    base, cand = (_values(pairs, side, kinds, name) for side in ("baseline", "candidate"))
    both = np.isfinite(base).any(axis=1) & np.isfinite(cand).any(axis=1)
    return [pair for pair, whole in zip(pairs, both, strict=True) if whole], base[both], cand[both]


def _resample(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _count(values: np.ndarray) -> int:
    return int(np.isfinite(values).sum())


def _interval(samples: np.ndarray) -> list[float]:
    tail = (100 - CONFIDENCE_PERCENT) / 2
    return [round(float(v), 4) for v in np.percentile(samples, (tail, 100 - tail))]


def kept_difference(pairs: list[dict]) -> dict:
    """Tokens a request finds in the cache: both means, their difference and its interval.

    Of the hot replays where there are any, else of all requests. Without a pair to compare all
    but "pairs", which is 0, are None.
    """
    kinds = {r["kind"] for pair in pairs for r in pair["baseline"]}
    kinds = kinds & {"hot_replay"} or kinds
    compared, base_values, cand_values = _with_both(pairs, kinds, "cached_tokens")
    if not compared:
        names = ("baseline_mean", "candidate_mean", "difference_mean", "difference_interval")
        return {**dict.fromkeys(names), "pairs": 0}
    base, cand = np.nanmean(base_values, axis=1), np.nanmean(cand_values, axis=1)
    difference = cand - base
    return {
        "baseline_mean": round(float(base.mean()), 2),
        "candidate_mean": round(float(cand.mean()), 2),
        "difference_mean": round(float(difference.mean()), 2),
        "difference_interval": _interval(difference[_resample(len(difference))].mean(axis=1)),
        "pairs": len(compared),
    }


def ttft_ratios(pairs: list[dict], baselines: list[Report], kind: str) -> dict | None:
    """Candidate over baseline p50, p95 and p99 of a kind's TTFT; None when no pair has it.

    Of the pairs of repetitions in which both sides have it: "pairs" says how many.
    "slowest_baseline_ms" is the largest of the single lru visits' percentiles: what lru itself
    can look like on this machine.
    """
    compared, base, cand = _with_both(pairs, {kind}, "ttft_ms")
    if not compared:
        return None
    pick = _resample(len(compared))
    counts = {"baseline": _count(base), "candidate": _count(cand)}
    answer: dict = {"samples": counts, "pairs": len(compared)}
    for name, percentile in PERCENTILES.items():

        def of(values: np.ndarray, axis: int | None = None, p: int = percentile) -> np.ndarray:
            return np.nanpercentile(values, p, axis=axis)

        drawn = of(cand[pick].reshape(RESAMPLES, -1), 1) / of(base[pick].reshape(RESAMPLES, -1), 1)
        single = [report["ttft_ms"][kind][name] for report in baselines]
        answer[name] = {
            "baseline_ms": round(float(of(base)), 3),
            "candidate_ms": round(float(of(cand)), 3),
            "ratio": round(float(of(cand) / of(base)), 4),
            "ratio_interval": _interval(drawn),
            "slowest_baseline_ms": max(ms for ms in single if ms is not None),
        }
    return answer


def compare_outputs(baselines: list[Report], candidates: list[Report]) -> dict:
    """Compare the temperature-0 text of each prompt with what lru answered to the same prompt.

    lru answers the hot prompt from the cache and without it: either text counts as equal.
    """
    expected: dict[tuple, set[str]] = {}
    for report in baselines:
        for result in report["results"]:
            expected.setdefault((report["seed"], result["key"]), set()).add(result["text"])
    answers = {
        (report["seed"], r["key"], r["text"]) for report in candidates for r in report["results"]
    }
    shared = [a for a in answers if a[:2] in expected]
    different = [a for a in shared if a[2] not in expected[a[:2]]]
    return {
        "compared": len(shared),
        "different": len(different),
        "different_keys": sorted({key for _, key, _ in different})[:20],
        "lru_prompts_with_several_texts": sum(len(texts) > 1 for texts in expected.values()),
    }
