# SPDX-License-Identifier: Apache-2.0
"""A slice of a recorded hour, its hash ids turned into tokens, faster than recorded."""

from __future__ import annotations

import time
from functools import partial

from evidence.bench import OPEN_LOOP, Bench, Live, connected, one_use
from evidence.samples import COLUMNS, samples
from serving import shapes
from serving.console import progress
from serving.requests import Prompts
from serving.traces import TraceRow


def trace_slice(
    rows: list[TraceRow], block_tokens: int, tokens_per_s: float, load: float, cell_s: float
) -> tuple[list[TraceRow], float]:
    """Return the first rows that take `cell_s` at this load, and how much faster to send them.

    tokens_per_s: what the server prefills a second when nothing is cached.
    """
    budget = tokens_per_s * load * cell_s
    taken: list[TraceRow] = []
    for row in rows:
        budget -= len(row.hash_ids) * block_tokens
        if budget < 0 and taken:
            break
        taken.append(row)
    span_s = (taken[-1].timestamp_ms - taken[0].timestamp_ms) / 1000
    return taken, max(span_s / cell_s, 1e-3)


async def trace(bench: Bench) -> None:
    """A slice of a recorded hour, its hash ids turned into tokens, faster than recorded."""
    sizes = bench.sizes
    rows = bench.trace_rows
    names = tuple(dict.fromkeys(sizes.trace_order))
    async with connected(bench.up("mid", names)) as lives:
        by_name = {live.name: live for live in lives}
        if "lru" not in by_name:
            return

        async def speed() -> dict:
            live = by_name["lru"]
            mean = sum(len(row.hash_ids) for row in rows) // len(rows)
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
            rows,
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
                    partial(replay, by_name[name], taken, sizes.trace_block_tokens, faster),
                    by_name[name].server,
                )


async def replay(
    live: Live, taken: list[TraceRow], block_tokens: int, speed: float, in_flight: int = OPEN_LOOP
) -> dict:
    """Send a slice of a trace to an emptied cache; returns what a cell keeps.

    speed: how much faster than recorded; 0 sends in a closed loop of `in_flight` requests.
    """
    plan, too_long = shapes.trace(
        Prompts(live.pool, "trace"),
        taken,
        block_tokens=block_tokens,
        speed=speed,
        max_model_len=live.max_len,
        max_tokens=2,
    )
    await live.reset()
    before = live.policy()
    started = time.perf_counter()
    results = await live.run(plan, in_flight)
    elapsed_s = time.perf_counter() - started
    rows = samples(results)
    asked = sum(row.prompt_tokens for row in rows)
    hit = sum(row.cached_tokens for row in rows)
    progress(f"trace {live.name}: {len(rows)} requests, {hit / asked:.4f} cached")
    return {
        "requests": len(rows),
        "too_long": too_long,
        "speed": speed,
        "block_tokens": block_tokens,
        "elapsed_s": elapsed_s,
        "prompt_tokens": asked,
        "cached_tokens": hit,
        "columns": COLUMNS,
        "samples": rows,
        "policy_before": before,
        "policy": live.policy(),
    }
