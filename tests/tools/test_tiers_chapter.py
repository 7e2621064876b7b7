# SPDX-License-Identifier: Apache-2.0
"""The chapter on CPU tiers: its answer, its bars and what went over PCIe."""

from page import tiers

COLUMNS = ["kind", "ttft_ms", "total_ms", "prompt_tokens", "cached_tokens"]


def cell(name, ms, group="offload", **counters):
    return {
        "server": f"{group}:{name}",
        "group": group,
        "hot_tokens": 8192,
        "round": 0,
        "columns": COLUMNS,
        "replays": [["hot", ms, ms, 100, 75]],
        "counters": counters,
    }


def test_the_answer_is_made_of_the_ratios_and_pcie_is_shown_where_it_is_counted():
    to_cpu, from_cpu = (f"{tiers.MOVED} {way}" for way in ("GPU_to_CPU", "CPU_to_GPU"))
    cells = [
        cell("active64", 20.0),
        cell("lru+offload", 100.0, **{to_cpu: 2.0**31, from_cpu: 2.0**32}),
        cell("active64+offload", 30.0, **{to_cpu: 2.0**31, from_cpu: 0.0}),
    ]
    text = tiers.tiers({"cells": dict(enumerate(cells))})
    assert text.startswith("With the policy and no tier a hot request waited 0.20 times as long")
    assert "With both it waited 1.50 times as long as with the policy alone." in text
    assert "| 8192 | offload | lru+offload | 100.0 | 1 | 75.0% | 2.0 | 4.0 |" in text
    assert "| 8192 | offload | active 64+offload | 30.0 | 1 | 75.0% | 2.0 | 0.0 |" in text
    assert "| 8192 | offload | active 64 | 20.0 | 1 | 75.0% | - | - |" in text
    assert "| active 64 / lru+offload | 8192 | 0.200 (n=1) | 0.7 | met |" in text
    assert "| active 64+offload / active 64 | 8192 | 1.500 (n=1) | 1.05 | **missed** |" in text


def test_without_a_pair_nothing_is_claimed():
    text = tiers.tiers({"cells": {"a": cell("active64", 20.0)}})
    assert "waited" not in text
