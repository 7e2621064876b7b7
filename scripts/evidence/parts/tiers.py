# SPDX-License-Identifier: Apache-2.0
"""Hot prefixes after floods, with and without a CPU tier behind the GPU's cache."""

from __future__ import annotations

import math
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from evidence.bench import Bench, Live, connected, order_of_round
from evidence.plan import Sizes
from evidence.samples import COLUMNS, Sample, median_ttft_ms, samples
from serving.console import progress
from serving.metrics import fetch
from serving.requests import Prompts, Request

# Which series there are depends on the connector, so an absent one is left out and not made 0.
SERIES = ("prompt_tokens_cached", "external_prefix_cache", "prefix_cache", "kv_offload")


def tier_counters(text: str) -> dict[str, float]:
    """Counters of the cache and its tiers on /metrics, in their own units.

    A key is the sample's name, with its source and type of transfer where it has one.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "counter" or not family.name.removeprefix("vllm:").startswith(SERIES):
            continue
        for sample in family.samples:
            labels = [sample.labels[k] for k in ("source", "transfer_type") if k in sample.labels]
            key = " ".join([sample.name, *labels])
            if not sample.name.endswith("_created"):
                found[key] = found.get(key, 0.0) + sample.value
    return found


def gained(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each counter grew by; a counter that appeared meanwhile grew from 0."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


async def tiers(bench: Bench) -> None:
    """Each group of servers in turn: rounds of new prompts, every server with the same ones."""
    sizes = bench.sizes
    for group, _ in sizes.tier_groups:
        async with connected(bench.up(group)) as lives:
            for hot, rounds in zip(sizes.hot_tokens, sizes.tier_rounds, strict=True):
                for number in range(rounds):
                    for live in order_of_round(lives, number):
                        key = f"{group} hot={hot} round={number} {live.name}"
                        measure = partial(_round, live, sizes, group, hot, number)
                        await bench.cell(key, sizes.tier_cell_s, measure, live.server)


async def _round(live: Live, sizes: Sizes, group: str, hot: int, number: int) -> dict:
    """Warm new prefixes, then floods and replays in turns, one request at a time.

    The prompts are new: an emptied GPU cache leaves the CPU tier as it is.
    """
    prompts = Prompts(live.pool, f"tiers/{group}/{hot}/{number}")
    prefixes = range(sizes.hot_set_tokens // hot)

    def asked(turn: str) -> list[Request]:
        prefix = [prompts.draw(f"prefix{i}", hot) for i in prefixes]
        ends = [prompts.draw(f"{turn}/{i}", sizes.question_tokens) for i in prefixes]
        return [Request("hot", a + b, 2) for a, b in zip(prefix, ends, strict=True)]

    await live.reset()
    await live.run(asked("cold"))
    await live.run(asked("warm"))
    before = tier_counters(fetch(f"{live.server.base_url}/metrics"))
    floods: list[Sample] = []
    replays: list[Sample] = []
    for turn in range(sizes.tier_turns):
        one_use = [
            prompts.draw(f"flood/{turn}/{i}", sizes.flood_tokens)
            for i in range(math.ceil(sizes.floods_per_use))
        ]
        floods += samples(await live.run([Request("flood", prompt, 2) for prompt in one_use]))
        replays += samples(await live.run(asked(f"replay{turn}")))
    after = tier_counters(fetch(f"{live.server.base_url}/metrics"))
    progress(f"tiers hot={hot} {live.name}: {median_ttft_ms(replays):.1f} ms")
    return {
        "hot_tokens": hot,
        "round": number,
        "group": group,
        "columns": COLUMNS,
        "floods": floods,
        "replays": replays,
        "counters": gained(before, after),
        "policy": live.policy(),
    }
