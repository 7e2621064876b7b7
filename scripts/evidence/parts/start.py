# SPDX-License-Identifier: Apache-2.0
"""Start servers ahead of the parts that need them."""

from __future__ import annotations

from evidence.bench import Bench, Live, connected, one_use
from evidence.samples import COLUMNS, samples
from servers.embedded import ServerError
from serving.console import progress


async def smoke(bench: Bench) -> None:
    """Start lru of both timed models first: compiles once, and finds what cannot run."""
    servers = [*bench.fleet.of("mid"), *bench.fleet.of("large")]
    wanted = [spec for spec in servers if spec.name == "lru"]
    bench.fleet.start(wanted)
    bench.fleet.wait(wanted, bench.deadline)
    up = [bench.fleet.running[s.key] for s in wanted if s.key in bench.fleet.running]
    if not up:
        raise ServerError("no server starts: " + str(bench.fleet.lost)[-3000:])
    if not bench.rehearse:
        bench.fleet.execution = max(one.execution for one in up)
    async with connected(up) as lives:
        for live in lives:

            async def probe(live: Live = live) -> dict:
                size = min(4096, live.max_len // 2)
                first = await live.run(one_use(live, "smoke", 3, size))
                again = await live.run(one_use(live, "smoke", 1, size))
                await live.reset()
                rows = samples(first + again)
                times = ", ".join(f"{row.ttft_ms:.0f} ms" for row in rows)
                progress(f"smoke {live.server.key}: first tokens after {times}")
                return {"policy": live.policy(), "columns": COLUMNS, "samples": rows}

            await bench.cell(live.server.key, 5, probe, live.server)


async def prestart(bench: Bench) -> None:
    """Start the large servers for the next call and return at once; use it with --keep."""
    bench.fleet.start(bench.fleet.of("large"))
