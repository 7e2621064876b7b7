# SPDX-License-Identifier: Apache-2.0
"""Press one server's prefix cache: run the plan of the options and say what survived.

The default shape warms one hot prefix, floods the cache with one-use prompts and replays the
hot prefix. Mode and scan limit are what the server itself reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from serving.client import Client
from serving.metrics import UNPATCHED, MetricsError, fetch, policy_state
from serving.options import make_plan, workload_settings
from serving.plan import run_plan
from serving.requests import Result, reusable_tokens

PERCENTILES = (50, 95, 99)


def read_policy(urls: list[str], expect_unpatched: bool = False) -> dict:
    """Return the policy's state as metrics.policy_state does; mode "unpatched" if expected.

    Several engines have an endpoint each: give all their addresses.

    Raises MetricsError when the endpoint is absent though the server should be patched, or present
    though it should not be.
    """
    try:
        state = policy_state("\n".join(map(fetch, urls)))
    except MetricsError as error:
        if expect_unpatched:
            return {"mode": UNPATCHED, "settings": {}, "counters": {}, "pools": 0}
        raise MetricsError(
            f"{error}\nremedy: start the patched server with COMPUTECACHE_METRICS_PORT and give "
            "its address as --policy-metrics-url, or say --expect-unpatched"
        ) from error
    if expect_unpatched:
        raise MetricsError(f"--expect-unpatched, but {urls[0]} reports mode {state['mode']}")
    return state


def percentiles(samples_ms: list[float]) -> dict:
    """Return p50, p95 and p99 in ms and the number of samples; nulls when there is none."""
    if not samples_ms:
        return {**{f"p{p}": None for p in PERCENTILES}, "samples": 0}
    values = np.percentile(samples_ms, PERCENTILES)
    shown = {f"p{p}": round(float(v), 3) for p, v in zip(PERCENTILES, values, strict=True)}
    return {**shown, "samples": len(samples_ms)}


def summarize(results: list[Result], planned: int) -> dict:
    """Return what the requests show, by kind: TTFT, cached tokens, failures, hot replays."""
    good = [r for r in results if r.error is None]
    kinds = dict.fromkeys(r.request.kind for r in results)

    def of(*names: str) -> list[Result]:
        return [r for r in good if r.request.kind in names]

    warm = [r.cached_tokens for r in of("warm")]
    replays = [
        {
            "kind": r.request.kind,
            "repetition": r.request.tag.get("repetition"),
            "flood_requests": r.request.tag["flood_requests"],
            "cached_tokens": r.cached_tokens,
            "ttft_ms": round(r.ttft_ms, 3),
        }
        for r in of("hot_replay", "partial_replay", "survival_replay")
    ]
    kept = [r.cached_tokens for r in of("hot_replay") if r.cached_tokens is not None]
    post_flood = min(kept) if kept else None
    return {
        "reusable_tokens": reusable_tokens(r.request.prompt for r in good),
        "warm_prefix_cached_tokens": warm[-1] if warm else None,
        "post_flood_cached_tokens": post_flood,
        "hot_prefix_preserved": bool(warm and warm[-1] and post_flood == warm[-1]),
        "replays": replays,
        "requests": {
            "planned": planned,
            "sent": len(results),
            "failed": len(results) - len(good),
        },
        "failures": [
            {"kind": r.request.kind, "index": i, "error": r.error}
            for i, r in enumerate(results)
            if r.error is not None
        ],
        "ttft_ms": {kind: percentiles([r.ttft_ms for r in of(kind)]) for kind in kinds},
        "tokens": {
            kind: {
                "prompt": sum(len(r.request.prompt) for r in of(kind)),
                "cached": sum(r.cached_tokens or 0 for r in of(kind)),
            }
            for kind in kinds
        },
    }


def counter_problems(results: list[Result], moved, concurrency: int) -> list[str]:
    """Say where the server's counters and the answers' own usage contradict each other."""
    if moved.queries_tokens < 0 or moved.hits_tokens < 0:
        return ["the server's counters went backwards: it restarted during the run"]
    problems = [
        f"request {i} ({r.request.kind}): usage says {r.cached_tokens} cached tokens, the counters "
        f"say {r.counter_cached_tokens}: other traffic reaches this server"
        for i, r in enumerate(results)
        if r.error is None and r.request.alone and r.cached_tokens != r.counter_cached_tokens
    ]
    asked = sum(len(r.request.prompt) for r in results)
    # Side by side, a request that has to wait for blocks may be looked up more than once.
    if concurrency == 1 and all(r.error is None for r in results) and moved.queries_tokens != asked:
        problems.append(
            f"the counters moved by {moved.queries_tokens} queried tokens, {asked} were sent: "
            "other traffic reaches this server"
        )
    return problems


async def press(
    client: Client,
    options: argparse.Namespace,
    policy: Callable[[], dict],
    on_result: Callable[[Result], None] = lambda result: None,
) -> dict:
    """Run the plan of `options` against `client`; `policy` returns the policy's state.

    The answer's "problems" are why nothing can be told from it. Raises WorkloadError or
    MetricsError when the run cannot start, MetricsError when the server is gone after it.
    """
    pool, max_model_len = await client.token_pool()
    plan, left_out = make_plan(options, pool, max_model_len)
    first_state = policy()
    before = await client.counters()
    results = await run_plan(
        client,
        plan,
        concurrency=options.concurrency,
        max_seconds=options.max_seconds,
        on_result=on_result,
    )
    report = {
        "mode": first_state["mode"],
        "scan_limit": first_state["settings"].get("scan_limit"),
        "policy": first_state,
        "model": await client.model(),
        "max_model_len": max_model_len,
        "base_url": client.base_url,
        "seed": options.seed,
        "flood_requests": options.flood_requests,
        "settings": workload_settings(options),
        "trace_requests_too_long": left_out,
        **summarize(results, len(plan)),
        "results": [
            {
                "kind": r.request.kind,
                "key": r.request.tag.get("key", r.request.tag.get("shares")),
                "repetition": r.request.tag.get("repetition"),
                "ttft_ms": r.ttft_ms and round(r.ttft_ms, 3),
                "cached_tokens": r.cached_tokens,
                "text": r.text,
                "error": r.error,
            }
            for r in results
        ],
        "problems": [],
    }
    try:
        asked = sum(len(r.request.prompt) for r in results if r.error is None)
        moved = (await client.counters_after(before, asked)) - before
        last_state = policy()
    except MetricsError as error:
        report["problems"].append(f"after the run: {error}")
        return report
    report["counters"] = {
        "queries_tokens": moved.queries_tokens,
        "hits_tokens": moved.hits_tokens,
        "hit_ratio": round(moved.hits_tokens / moved.queries_tokens, 4)
        if moved.queries_tokens > 0
        else None,
    }
    report["policy"] = last_state
    report["problems"] = counter_problems(results, moved, options.concurrency)
    if last_state["mode"] != first_state["mode"]:
        report["problems"].append("the server's mode changed during the run")
    if len(results) < len(plan) and not report["failures"]:
        report["problems"].append(f"--max-seconds ended the run at request {len(results)}")
    return report
