# SPDX-License-Identifier: Apache-2.0
"""What a run of requests shows: the report that press.press returns, and its numbers by kind.

Names say the unit: _tokens, _ms. A time or a count that nothing was measured for is null, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NotRequired, TypedDict

import numpy as np

from serving.metrics import PrefixCounters
from serving.requests import Result, reusable_tokens

Percentile = Literal["p50", "p95", "p99"]
PERCENTILES: dict[Percentile, int] = {"p50": 50, "p95": 95, "p99": 99}
REPLAYS = ("hot_replay", "partial_replay", "survival_replay")


class Percentiles(TypedDict):
    """Times in ms, null when there is no sample."""

    p50: float | None
    p95: float | None
    p99: float | None
    samples: int


class Replay(TypedDict):
    """The hot prompt sent again after `flood_requests` one-use prompts."""

    kind: str
    repetition: int | None
    flood_requests: int
    cached_tokens: int | None
    external_tokens: NotRequired[int]  # served by a tier beside them; left out without one
    ttft_ms: float | None


class Failure(TypedDict):
    """A request that was not answered completely; `index` is its place among those sent."""

    kind: str
    index: int
    error: str


class RequestCounts(TypedDict):
    """How many requests the plan had, were sent, and failed."""

    planned: int
    sent: int
    failed: int


class Tokens(TypedDict):
    """The prompt tokens of a kind's answered requests, and those of them found in the cache.

    Of requests that were not sent alone, what a tier served is among the cached ones.
    """

    prompt: int
    cached: int


class Answer(TypedDict):
    """One request as sent. Equal `key`: equal prompt. `repetition`: what it is compared within."""

    kind: str
    key: str
    repetition: int | None
    ttft_ms: float | None
    cached_tokens: int | None
    external_tokens: NotRequired[int]
    text: str
    error: str | None


class Counters(TypedDict):
    """By how much the server's own counters moved; hit_ratio null when nothing was looked up."""

    queries_tokens: int
    hits_tokens: int
    hit_ratio: float | None


class Tier(TypedDict):
    """Prompt tokens that a KV connector's tier served instead of the device.

    unassigned_tokens: those of requests that were not sent alone, so that nobody can tell of which;
    unassigned_prompt_tokens: all prompt tokens of such requests.
    """

    external_tokens: int
    unassigned_tokens: int
    unassigned_prompt_tokens: int


class Summary(TypedDict):
    """What the requests show; `ttft_ms` and `tokens` are by kind, of the answered requests."""

    reusable_tokens: int
    warm_prefix_cached_tokens: int | None
    post_flood_cached_tokens: int | None
    hot_prefix_preserved: bool
    replays: list[Replay]
    requests: RequestCounts
    failures: list[Failure]
    ttft_ms: dict[str, Percentiles]
    tokens: dict[str, Tokens]


class Report(Summary):
    """What press.press returns. `problems`: why nothing can be told from it."""

    mode: str
    scan_limit: int | None
    policy: dict
    model: str
    max_model_len: int
    base_url: str
    seed: int
    flood_requests: int
    settings: dict
    trace_requests_too_long: int
    results: list[Answer]
    problems: list[str]
    counters: NotRequired[Counters]  # left out when the server was gone after the run
    tier: NotRequired[Tier]  # left out when none served anything


def percentiles(samples_ms: list[float]) -> Percentiles:
    """Return p50, p95 and p99 in ms and the number of samples."""
    if not samples_ms:
        return {"p50": None, "p95": None, "p99": None, "samples": 0}
    values = np.percentile(samples_ms, list(PERCENTILES.values()))
    p50, p95, p99 = (round(float(value), 3) for value in values)
    return {"p50": p50, "p95": p95, "p99": p99, "samples": len(samples_ms)}


def summarize(results: list[Result], planned: int) -> Summary:
    """Return what the results show; `planned` is how many requests the plan had."""
    good = [r for r in results if r.error is None]
    by_kind: dict[str, list[Result]] = {r.request.kind: [] for r in results}
    for result in good:
        by_kind[result.request.kind].append(result)
    warm = _last_warm_tokens(by_kind.get("warm", []))
    post_flood = _least_cached_tokens(by_kind.get("hot_replay", []))
    return {
        "reusable_tokens": reusable_tokens(r.request.prompt for r in good),
        "warm_prefix_cached_tokens": warm,
        "post_flood_cached_tokens": post_flood,
        "hot_prefix_preserved": bool(warm) and post_flood == warm,
        "replays": [_replay(r) for r in good if r.request.kind in REPLAYS],
        "requests": {
            "planned": planned,
            "sent": len(results),
            "failed": len(results) - len(good),
        },
        "failures": _failures(results),
        "ttft_ms": {kind: percentiles(_ttfts_ms(of_kind)) for kind, of_kind in by_kind.items()},
        "tokens": {kind: _tokens(of_kind) for kind, of_kind in by_kind.items()},
    }


def answers(results: Iterable[Result]) -> list[Answer]:
    """Return every result as the report keeps it."""
    return [_answer(r) for r in results]


def counters(moved: PrefixCounters) -> Counters:
    """Return how far the server's counters moved, and the share of hits."""
    ratio = moved.hits_tokens / moved.queries_tokens if moved.queries_tokens > 0 else None
    return {
        "queries_tokens": moved.queries_tokens,
        "hits_tokens": moved.hits_tokens,
        "hit_ratio": None if ratio is None else round(ratio, 4),
    }


def tier(results: list[Result], moved: PrefixCounters) -> Tier:
    """Return what a tier served in a run, and how much of it no single request accounts for."""
    others = [r for r in results if not r.request.alone]
    assigned = sum(r.external_tokens or 0 for r in results)
    return {
        "external_tokens": moved.external_tokens,
        "unassigned_tokens": moved.external_tokens - assigned,
        "unassigned_prompt_tokens": sum(len(r.request.prompt) for r in others if r.error is None),
    }


def _answer(result: Result) -> Answer:
    answer: Answer = {
        "kind": result.request.kind,
        "key": result.request.tag.get("key") or result.request.tag["shares"],
        "repetition": result.request.tag.get("repetition"),
        "ttft_ms": _rounded(result.ttft_ms),
        "cached_tokens": result.cached_tokens,
        "text": result.text,
        "error": result.error,
    }
    if result.external_tokens is not None:
        answer["external_tokens"] = result.external_tokens
    return answer


def _replay(result: Result) -> Replay:
    replay: Replay = {
        "kind": result.request.kind,
        "repetition": result.request.tag.get("repetition"),
        "flood_requests": result.request.tag["flood_requests"],
        "cached_tokens": result.cached_tokens,
        "ttft_ms": _rounded(result.ttft_ms),
    }
    if result.external_tokens is not None:
        replay["external_tokens"] = result.external_tokens
    return replay


def _failures(results: Iterable[Result]) -> list[Failure]:
    """Return the results that are errors, with their place."""
    return [
        {"kind": r.request.kind, "index": index, "error": r.error}
        for index, r in enumerate(results)
        if r.error is not None
    ]


def _last_warm_tokens(warm: list[Result]) -> int | None:
    """What of the hot prefix was cached when it was sent last before the floods."""
    return warm[-1].cached_tokens if warm else None


def _least_cached_tokens(replays: list[Result]) -> int | None:
    """What of the hot prefix was still cached after the flood that cost it most."""
    kept = [r.cached_tokens for r in replays if r.cached_tokens is not None]
    return min(kept, default=None)


def _ttfts_ms(results: list[Result]) -> list[float]:
    return [r.ttft_ms for r in results if r.ttft_ms is not None]


def _tokens(results: list[Result]) -> Tokens:
    return {
        "prompt": sum(len(r.request.prompt) for r in results),
        "cached": sum(r.cached_tokens or 0 for r in results),
    }


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)
