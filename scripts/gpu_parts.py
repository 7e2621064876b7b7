# SPDX-License-Identifier: Apache-2.0
"""The measurements of gpu_evidence.py but for part 2 (gpu_ttft.py) and 7 (gpu_dp.py).

A part is a row of cells. A cell has a key, is bounded in time, and is in the part's JSON as soon
as it ends; a cell that is there already is not measured again. Servers whose numbers are times
are measured one after another while the others idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import shapes
from embedded_server import ServerError
from gpu_bench import (
    KEPT_KEYS,
    OPEN_LOOP,
    Bench,
    Full,
    Live,
    clients,
    one_use,
    options,
    samples,
    turns,
)
from gpu_dp import dp2, dp2gpu
from gpu_plan import Sizes
from gpu_servers import Running, say
from gpu_ttft import ttft
from prefix_pressure import press
from prometheus_client.parser import text_string_to_metric_families
from server_metrics import MetricsError, fetch
from workload import Prompts, Request

REPO = Path(__file__).resolve().parents[1]


async def smoke(bench: Bench) -> None:
    """Start one server of each timed kind first: compiles once, and finds what cannot run."""
    names = ("lru",)
    servers = [*bench.fleet.of("mid"), *bench.fleet.of("large")]
    wanted = [spec for spec in servers if spec.name in names]
    bench.fleet.start(wanted)
    bench.fleet.wait(wanted, bench.deadline)
    up = [bench.fleet.running[s.key] for s in wanted if s.key in bench.fleet.running]
    if not up:
        raise ServerError("no server starts: " + str(bench.fleet.lost)[-3000:])
    if not bench.rehearse:
        bench.fleet.execution = max(one.execution for one in up)
    async with clients(up) as lives:
        for live in lives:

            async def probe(live: Live = live) -> dict:
                size = min(4096, live.max_len // 2)
                first = await live.run(one_use(live, "smoke", 3, size))
                again = await live.run(one_use(live, "smoke", 1, size))
                await live.reset()
                return {"policy": live.policy(), "samples": samples(first + again)}

            data = await bench.cell(live.server.key, 5, probe, live.server)
            say(f"smoke {live.server.key}: {data and data['samples']}")


async def drill(bench: Bench) -> None:
    """Part 1: hot prefixes against floods; how many tokens are still cached at each replay."""
    sizes = bench.sizes

    def cells() -> Iterator[tuple[str, argparse.Namespace]]:
        for seed in range(sizes.drill_seeds):
            for hot in sizes.drill_hot_tokens:
                for flood in sizes.drill_flood_tokens:
                    yield (
                        f"hot={hot} flood={flood} seed={seed}",
                        options(
                            hot_tokens=hot,
                            flood_tokens=flood,
                            flood_requests=sizes.drill_floods,
                            replay_every=sizes.drill_step,
                            survival=[sizes.drill_floods],
                            seed=seed,
                        ),
                    )

    await _press_side_by_side(bench, bench.up("small"), list(cells()), 4)


async def long(bench: Bench) -> None:
    """Part 6: a long hot prefix in a larger pool."""
    sizes = bench.sizes
    cells = [
        (
            f"hot={sizes.long_hot_tokens} flood={sizes.long_flood_tokens} seed={seed}",
            options(
                hot_tokens=sizes.long_hot_tokens,
                flood_tokens=sizes.long_flood_tokens,
                flood_requests=sizes.long_floods,
                replay_every=sizes.long_step,
                survival=list(sizes.long_survival),
                seed=seed,
            ),
        )
        for seed in range(sizes.long_seeds)
    ]
    await _press_side_by_side(bench, bench.up("mid"), cells, 15)


async def _press_side_by_side(
    bench: Bench, servers: list[Running], cells: list[tuple[str, argparse.Namespace]], need_s: float
) -> None:
    """Run the cells on every server, servers at the same time: these numbers are not times."""

    async def one(live: Live) -> None:
        for key, asked in cells:

            async def measure(asked: argparse.Namespace = asked) -> dict:
                await live.reset()
                report = await press(live.client, asked, live.policy)
                kept = {name: report[name] for name in KEPT_KEYS if name in report}
                return {
                    **{n: getattr(asked, n) for n in ("hot_tokens", "flood_tokens", "seed")},
                    **kept,
                }

            data = await bench.cell(f"{live.name} {key}", need_s, measure, live.server)
            if data:
                replays = [r["cached_tokens"] for r in data["replays"]]
                say(f"{bench.part} {live.name} {key}: {replays}")

    async with clients(servers) as lives:
        done = await asyncio.gather(*map(one, lives), return_exceptions=True)
    if problems := [p for p in done if p]:
        raise problems[0]


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


DECODE = (
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_decode_time_seconds_count",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
)


def decode_step_ms(before: dict[str, float], after: dict[str, float], max_tokens: int) -> float:
    """Return ms a decoding step took, by EngineCore's own clock, averaged over the requests."""
    seconds, requests = (after[name] - before[name] for name in DECODE[:2])
    return 1000 * seconds / requests / (max_tokens - 1)


async def cost(bench: Bench) -> None:
    """Part 4: many requests decoding at once while every new block evicts a cached one."""
    sizes = bench.sizes
    async with clients(bench.up("mid", sizes.mid_timed)) as lives:
        for live in lives:
            await live.reset()
            await live.run(one_use(live, "fill", _filling(sizes, live), sizes.fill_tokens), 8)
        for number in range(sizes.cost_rounds):
            for live in turns(lives, number):
                await bench.cell(
                    f"decode round={number} {live.name}",
                    6,
                    lambda live=live, number=number: _decode(live, sizes, number),
                    live.server,
                )
    _bench_overhead(bench)


def _filling(sizes: Sizes, live: Live) -> int:
    """One-use prompts that leave no block of the pool without a cached prefix."""
    return 1 + sizes.mid_blocks * sizes.block_size // sizes.fill_tokens


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
    async with httpx.AsyncClient(base_url=live.client.base_url, timeout=120) as http:
        started = time.perf_counter()
        answer = await http.post("/v1/completions", json=body)
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
    say(f"cost round={number} {live.name}: {step_ms:.3f} ms a step, {tokens / wall_s:.0f} tokens/s")
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
    say("cost: tools/bench_overhead.py")
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


async def controls(bench: Bench) -> None:
    """Part 3: traffic without reuse, and reuse without pressure; every round on every server."""
    sizes = bench.sizes
    async with clients(bench.up("mid", sizes.mid_timed)) as lives:
        for live in lives:
            await live.reset()
            await live.run(one_use(live, "fill", _filling(sizes, live), sizes.fill_tokens), 8)
        for kind, measure in (
            ("zero-reuse", _zero_reuse),
            ("zero-reuse-busy", _zero_reuse_busy),
            ("unpressured", _unpressured),
        ):
            for number in range(sizes.control_rounds):
                for live in turns(lives, number):
                    await bench.cell(
                        f"{kind} round={number} {live.name}",
                        4,
                        lambda live=live, number=number, measure=measure: measure(
                            live, sizes, number
                        ),
                        live.server,
                    )
            say(f"controls {kind}: {sizes.control_rounds} rounds")


async def _timed(live: Live, plan: list[Request], number: int, concurrency: int) -> dict:
    started = time.perf_counter()
    results = await live.run(plan, concurrency)
    return {
        "round": number,
        "concurrency": concurrency,
        "elapsed_s": time.perf_counter() - started,
        "samples": samples(results),
    }


async def _zero_reuse(live: Live, sizes: Sizes, number: int) -> dict:
    plan = one_use(live, f"zero/{number}", sizes.control_requests, sizes.control_tokens)
    return await _timed(live, plan, number, 1)


async def _zero_reuse_busy(live: Live, sizes: Sizes, number: int) -> dict:
    plan = one_use(live, f"busy/{number}", 2 * sizes.control_requests, sizes.control_tokens, 16)
    return await _timed(live, plan, number, 16)


async def _unpressured(live: Live, sizes: Sizes, number: int) -> dict:
    prompts = Prompts(live.pool, f"unpressured/{number}")
    plan = shapes.zipf(
        prompts,
        f"unpressured/{number}",
        prefixes=4,
        prefix_tokens=sizes.control_hot_tokens,
        question_tokens=sizes.question_tokens,
        flood_tokens=1,
        requests=sizes.control_requests,
        hot_share=1.0,
        max_tokens=2,
        gaps=shapes.poisson_gaps(None, ""),
    )
    await live.reset()
    return await _timed(live, plan, number, 1)


def trace_slice(
    records: list[dict], block_tokens: int, tokens_per_s: float, load: float, cell_s: float
) -> tuple[list[dict], float]:
    """Return the first records that take `cell_s` at this load, and how much faster to send them.

    tokens_per_s: what the server prefills a second when nothing is cached.
    """
    budget, taken = tokens_per_s * load * cell_s, []
    for record in records:
        budget -= len(record["hash_ids"]) * block_tokens
        if budget < 0 and taken:
            break
        taken.append(record)
    span_s = (taken[-1]["timestamp_ms"] - taken[0]["timestamp_ms"]) / 1000
    return taken, max(span_s / cell_s, 1e-3)


async def trace(bench: Bench) -> None:
    """Part 5: a slice of a recorded hour, its hash ids turned into tokens, faster than recorded."""
    sizes = bench.sizes
    if not bench.trace.exists():
        bench.store.error(bench.part, "trace", f"{bench.trace} is not there")
        say(f"trace: {bench.trace} is not there")
        return
    records = list(shapes.read_trace(bench.trace))
    names = tuple(dict.fromkeys(sizes.trace_order))
    async with clients(bench.up("mid", names)) as lives:
        by_name = {live.name: live for live in lives}
        if "lru" not in by_name:
            return

        async def speed() -> dict:
            live = by_name["lru"]
            mean = sum(len(r["hash_ids"]) for r in records) // len(records)
            plan = one_use(live, "speed", 48, mean * sizes.trace_block_tokens)
            await live.run(plan[:8], 8)
            started = time.perf_counter()
            await live.run(plan[8:], 8)
            spent = time.perf_counter() - started
            return {"tokens_per_s": sum(len(r.prompt) for r in plan[8:]) / spent}

        measured = await bench.cell("speed", 6, speed, by_name["lru"].server)
        if measured is None:
            return
        taken, faster = trace_slice(
            records,
            sizes.trace_block_tokens,
            measured["tokens_per_s"],
            sizes.trace_load,
            sizes.trace_cell_s,
        )
        for number, name in enumerate(sizes.trace_order):
            if name in by_name:
                await bench.cell(
                    f"run={number} {name}",
                    1.2 * sizes.trace_cell_s + 5,
                    lambda name=name: _replay(by_name[name], sizes, taken, faster),
                    by_name[name].server,
                )


async def _replay(live: Live, sizes: Sizes, taken: list[dict], faster: float) -> dict:
    plan, too_long = shapes.trace(
        Prompts(live.pool, "trace"),
        taken,
        block_tokens=sizes.trace_block_tokens,
        speed=faster,
        max_model_len=live.max_len,
        max_tokens=2,
    )
    await live.reset()
    before = live.policy()
    started = time.perf_counter()
    results = await live.run(plan, OPEN_LOOP)
    rows = samples(results)
    asked, hit = sum(row[3] for row in rows), sum(row[4] for row in rows)
    say(f"trace {live.name}: {len(rows)} requests, {hit / asked:.4f} cached")
    return {
        "requests": len(rows),
        "too_long": too_long,
        "speed": faster,
        "block_tokens": sizes.trace_block_tokens,
        "elapsed_s": time.perf_counter() - started,
        "prompt_tokens": asked,
        "cached_tokens": hit,
        "samples": [row[1:] for row in rows],
        "policy_before": before,
        "policy": live.policy(),
    }


async def prestart(bench: Bench) -> None:
    """Start the large servers for the next call and return at once; use it with --keep."""
    bench.fleet.start(bench.fleet.of("large"))


PARTS = {
    part.__name__: part
    for part in (smoke, drill, long, ttft, cost, controls, trace, prestart, dp2, dp2gpu)
}
