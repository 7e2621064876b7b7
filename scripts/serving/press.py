# SPDX-License-Identifier: Apache-2.0
"""Press one server's prefix cache: run the plan of the options and say what survived.

The default shape warms one hot prefix, floods the cache with one-use prompts and replays the
hot prefix. Mode and scan limit are what the server itself reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from serving.client import Client
from serving.metrics import UNPATCHED, MetricsError, PrefixCounters, policy_at
from serving.options import make_plan, workload_settings
from serving.plan import run_plan
from serving.requests import Result
from serving.summary import Report, answers, counters, summarize, tier


def read_policy(urls: list[str], expect_unpatched: bool = False) -> dict:
    """Return the policy's state as metrics.policy_state does; mode "unpatched" if expected.

    Several engines have an endpoint each: give all their addresses.

    Raises MetricsError when the endpoint is absent though the server should be patched, or present
    though it should not be.
    """
    try:
        state = policy_at(urls)
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


def counter_problems(results: list[Result], moved: PrefixCounters, concurrency: int) -> list[str]:
    """Say where the server's counters and the answers' own usage contradict each other."""
    if min(moved.queries_tokens, moved.hits_tokens, moved.external_tokens) < 0:
        return ["the server's counters went backwards: it restarted during the run"]
    problems = [
        f"request {i} ({r.request.kind}): {_contradiction(r)}"
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


def _contradiction(result: Result) -> str:
    cached, counted, external = (
        result.cached_tokens,
        result.counter_cached_tokens,
        result.external_tokens,
    )
    if external is None or cached is None:
        return (
            f"usage says {cached} cached tokens, the counters say {counted}: "
            "other traffic reaches this server"
        )
    return (
        f"usage says {cached + external} cached tokens, the counters say {counted} on the device "
        f"and {external} from the tier: other traffic reaches this server, or a load failed"
    )


async def press(
    client: Client,
    options: argparse.Namespace,
    policy: Callable[[], dict],
    on_result: Callable[[Result], None] = lambda result: None,
) -> Report:
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
    report: Report = {
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
        "results": answers(results),
        "problems": [],
    }
    try:
        asked = sum(len(r.request.prompt) for r in results if r.error is None)
        moved = (await client.counters_after(before, asked)) - before
        last_state = policy()
    except MetricsError as error:
        report["problems"].append(f"after the run: {error}")
    else:
        _compare(report, results, moved, last_state)
    return report


def _compare(report: Report, results: list[Result], moved: PrefixCounters, state: dict) -> None:
    """Put into the report what the server says after the run, and what that contradicts.

    moved: its counters, less what they were before. state: its policy's.
    """
    report["counters"] = counters(moved)
    if moved.external_tokens > 0:
        report["tier"] = tier(results, moved)
    report["policy"] = state
    report["problems"] = counter_problems(results, moved, report["settings"]["concurrency"])
    shape = report["settings"]["shape"]
    if "tier" in report and shape != "pressure" and report["tier"]["unassigned_tokens"]:
        report["problems"].append(
            f"a tier served {report['tier']['unassigned_tokens']} tokens of requests side by side, "
            "and usage does not say of which: for --shape "
            f"{shape} run the server without its KV connector, or take --shape pressure"
        )
    if state["mode"] != report["mode"]:
        report["problems"].append("the server's mode changed during the run")
    if len(results) < report["requests"]["planned"] and not report["failures"]:
        report["problems"].append(f"--max-seconds ended the run at request {len(results)}")
