# SPDX-License-Identifier: Apache-2.0
"""The policy beside real connectors' scheduler halves: found tokens, and who is switched off."""

import pytest

from lab import tier_traffic
from lab.pool import policy_environment
from lab.tier_traffic import Cell, Engine, make_manager, make_tier, play
from lab.tiers import SimpleTier

pytest.importorskip("lmcache", reason="not installed: bash scripts/setup_env.sh lmcache")


def cell(tier, mode, traffic="hot+flood", times=7):
    return Cell(traffic, tier, times, in_flight=1, pool_blocks=300, seed=1, mode=mode)


@pytest.mark.parametrize("tier", ["simple lazy", "lmcache lazy"])
def test_a_lazy_tier_finds_what_it_finds_in_lru(tier):
    lru, active = play(cell(tier, "lru")), play(cell(tier, "active"))
    assert lru["tier_found"] > 0.1
    assert "LRU order" in active["off_because"]
    assert active["found"] >= lru["found"] - 0.005


def test_beside_an_eager_tier_the_policy_stays_on_and_more_is_found_on_the_device():
    lru, active = play(cell("simple eager", "lru")), play(cell("simple eager", "active"))
    assert active["off_because"] == ""
    assert active["device"] > lru["device"] + 0.05
    assert active["found"] >= lru["found"] - 0.005


def test_a_cursor_is_noticed_where_nobody_told_of_the_connector():
    manager, config = make_manager(300, "active")
    with policy_environment("active", {}):
        tier = SimpleTier(manager, config, 2100, lazy=True)
    engine = Engine(manager, tier, in_flight=1)
    policy = manager.block_pool.computecache
    prompts = tier_traffic.hot_flood(1)
    engine.play(next(prompts))
    for _ in range(3):
        engine.play(next(prompts))
    assert not policy.enabled
    assert "cursor" in policy.off_because
    assert tier.scheduler.cpu_block_pool.computecache.enabled, "the CPU pool's own stays on"


def test_the_tiers_find_what_the_device_lost_and_nothing_else():
    """A document that comes back after a flood is in each tier, and another is in none."""
    for tier in ("simple eager", "simple lazy", "lmcache lazy"):
        manager, config = make_manager(100, "lru")
        engine = Engine(manager, make_tier(tier, manager, config, 1000, "lru"), in_flight=1)
        document = list(range(320))
        engine.play(document)
        for number in range(1, 12):
            engine.play([token + 1000 * number for token in range(480)])
        assert (engine.device_tokens, engine.tier_tokens) == (0, 0), tier
        engine.play([*document, 7])
        assert engine.device_tokens + engine.tier_tokens == len(document), tier
        assert engine.tier_tokens > 0, tier
