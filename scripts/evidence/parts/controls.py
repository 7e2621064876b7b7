# SPDX-License-Identifier: Apache-2.0
"""Traffic without reuse, and reuse without pressure; every round on every server."""

from __future__ import annotations

import time
from functools import partial

from evidence.bench import Bench, Live, connected, fill, one_use, order_of_round
from evidence.plan import Sizes
from evidence.samples import COLUMNS, samples
from serving import shapes
from serving.console import progress
from serving.requests import Prompts, Request


async def controls(bench: Bench) -> None:
    """Traffic without reuse, and reuse without pressure; every round on every server."""
    sizes = bench.sizes
    async with connected(bench.up("mid", sizes.mid_timed)) as lives:
        for live in lives:
            await fill(live, sizes)
        for kind, measure in (
            ("zero-reuse", _zero_reuse),
            ("zero-reuse-busy", _zero_reuse_busy),
            ("unpressured", _unpressured),
        ):
            for number in range(sizes.control_rounds):
                for live in order_of_round(lives, number):
                    await bench.cell(
                        f"{kind} round={number} {live.name}",
                        4,
                        partial(measure, live, sizes, number),
                        live.server,
                    )
            progress(f"controls {kind}: {sizes.control_rounds} rounds")


async def _timed(live: Live, plan: list[Request], number: int, concurrency: int) -> dict:
    started = time.perf_counter()
    results = await live.run(plan, concurrency)
    return {
        "round": number,
        "concurrency": concurrency,
        "elapsed_s": time.perf_counter() - started,
        "columns": COLUMNS,
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
