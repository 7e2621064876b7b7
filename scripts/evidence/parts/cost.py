# SPDX-License-Identifier: Apache-2.0
"""Many requests decoding at once while every new block evicts a cached one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from evidence.bench import Bench, Full, Live, connected, fill, order_of_round
from evidence.plan import Sizes
from serving import http
from serving.console import progress
from serving.files import REPO
from serving.metrics import MetricsError, fetch
from serving.requests import Prompts

DECODE = (
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_decode_time_seconds_count",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
)


def metric_sums(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Sum samples of /metrics by name. MetricsError when one is absent."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    if missing := set(names) - set(found):
        raise MetricsError(f"not on /metrics: {', '.join(sorted(missing))}")
    return found


def decode_step_ms(before: dict[str, float], after: dict[str, float], max_tokens: int) -> float:
    """Return ms a decoding step took, by EngineCore's own clock, averaged over the requests."""
    seconds, requests = (after[name] - before[name] for name in DECODE[:2])
    return 1000 * seconds / requests / (max_tokens - 1)


async def cost(bench: Bench) -> None:
    """Many requests decoding at once while every new block evicts a cached one."""
    sizes = bench.sizes
    async with connected(bench.up("mid", sizes.mid_timed)) as lives:
        for live in lives:
            await fill(live, sizes)
        for number in range(sizes.cost_rounds):
            for live in order_of_round(lives, number):
                await bench.cell(
                    f"decode round={number} {live.name}",
                    6,
                    partial(_decode, live, sizes, number),
                    live.server,
                )
    _bench_overhead(bench)


async def _decode(live: Live, sizes: Sizes, number: int) -> dict:
    """One HTTP request with all the prompts, answered at once: the front end stays out of it."""
    prompts = Prompts(live.pool, "decode")
    # Lengths differ, so that requests cross a block's end in different steps.
    body = {
        "model": await live.client.model(),
        "prompt": [
            prompts.draw(f"{number}/{i}", sizes.block_size + 1 + i % sizes.block_size)
            for i in range(sizes.cost_requests)
        ],
        "max_tokens": sizes.cost_max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{live.client.base_url}/metrics"
    first_policy, before = live.policy(), metric_sums(fetch(url), DECODE)
    wanted = before[DECODE[1]] + sizes.cost_requests
    async with http.async_client(live.client.base_url, timeout_s=120) as client:
        started = time.perf_counter()
        answer = await client.post("/v1/completions", json=body)
        wall_s = time.perf_counter() - started
        answer.raise_for_status()
    for _ in range(200):
        after = metric_sums(fetch(url), DECODE)
        if after[DECODE[1]] >= wanted:
            break
        await asyncio.sleep(0.02)
    tokens = answer.json()["usage"]["completion_tokens"]
    step_ms = decode_step_ms(before, after, sizes.cost_max_tokens)
    decisions = live.policy()["counters"].get("decisions", 0)
    progress(
        f"cost round={number} {live.name}: {step_ms:.3f} ms a step, {tokens / wall_s:.0f} tokens/s"
    )
    return {
        "round": number,
        "requests": sizes.cost_requests,
        "max_tokens": sizes.cost_max_tokens,
        "step_ms": step_ms,
        "wall_s": wall_s,
        "output_tokens": tokens,
        "preemptions": after[DECODE[3]] - before[DECODE[3]],
        "decisions": decisions - first_policy["counters"].get("decisions", 0),
    }


def _bench_overhead(bench: Bench) -> None:
    """Time get_new_blocks in a process of its own on this machine's CPU."""
    key, tool = "get_new_blocks", REPO / "tools" / "bench_overhead.py"
    if bench.store.cell(bench.part, key) is not None or not tool.exists():
        return
    if bench.left_s() < 45 and not bench.rehearse:
        raise Full("bench_overhead needs 45 s")
    env = {k: v for k, v in os.environ.items() if not k.startswith("COMPUTECACHE_")}
    env["PYTHONPATH"] = bench.fleet.pythonpath["patched"]
    progress("cost: tools/bench_overhead.py")
    try:
        done = subprocess.run(
            [sys.executable, str(tool), *bench.sizes.bench],
            capture_output=True,
            text=True,
            env=env,
            timeout=max(10.0, min(120.0, bench.left_s())),
            check=False,
        )
        bench.store.add(bench.part, key, {"settings": bench.sizes.bench, **json.loads(done.stdout)})
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        bench.store.error(bench.part, key, str(error)[-2000:])
