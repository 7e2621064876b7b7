# SPDX-License-Identifier: Apache-2.0
"""Which servers run together and how much they are sent."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from evidence import plan
from evidence.parts import ttft
from serving.traces import TraceRow

SMALL = {
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "num_attention_heads": 16,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def models(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(SMALL))
    (small / "tokenizer.json").write_text("{}")
    return small, plan.make_large_model(small, tmp_path / "large")


def test_the_large_model_has_qwen3_8bs_size_and_the_small_ones_tokenizer(models):
    config = json.loads((models[1] / "config.json").read_text())
    assert plan.weight_bytes(config) / 2 == pytest.approx(8.19e9, rel=0.01)
    assert plan.weight_bytes(SMALL) / 2 == pytest.approx(0.596e9, rel=0.01)
    assert (models[1] / "tokenizer.json").exists()


def test_a_block_of_the_small_model_holds_28_layers_of_keys_and_values():
    assert plan.block_bytes(SMALL, 16) == 2 * 28 * 8 * 128 * 2 * 16


def test_the_groups_that_run_together_fit_on_the_gpu(models):
    sizes = plan.GPU
    gib = Counter()
    for spec in plan.specs(sizes, *models, rehearse=False):
        gib[spec.group] += spec.gib
    assert gib["small"] + gib["mid"] < sizes.budget_gib
    assert gib["large"] < sizes.budget_gib
    assert all(gib[group] < sizes.budget_gib for group in dict(sizes.tier_groups))
    assert sizes.budget_gib < 140


def rows_of(*hash_ids):
    return [TraceRow(1000 * i, 512 * len(h), 1, list(h), 512) for i, h in enumerate(hash_ids)]


def test_the_agents_pool_is_a_share_of_what_is_sent():
    sizes = replace(plan.GPU, agents_tokens=16 * 100_000, agents_share=0.25, large_max_len=1600)
    rows = rows_of([], *[[0, 10 * i, 10 * i + 1] for i in range(1, 9001)], range(200))
    taken = plan.agents_slice(sizes, rows)
    assert taken == rows[1:9001], "one is empty, one longer than a server takes"
    assert plan.agents_pool_blocks(sizes, taken) == round(0.25 * 18_001)
    assert plan.agents_slice(replace(sizes, agents_tokens=16 * 10), rows) == rows[1:4]


def test_the_agents_pool_holds_the_longest_request_of_a_server():
    sizes = replace(plan.GPU, agents_share=0.01, large_max_len=1600)
    assert plan.agents_pool_blocks(sizes, rows_of([1, 2, 3])) == 101


def test_the_agents_servers_are_there_with_a_trace_only(models):
    without = plan.specs(plan.GPU, *models, rehearse=False)
    assert "agents" not in {spec.group for spec in without}
    found = [s for s in plan.specs(plan.GPU, *models, False, 3000) if s.group == "agents"]
    assert [(s.name, s.blocks, s.execution) for s in found] == [
        ("lru", 3000, 0),
        ("active64", 3000, 0),
    ]


def test_every_prompt_fits_its_server(models):
    sizes = plan.GPU
    assert max(sizes.drill_hot_tokens + sizes.drill_flood_tokens) + 4 <= 1024
    assert max(sizes.hot_tokens) + sizes.question_tokens + 2 <= sizes.large_max_len
    assert sizes.large_blocks * sizes.block_size > sizes.large_max_len
    decoding = sizes.cost_requests * (2 * sizes.block_size + sizes.cost_max_tokens)
    assert decoding < (sizes.mid_blocks - 1) * sizes.block_size  # nothing is preempted


def test_the_hot_set_fits_the_pool_and_lru_must_lose_it():
    sizes = plan.GPU
    pool = sizes.large_blocks * sizes.block_size
    assert pool > sizes.hot_set_tokens + 2 * sizes.flood_tokens
    assert pool < sizes.hot_set_tokens + 0.5 * sizes.floods_per_use * sizes.flood_tokens


def test_modes_are_read_off_the_servers_names():
    assert [plan.modes(n) for n in ("unpatched", "lru", "roomy", "active16")] == [
        (None, 0),
        ("lru", 64),
        ("lru", 64),
        ("active", 16),
    ]


def test_a_prefix_waits_for_so_many_floods_on_average():
    share = ttft.hot_share(prefixes=4, floods_per_use=6)
    assert (1 - share) / (share / 4) == pytest.approx(6)


def test_arrivals_keep_a_server_busy_for_the_share_that_was_asked_for():
    rate = ttft.rate_per_s(flood_ms=100, hot_ms=500, hot_share=0.25, load=0.8)
    assert rate * (0.75 * 0.1 + 0.25 * 0.5) == pytest.approx(0.8)


def test_lru_and_active_take_turns_at_going_first():
    cells = ttft.load_cells(replace(plan.GPU, ttft_repeats=2))
    names = [(name, hot, load, repeat) for name, _, hot, load, _, repeat in cells]
    assert len({key for _, key, *_ in cells}) == len(cells)
    for hot in plan.GPU.hot_tokens:
        for load in plan.GPU.rates:
            order = [
                n for n, h, r, _ in names if (h, r) == (hot, load) and n in ("lru", "active64")
            ]
            assert order in (
                ["lru", "active64", "active64", "lru"],
                ["active64", "lru", "lru", "active64"],
            )
