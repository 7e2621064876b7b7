# SPDX-License-Identifier: Apache-2.0
"""The chapter of docs/results.md on time to first token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from page.plots import after_floods, under_load
from page.stats import (
    NoEvidence,
    goodput,
    limits_ms,
    median,
    paired_ratio,
    percentiles,
    prefill,
    samples,
    server_name,
    ttfts_ms,
)
from page.text import SERVERS, named, ratio_text, table, yes

LIMIT_RATIO, LRU_RATIO, WORSE = 1.15, 3.0, 1.02  # the goals


def ttft(part: dict, pictures: Path, budget_ms: float) -> str:
    """One request at a time, then Poisson arrivals; draws both pictures."""
    sizes = part["calls"][-1]["sizes"]
    alone = [c for key, c in part["cells"].items() if key.startswith("alone")]
    loaded = [c for key, c in part["cells"].items() if key.startswith("load")]
    hots = ", or ".join(
        f"{sizes['hot_set_tokens'] // hot} of {hot:,}" for hot in sizes["hot_tokens"]
    )
    text = (
        f"Qwen3-8B shape, {sizes['large_blocks']:,} blocks of {sizes['block_size']} tokens. "
        f"`roomy` is lru with {sizes['roomy_blocks']:,} blocks, enough to lose nothing. The hot "
        f"prefixes have {sizes['hot_set_tokens']:,} tokens together: {hots}. A hot request is a "
        f"prefix and a question of {sizes['question_tokens']} tokens. A one-use prompt has "
        f"{sizes['flood_tokens']:,} tokens; on average {sizes['floods_per_use']:.0f} of them come "
        "between two uses of a prefix.\n\n"
    )
    limits = limits_ms(alone)
    if alone:
        text += _alone(alone, limits, sizes)
        after_floods(alone, limits, pictures / "ttft_after_floods.svg")
        text += f"\n![TTFT after floods](results/{pictures.name}/ttft_after_floods.svg)\n\n"
    if loaded:
        text += _loaded(loaded, limits, budget_ms)
        under_load(loaded, limits, pictures / "ttft_under_load.svg")
        text += f"\n![TTFT under load](results/{pictures.name}/ttft_under_load.svg)\n"
    return text


def headline(parts: dict[str, dict]) -> str:
    """README's first sentence: hot TTFT after floods, at the shortest of the hot prefixes.

    Raises NoEvidence when lru or active 64 was not measured there.
    """
    if "ttft" not in parts:
        raise NoEvidence("the part `ttft` was not measured")
    part = parts["ttft"]
    call = part["calls"][-1]
    sizes, hot = call["sizes"], min(call["sizes"]["hot_tokens"])
    middle_ms = {
        server_name(cell): median(ttfts_ms(samples(cell, "replays")))
        for key, cell in part["cells"].items()
        if key.startswith("alone") and cell["hot_tokens"] == hot
    }
    if not {"lru", "active64"} <= set(middle_ms):
        raise NoEvidence(f"no cell says how lru and active 64 serve {hot} hot tokens")
    gpu = call["gpus"][0].split(",")[0] if call["gpus"] else "a CPU"
    return (
        f"**A shared prefix of {hot:,} tokens, asked for again after "
        f"{sizes['floods_per_use']:.0f} one-use prompts: {middle_ms['lru']:.0f} ms to the first "
        f"token under vLLM's LRU, {middle_ms['active64']:.0f} ms with ComputeCache** (medians; one "
        f"{gpu}, the shape of an 8B model; [all results](docs/results.md))."
    )


def _alone(cells: list[dict], limits: dict[int, float], sizes: dict) -> str:
    rows, goals = [], []
    for hot, limit in limits.items():
        found = {server_name(c): _Alone(c, limit) for c in cells if c["hot_tokens"] == hot}
        rows += [[f"{hot:,}", named(n), *found[n].numbers()] for n in SERVERS if n in found]
        if {"lru", "active64"} <= set(found):
            goals.append(_goal(hot, found["active64"], found["lru"]))
    head = ["hot", "server", "no flood p50 ms", "its own", "p50 ms", "p95 ms", "x no flood"]
    head += ["x its own", "cached %"]
    return (
        "### One request at a time\n\nTTFT of a hot request after "
        f"{sizes['floods_per_use']:.0f} one-use prompts. `no flood` is the TTFT of a hit with no "
        "one-use prompt before it, as the median over all servers. `its own` is that on this "
        "server alone.\n\n"
        f"{table(head, rows)}\n\n" + "\n".join(goals) + "\n"
    )


class _Alone:
    """Hot requests of one cell after floods, beside hits with no flood. Times are in ms."""

    def __init__(self, cell: dict, limit: float) -> None:
        replays = samples(cell, "replays")
        self.limit = limit
        self.own = median(ttfts_ms(samples(cell, "limit")))
        self.middle, self.high, _ = percentiles(ttfts_ms(replays))
        self.ratio, self.own_ratio = self.middle / limit, self.middle / self.own
        cached = sum(row["cached_tokens"] for row in replays)
        self.cached = cached / sum(row["prompt_tokens"] for row in replays)

    def numbers(self) -> list[str]:
        times = [f"{ms:.1f}" for ms in (self.limit, self.own, self.middle, self.high)]
        return [*times, f"{self.ratio:.2f}", f"{self.own_ratio:.2f}", f"{100 * self.cached:.1f}"]


def _goal(hot: int, active: _Alone, lru: _Alone) -> str:
    holds = active.ratio <= LIMIT_RATIO and lru.ratio >= LRU_RATIO
    return (
        f"* {hot:,} hot tokens: active 64 took {active.ratio:.2f} times as long as a hit without a "
        f"flood, lru {lru.ratio:.2f} times. Goal, active 64 at most {LIMIT_RATIO} times and lru at "
        f"least {LRU_RATIO:.0f} times: {yes(holds)}. Compared with each server's own "
        f"hit: {active.own_ratio:.2f} and {lru.own_ratio:.2f} times."
    )


def _loaded(cells: list[dict], limits: dict[int, float], budget_ms: float) -> str:
    rows, ratios = [], []
    for hot, load in sorted({(c["hot_tokens"], c["load"]) for c in cells}):
        here = [c for c in cells if (c["hot_tokens"], c["load"]) == (hot, load)]
        for name in SERVERS:
            if of_name := [c for c in here if server_name(c) == name]:
                numbers = _load_row(of_name, limits.get(hot), budget_ms)
                rows.append([f"{hot:,}", f"{load:g}", named(name), *numbers])
        ratios.append([f"{hot:,}", f"{load:g}", *_over_lru(here)])
    head = ["hot", "load", "server", "requests/s", "hot n", "hot p50 / p95 / p99 ms"]
    head += ["x no flood", "one-use p50 / p95 / p99 ms", f"inside {budget_ms:.0f} ms"]
    head += ["inside, per s", "computed Mtok", "saved Mtok"]
    return (
        "### Poisson arrivals\n\n`load` is the arrival rate, as a share of the highest rate at "
        "which lru can serve one request at a time. Prompts and arrival times are the same for "
        f"every server. `inside {budget_ms:.0f} ms` is the share of requests with a TTFT of at "
        "most that, and `inside, per s` is how many of them there were a second. `computed` are "
        "prompt tokens that were prefilled, `saved` those that came from the cache.\n\n"
        f"{table(head, rows)}\n\n"
        "Active 64 divided by lru, from equal requests (requests/s: from equal repeats): geometric "
        "mean, 95 % bootstrap interval and number of pairs. Requests of one run wait for each "
        "other, so the true intervals of TTFT are wider. Goal: requests/s at least "
        f"{2 - WORSE:.2f}, one-use TTFT at most {WORSE:.2f}.\n\n"
        + table(["hot", "load", "requests/s", "one-use TTFT", "hot TTFT"], ratios)
        + "\n"
    )


def _load_row(cells: list[dict], limit: float | None, budget_ms: float) -> list[str]:
    rows = [row for cell in cells for row in samples(cell)]
    of_kind = {kind: ttfts_ms(rows, kind) for kind in ("hot", "flood")}
    shown = {k: " / ".join(f"{v:.0f}" for v in percentiles(of_kind[k])) for k in of_kind}
    inside, per_s = goodput(cells, budget_ms)
    computed, saved = prefill(cells)
    return [
        f"{len(rows) / sum(c['elapsed_s'] for c in cells):.2f}",
        str(len(of_kind["hot"])),
        shown["hot"],
        f"{median(of_kind['hot']) / limit:.2f}" if limit else "-",
        shown["flood"],
        f"{100 * inside:.1f} %",
        f"{per_s:.2f}",
        f"{computed / 1e6:.2f}",
        f"{saved / 1e6:.2f}",
    ]


def _over_lru(cells: list[dict]) -> list[str]:
    """Requests a second, one-use TTFT and hot TTFT of active 64 over lru, as text."""

    def ratio(values: Callable[[dict], dict]) -> str:
        sides = []
        for name in ("active64", "lru"):
            of_name = [c for c in cells if server_name(c) == name]
            sides.append({k: v for c in of_name for k, v in values(c).items()})
        return ratio_text(paired_ratio(*sides))

    def times(kind: str) -> Callable[[dict], dict]:
        return lambda cell: {
            (cell["repeat"], i): row["ttft_ms"]
            for i, row in enumerate(samples(cell))
            if row["kind"] == kind
        }

    rate = ratio(lambda cell: {cell["repeat"]: len(cell["samples"]) / cell["elapsed_s"]})
    return [rate, ratio(times("flood")), ratio(times("hot"))]
