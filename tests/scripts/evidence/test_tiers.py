# SPDX-License-Identifier: Apache-2.0
"""CPU tiers: which servers are compared side by side, and what is read from their counters."""

import json

import pytest

from evidence import plan
from evidence.parts.tiers import gained, tier_counters

METRICS = """\
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{source="device",engine="0"} 32
vllm:prompt_tokens_cached_by_source_total{source="host",engine="0"} 64
vllm:prompt_tokens_cached_by_source_total{source="host",engine="1"} 16
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 7
"""


def test_cached_tokens_are_told_apart_by_source_and_other_counters_left_out():
    name = "vllm:prompt_tokens_cached_by_source_total"
    assert tier_counters(METRICS) == {f"{name} device": 32, f"{name} host": 80}


def test_a_counter_that_appears_meanwhile_grew_from_zero():
    assert gained({"a": 5.0}, {"a": 7.0, "b": 3.0}) == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize("group", dict(plan.TIER_GROUPS))
def test_each_tier_runs_beside_itself_under_active_and_active_alone(group):
    names = dict(plan.TIER_GROUPS)[group]
    tiers = {name.partition("+")[2] for name in names} - {""}
    assert "active64" in names
    assert {f"{mode}+{tier}" for mode in ("lru", "active64") for tier in tiers} <= set(names)


def test_the_servers_with_a_tier_are_started_with_it_and_fit_the_gpu(tmp_path):
    shape = {"num_hidden_layers": 28, "num_key_value_heads": 8, "num_attention_heads": 16}
    shape |= {"head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072}
    (tmp_path / "small").mkdir()
    small = tmp_path / "small"
    (small / "config.json").write_text(json.dumps(shape | {"vocab_size": 151936}))
    large = plan.make_large_model(small, tmp_path / "large")
    specs = plan.specs(plan.GPU, small, large, rehearse=False)
    for group in dict(plan.TIER_GROUPS):
        assert sum(s.gib for s in specs if s.group == group) < plan.GPU.budget_gib
    by_name = {s.name: s for s in specs if s.group in dict(plan.TIER_GROUPS)}
    lazy = by_name["active64+lazy"]
    config = json.loads(lazy.args[lazy.args.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["lazy_offload"] is True
    assert (lazy.mode, by_name["lru+lazy"].mode) == ("active", "lru")
    assert "--kv-offloading-size" in by_name["lru+offload"].args
    assert "--kv-transfer-config" not in by_name["active64"].args
