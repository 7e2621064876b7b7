# SPDX-License-Identifier: Apache-2.0
"""Any trace in the Mooncake form, in a pool that is a share of its blocks, at a share of the load
that lru can just serve."""

from __future__ import annotations

from functools import partial

from evidence.bench import Bench, connected
from evidence.parts.trace import replay
from evidence.plan import agents_pool_blocks, agents_slice
from serving.traces import TraceRow


def speed_for(taken: list[TraceRow], requests_per_s: float) -> float:
    """Return how much faster than recorded a slice arrives at `requests_per_s` on average."""
    span_s = (taken[-1].timestamp_ms - taken[0].timestamp_ms) / 1000
    return max(span_s * requests_per_s / max(len(taken) - 1, 1), 1e-3)


async def agents(bench: Bench) -> None:
    """What lru serves in a closed loop, then each server in turn with arrivals made from that."""
    sizes = bench.sizes
    taken = agents_slice(sizes, bench.trace_rows)
    names = tuple(dict.fromkeys(sizes.agents_order))
    async with connected(bench.up("agents", names)) as lives:
        by_name = {live.name: live for live in lives}
        if "lru" not in by_name:
            return
        tokens = sizes.block_size
        closed = partial(replay, by_name["lru"], taken, tokens, 0.0, sizes.agents_in_flight)
        served = await bench.cell("closed lru", sizes.agents_cell_s, closed, by_name["lru"].server)
        if served is None:
            return
        rate = sizes.agents_load * served["requests"] / served["elapsed_s"]
        speed = speed_for(taken, rate)
        for number, name in enumerate(sizes.agents_order):
            if name not in by_name:
                continue

            async def run(name: str = name) -> dict:
                found = await replay(by_name[name], taken, tokens, speed)
                return found | {"pool_blocks": agents_pool_blocks(sizes, taken), "rate": rate}

            need_s = 1.5 * served["elapsed_s"] / sizes.agents_load
            await bench.cell(f"run={number} {name}", need_s, run, by_name[name].server)
