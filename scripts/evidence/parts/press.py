# SPDX-License-Identifier: Apache-2.0
"""Hot prefixes against floods: how many tokens are still cached at each replay."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

from evidence.bench import Bench, Live, connected, kept, options
from servers.fleet import Running
from serving.console import progress
from serving.press import press


async def drill(bench: Bench) -> None:
    """Hot prefixes against floods; how many tokens are still cached at each replay."""
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
    """A long hot prefix in a larger pool."""
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
                asked_for = {n: getattr(asked, n) for n in ("hot_tokens", "flood_tokens", "seed")}
                return {**asked_for, **kept(report)}

            data = await bench.cell(f"{live.name} {key}", need_s, measure, live.server)
            if data:
                replays = [r["cached_tokens"] for r in data["replays"]]
                progress(f"{bench.part} {live.name} {key}: {replays}")

    async with connected(servers) as lives:
        done = await asyncio.gather(*map(one, lives), return_exceptions=True)
    if problems := [p for p in done if p]:
        raise problems[0]
