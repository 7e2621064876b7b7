# SPDX-License-Identifier: Apache-2.0
"""Press one server's prefix cache and report what survived, as one JSON on stdout.

The default shape warms one hot prefix, floods the cache with one-use prompts and replays the
hot prefix. Mode and scan limit are what the server itself reports.

Exit 0: every request was answered. 1: a request failed. 2: could not tell (no such server,
answers that are not vLLM's, counters missing, reset or moved by other traffic, prompts that do not
fit or cannot hit, bad usage, no stdout to write on)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from serving.client import Client
from serving.command import run_command
from serving.console import FEWEST_SAMPLES, say
from serving.http import check_address
from serving.metrics import MetricsError
from serving.options import add_workload_options, natural, parse_workload
from serving.press import press, read_policy
from serving.requests import Result, WorkloadError
from serving.secret import read_api_key, redacted_record
from serving.summary import Report


async def _run(options: argparse.Namespace) -> Report:
    def show(result: Result) -> None:
        kind, cached = result.request.kind, result.cached_tokens
        if result.error:
            say(f"{kind}: FAILED: {result.error}")
        elif result.request.alone:
            say(f"{kind}: {cached} cached, {result.ttft_ms:.1f} ms")

    def policy() -> dict:
        urls = options.policy_metrics_url or ["http://127.0.0.1:8001/metrics"]
        return read_policy(urls, options.expect_unpatched)

    async with Client(
        options.base_url,
        api_key=read_api_key(),
        model=options.model,
        timeout_s=options.request_timeout,
        data_parallel_rank=options.data_parallel_rank,
    ) as client:
        return await press(client, options, policy, show)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--policy-metrics-url",
        action="append",
        help="the policy's own endpoint, once for each engine (default http://127.0.0.1:8001/metrics)",
    )
    parser.add_argument("--expect-unpatched", action="store_true", help="the server has no policy")
    parser.add_argument("--model", help="served model name (default: what the server lists first)")
    parser.add_argument("--data-parallel-rank", type=natural, help="the engine to send all to")
    add_workload_options(parser)
    options = parse_workload(parser, argv)
    try:
        for url in (options.base_url, *(options.policy_metrics_url or [])):
            check_address(url)
        report = asyncio.run(_run(options))
    except (WorkloadError, MetricsError) as error:
        say(f"prefix_pressure: {error}")
        return 2
    if never_found(report, options.warm_requests):
        report["problems"].append(
            f"a hot prefix of {options.hot_tokens} tokens was not in the cache when it was sent "
            "again at once: it holds no whole block, or prefix caching is off: give more "
            "--hot-tokens, or start the server with --enable-prefix-caching"
        )
    shown = {name: value for name, value in report.items() if name != "results"}
    shown["notes"] = said = notes(report)
    print(json.dumps(redacted_record(shown), indent=1, allow_nan=False))
    for note in said:
        say(f"note: {note}")
    for problem in report["problems"]:
        say(f"could not tell: {problem}")
    if report["failures"]:
        return 1
    return 2 if report["problems"] else 0


def never_found(report: Report, warm_requests: int) -> bool:
    """Tell whether the hot prefix was not even found right after it had been sent."""
    return warm_requests > 1 and report["warm_prefix_cached_tokens"] == 0


def notes(report: Report) -> list[str]:
    """Say which percentiles rest on too few samples to be any."""
    return [
        f"{name} of {kind} rests on {times['samples']} samples, {fewest} are needed: read it as "
        "about the slowest of them"
        for kind, times in report["ttft_ms"].items()
        for name, fewest in FEWEST_SAMPLES.items()
        if 0 < times["samples"] < fewest
    ]


if __name__ == "__main__":
    sys.exit(run_command(main))
