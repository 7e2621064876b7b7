# SPDX-License-Identifier: Apache-2.0
"""Press one server's prefix cache and report what survived, as one JSON on stdout.

The default shape warms one hot prefix, floods the cache with one-use prompts and replays the
hot prefix. Mode and scan limit are what the server itself reports.

Exit 0: every request was answered. 1: a request failed. 2: could not tell (no such server,
counters missing, reset or moved by other traffic, prompts that do not fit, bad usage)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from serving.client import Client, read_api_key
from serving.metrics import MetricsError
from serving.options import add_workload_options, natural, parse_workload
from serving.press import press, read_policy
from serving.requests import Result, WorkloadError
from serving.summary import Report


async def _run(options: argparse.Namespace) -> Report:
    def show(result: Result) -> None:
        kind, cached = result.request.kind, result.cached_tokens
        if result.error:
            print(f"{kind}: FAILED: {result.error}", file=sys.stderr)
        elif result.request.alone:
            print(f"{kind}: {cached} cached, {result.ttft_ms:.1f} ms", file=sys.stderr)

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
        report = asyncio.run(_run(options))
    except (WorkloadError, MetricsError) as error:
        print(f"prefix_pressure: {error}", file=sys.stderr)
        return 2
    shown = {name: value for name, value in report.items() if name != "results"}
    print(json.dumps(shown, indent=1, allow_nan=False))
    for problem in report["problems"]:
        print(f"could not tell: {problem}", file=sys.stderr)
    if report["failures"]:
        return 1
    return 2 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
