# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits: alone, after floods, under load."""

from __future__ import annotations

import statistics
import time
from functools import partial

from evidence.bench import OPEN_LOOP, Bench, Live, connected, one_use
from evidence.plan import Sizes
from evidence.samples import COLUMNS, Sample, median_ttft_ms, samples
from serving import shapes
from serving.console import progress
from serving.requests import Prompts, Request


def rate_per_s(flood_ms: float, hot_ms: float, hot_share: float, load: float) -> float:
    """Return the arrivals a second that keep a server busy `load` of the time (above 1: more)."""
    return load / ((1 - hot_share) * flood_ms + hot_share * hot_ms) * 1000


def hot_share(prefixes: int, floods_per_use: float) -> float:
    """Return the share of requests that are hot, so that each prefix waits for so many floods."""
    return prefixes / (prefixes + floods_per_use)


async def ttft(bench: Bench) -> None:
    """Measure the time to first token of hits, alone, after floods and under Poisson arrivals."""
    sizes = bench.sizes
    async with connected(bench.up("large")) as lives:
        by_name = {live.name: live for live in lives}
        for live in lives:
            await bench.cell(f"warm-up {live.name}", 8, partial(_warm_up, live, sizes), live.server)
        for hot in sizes.hot_tokens:
            for live in lives:
                measure = partial(_alone, live, sizes, hot)
                await bench.cell(f"alone hot={hot} {live.name}", 10, measure, live.server)
        for name, key, hot, load, length_s, repeat in load_cells(sizes):
            alone = bench.store.cell(bench.part, f"alone hot={hot} lru")
            if name not in by_name or alone is None:
                continue
            share = hot_share(sizes.hot_set_tokens // hot, sizes.floods_per_use)
            rate = rate_per_s(alone["flood_mean_ms"], alone["hot_mean_ms"], share, load)
            live = by_name[name]
            measure = partial(_loaded, live, sizes, hot, rate, load, length_s, repeat)
            # Above 1 the queue at the end of the arrivals takes its time, too.
            need_s = length_s * max(1.2, load + 0.3) + 5
            await bench.cell(key, need_s, measure, live.server)


def load_cells(sizes: Sizes) -> list[tuple[str, str, int, float, float, int]]:
    """Server, key, hot tokens, load, seconds and seed of every loaded cell, in order.

    lru and active take turns at going first, so that two repeats make ABBA.
    """
    found = []
    for repeat in range(sizes.ttft_repeats):
        pairs, others = [], []
        for i, hot in enumerate(sizes.hot_tokens):
            for j, (load, length_s) in enumerate(zip(sizes.rates, sizes.load_s, strict=True)):
                first = ("lru", "active64")[:: 1 if (i + j + repeat) % 2 == 0 else -1]
                pairs += [(name, hot, load, length_s) for name in first]
                if load == sizes.extra_rate:
                    others += [(name, hot, load, length_s) for name in ("unpatched", "roomy")]
        for name, hot, load, length_s in pairs + others:
            key = f"load={load} hot={hot} repeat={repeat} {name}"
            found.append((name, key, hot, load, length_s, repeat))
    return found


async def _warm_up(live: Live, sizes: Sizes) -> dict:
    plan = one_use(live, "warm-up", 2, sizes.flood_tokens)
    plan += one_use(live, "warm-up-long", 1, max(sizes.hot_tokens))
    plan += one_use(live, "warm-up-short", 3, sizes.question_tokens)
    results = await live.run(plan)
    await live.run(one_use(live, "warm-up-many", 6, sizes.flood_tokens // 4), concurrency=6)
    return {"columns": COLUMNS, "samples": samples(results)}


def _hot(prompts: Prompts, sizes: Sizes, hot: int, rank: int, question: str) -> Request:
    # The names are those of shapes.zipf, so that a loaded cell's prefixes are these.
    prompt = prompts.draw(f"prefix/{rank}", hot)
    prompt = prompt + prompts.draw(f"question/{question}", sizes.question_tokens)
    return Request("hot", prompt, 2, tag={"shares": f"prefix/{rank}"})


async def _alone(live: Live, sizes: Sizes, hot: int) -> dict:
    """Hits with no flood at all, a miss, and hits after floods: one request at a time."""
    prompts = Prompts(live.pool, f"alone/{hot}")
    prefixes = sizes.hot_set_tokens // hot
    await live.reset()
    cold = await live.run([_hot(prompts, sizes, hot, r, f"cold{r}") for r in range(prefixes)])
    await live.run([_hot(prompts, sizes, hot, r, f"warm{r}") for r in range(prefixes)])
    hits = [_hot(prompts, sizes, hot, i % prefixes, f"hit{i}") for i in range(sizes.limit_hits)]
    limit = await live.run(hits)
    floods, replays = [], []
    for number in range(sizes.ttft_rounds):
        floods += await live.run(
            [
                Request("flood", prompts.draw(f"flood/{number}/{i}", sizes.flood_tokens), 2)
                for i in range(round(sizes.floods_per_use))
            ]
        )
        replays += await live.run(
            [_hot(prompts, sizes, hot, r, f"replay{number}/{r}") for r in range(prefixes)]
        )
    rows = {
        "cold": samples(cold),
        "limit": samples(limit),
        "floods": samples(floods),
        "replays": samples(replays),
    }
    flood_ms = statistics.fmean(row.ttft_ms for row in rows["floods"])
    hot_ms = statistics.fmean(row.ttft_ms for row in rows["replays"])
    progress(
        f"ttft alone hot={hot} {live.name}: cold {rows['cold'][0].ttft_ms:.0f} ms, "
        f"hit {median_ttft_ms(rows['limit']):.1f} ms, "
        f"after floods {hot_ms:.1f} ms, flood {flood_ms:.1f} ms"
    )
    return {
        "hot_tokens": hot,
        "prefixes": prefixes,
        "columns": COLUMNS,
        **rows,
        "flood_mean_ms": flood_ms,
        "hot_mean_ms": hot_ms,
        "policy": live.policy(),
    }


async def _loaded(
    live: Live, sizes: Sizes, hot: int, rate: float, load: float, length_s: float, seed: int
) -> dict:
    """Poisson arrivals of hot requests and one-use prompts; equal seeds give equal arrivals."""
    name = f"load/{hot}/{load}/{seed}"
    prompts, prefixes = Prompts(live.pool, name), sizes.hot_set_tokens // hot
    await live.reset()
    for again in range(2):
        await live.run([_hot(prompts, sizes, hot, r, f"warm{again}/{r}") for r in range(prefixes)])
    plan = shapes.zipf(
        prompts,
        name,
        prefixes=prefixes,
        prefix_tokens=hot,
        question_tokens=sizes.question_tokens,
        flood_tokens=sizes.flood_tokens,
        requests=max(4, round(rate * length_s)),
        exponent=0.0,
        hot_share=hot_share(prefixes, sizes.floods_per_use),
        max_tokens=2,
        gaps=shapes.poisson_gaps(rate, name),
    )
    before = live.policy()
    started = time.perf_counter()
    results = await live.run(plan, OPEN_LOOP)
    elapsed_s = time.perf_counter() - started
    rows = samples(results)
    progress(
        f"ttft load={load} hot={hot} repeat={seed} {live.name}: {len(rows)} in {elapsed_s:.1f} s, "
        + _shown(rows)
    )
    return {
        "hot_tokens": hot,
        "prefixes": prefixes,
        "load": load,
        "rate_per_s": rate,
        "repeat": seed,
        "elapsed_s": elapsed_s,
        "arrivals_s": sum(r.gap_s for r in plan),
        "columns": COLUMNS,
        "samples": rows,
        "policy_before": before,
        "policy": live.policy(),
    }


def _shown(rows: list[Sample]) -> str:
    """The loaded cell in a few words, for people who watch."""
    hits = [row for row in rows if row.kind == "hot"]
    floods = [row for row in rows if row.kind == "flood"]
    return (
        f"hot p50 {median_ttft_ms(hits):.0f} ms, flood p50 {median_ttft_ms(floods):.0f} ms, "
        f"cached {sum(row.cached_tokens for row in hits)} of "
        f"{sum(row.prompt_tokens for row in hits)}"
    )
