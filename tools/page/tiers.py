# SPDX-License-Identifier: Apache-2.0
"""The chapter on CPU tiers behind the GPU's cache."""

from __future__ import annotations

from page.stats import median, paired_ratio, rounds, samples, server_name, ttfts_ms
from page.text import named, ratio_text, table, yes

BARS = (  # first server, second, most of the ratio, hot prefixes that it is asked at
    ("active64", "lru+offload", 0.7, (8192, 16384)),
    ("active64", "lru+simple", 0.7, (8192, 16384)),
    ("active64", "lru+lazy", 0.7, (8192, 16384)),
    ("active64+offload", "active64", 1.05, (8192, 16384, 32768)),
    ("active64+simple", "active64", 1.05, (8192, 16384, 32768)),
)
MEANING = """\
`+offload` is vLLM's `--kv-offloading-size`, `+simple` its SimpleCPUOffloadConnector and `+lazy` the
same with `lazy_offload`, each with 20 GiB of CPU memory. With `+lazy` the policy of the GPU's pool
switches itself off ([connectors.md](connectors.md)). Rounds of new prompts, one request at a time;
the servers of a group took turns with the same prompts. Ratios pair the rounds of one group.
`to CPU` and `from CPU` are what went over PCIe in a round after the prefixes were warm, in GiB; the
Simple connector does not count it."""
MOVED = "vllm:kv_offload_total_bytes_total"


def replay_ms(cell: dict) -> float:
    """Median TTFT of the hot requests of a round, after floods."""
    return median(ttfts_ms(samples(cell, "replays")))


def tiers(part: dict) -> str:
    """What each server took, then each bar as a paired ratio."""
    cells = list(part["cells"].values())
    groups = list(dict.fromkeys(cell["group"] for cell in cells))
    head = ("hot tokens", "group", "server", "TTFT ms", "rounds", "hits", "to CPU", "from CPU")
    rows = []
    ratios: dict[str, list[float]] = {"alone": [], "beside": []}
    for first, second, most, hots in BARS:
        for hot in hots:
            for group in groups:
                here = [c for c in cells if c["group"] == group and c["hot_tokens"] == hot]
                found = paired_ratio(
                    rounds(here, first, replay_ms), rounds(here, second, replay_ms)
                )
                if found:
                    of = f"{named(first)} / {named(second)}"
                    ratios["beside" if "+" in first else "alone"].append(found[0])
                    rows.append((of, hot, ratio_text(found), most, yes(found[0] <= most)))
    bars = table(("TTFT of", "hot tokens", "ratio", "at most", "bar"), rows)
    return "\n\n".join([_answer(ratios), MEANING, table(head, _rows(cells)), bars])


def _answer(ratios: dict[str, list[float]]) -> str:
    """The chapter's question answered with the least and the most of each kind of ratio."""
    said = []
    for kind, text in (
        ("alone", "With the policy and no tier a hot request waited {} times as long as in lru"),
        ("beside", "With both it waited {} times as long as with the policy alone"),
    ):
        if found := ratios[kind]:
            span = " to ".join(dict.fromkeys(f"{r:.2f}" for r in (min(found), max(found))))
            said.append(text.format(span) + (" with a tier." if kind == "alone" else "."))
    return " ".join(
        [
            *said,
            "A tier keeps what the pool has no room for; the policy",
            "keeps on the GPU what is used again, so that it need not come back over PCIe.",
        ]
    )


def _rows(cells: list[dict]) -> list[tuple[object, ...]]:
    """One row for each server and size: median of its rounds, and hot tokens found in any cache."""
    keys = dict.fromkeys((c["hot_tokens"], c["group"], server_name(c)) for c in cells)
    found: list[tuple[object, ...]] = []
    for hot, group, name in sorted(keys):
        mine = [
            c for c in cells if (c["hot_tokens"], c["group"], server_name(c)) == (hot, group, name)
        ]
        replays = [row for c in mine for row in samples(c, "replays")]
        share = sum(r["cached_tokens"] for r in replays) / sum(r["prompt_tokens"] for r in replays)
        ms = median(replay_ms(c) for c in mine)
        moved = (_moved_gib(mine, way) for way in ("GPU_to_CPU", "CPU_to_GPU"))
        found.append((hot, group, named(name), f"{ms:.1f}", len(mine), f"{share:.1%}", *moved))
    return found


def _moved_gib(cells: list[dict], way: str) -> str:
    """Median GiB a round that were moved, "-" where the connector does not count it."""
    counted = [c["counters"][key] for c in cells if (key := f"{MOVED} {way}") in c["counters"]]
    return f"{median(counted) / 2**30:.1f}" if counted else "-"
