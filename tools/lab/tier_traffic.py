# SPDX-License-Identifier: Apache-2.0
"""The policy beside a KV tier: traffic played on a real KVCacheManager, and what is found where."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from lab.pool import policy_environment
from lab.tiers import BLOCK_TOKENS, LMCacheTier, NoTier, SimpleTier

VOCABULARY = 30_000
STEPS_PER_REQUEST = 3  # engine steps between two starts: a transfer is over before the next
Prompt = list[int]


def _text(random: Random, tokens: int) -> Prompt:
    return [random.randrange(VOCABULARY) for _ in range(tokens)]


def sessions(seed: int) -> Iterator[Prompt]:
    """Forty chats of twelve turns, each turn the whole history and some 120 tokens more."""
    random = Random(seed)
    chats = [_text(random, random.randrange(150, 600)) for _ in range(40)]
    for _ in range(12):
        for chat in random.sample(chats, len(chats)):
            yield list(chat)
            chat += _text(random, random.randrange(60, 240))


def loop(seed: int) -> Iterator[Prompt]:
    """Forty documents of 500 tokens, one after another and again, each with a new question."""
    random = Random(seed)
    documents = [_text(random, 500) for _ in range(40)]
    for number in range(700):
        yield documents[number % len(documents)] + _text(random, 40)


def hot_flood(seed: int) -> Iterator[Prompt]:
    """Four in ten prompts begin with one of eight shared prefixes; the others are used once."""
    random = Random(seed)
    hot = [_text(random, 640) for _ in range(8)]
    for _ in range(900):
        if random.random() < 0.4:
            yield random.choice(hot) + _text(random, 60)
        else:
            yield _text(random, random.randrange(200, 900))


TRAFFIC: dict[str, Callable[[int], Iterator[Prompt]]] = {
    "sessions": sessions,
    "loop": loop,
    "hot+flood": hot_flood,
}


def make_manager(blocks: int, mode: str) -> tuple[Any, Any]:
    """A real KVCacheManager of one full-attention group, and its KVCacheConfig."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    tensor = KVCacheTensor(size=blocks * 1024, layers=["layer"], layer_stride=0, block_stride=1024)
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    with policy_environment(mode, {"log_every": 0}):
        manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
    return manager, config


TIERS: dict[str, tuple[str | None, dict[str, Any]]] = {  # the connector, and its settings
    "none": (None, {}),
    "simple eager": ("SimpleCPUOffloadConnector", {"lazy_offload": False}),
    "simple lazy": ("SimpleCPUOffloadConnector", {"lazy_offload": True}),
    "lmcache lazy": ("LMCacheMPConnector", {"lmcache.mp.lazy_offload": True}),
}


def make_tier(name: str, manager: Any, config: Any, blocks: int, mode: str) -> Any:
    """A tier of `blocks` blocks; its own BlockPool, if it has one, is in `mode`, too.

    The manager's policy is told of the connector, as the scheduler tells it.
    """
    connector, settings = TIERS[name]
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=settings)
    manager.block_pool.computecache.bind_scheduler(
        SimpleNamespace(
            vllm_config=SimpleNamespace(kv_transfer_config=transfer if connector else None)
        )
    )
    if connector is None:
        return NoTier()
    if connector == "LMCacheMPConnector":
        return LMCacheTier(manager, blocks)
    with policy_environment(mode, {"log_every": 0}):
        return SimpleTier(manager, config, blocks, lazy=settings["lazy_offload"])


class Engine:
    """Starts requests one after another, at most `in_flight` at a time; counts tokens found."""

    def __init__(self, manager: Any, tier: Any, in_flight: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._manager, self._tier, self._in_flight = manager, tier, in_flight
        self._running: deque[Any] = deque()
        self._started = 0
        self.prompt_tokens = self.device_tokens = self.tier_tokens = 0

    def play(self, prompt: Prompt) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        manager, tier = self._manager, self._tier
        if len(self._running) == self._in_flight:
            self.finish_oldest()
        manager.new_step_starts()
        self._started += 1
        request = Request(
            str(self._started),
            prompt,
            SamplingParams(max_tokens=8),
            None,
            block_hasher=self._hasher,
        )
        while True:
            blocks, device, *_ = manager.get_computed_blocks(request)
            external = tier.offer(request, device)
            rest = request.num_tokens - device - external
            given = manager.allocate_slots(
                request, rest, device, blocks, num_external_computed_tokens=external
            )
            if given is not None:
                break
            self.finish_oldest()
        tier.started(request, external)
        request.num_computed_tokens = request.num_tokens
        self._running.append(request)
        self.prompt_tokens += request.num_tokens
        self.device_tokens += device
        self.tier_tokens += external
        for number in range(STEPS_PER_REQUEST):
            tier.step(None if number else request)

    def finish_oldest(self) -> None:
        request = self._running.popleft()
        self._tier.finished(request)
        self._manager.free(request)


@dataclass(frozen=True)
class Cell:
    """One run: `times` is the tier's size in device pools, `pool_blocks` that of the device."""

    traffic: str
    tier: str
    times: int
    in_flight: int
    pool_blocks: int
    seed: int
    mode: str


def play(cell: Cell) -> dict[str, Any]:
    """Shares of the prompt tokens of one cell that were found on the device and in the tier."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    manager, config = make_manager(cell.pool_blocks, cell.mode)
    blocks = cell.times * cell.pool_blocks
    tier = make_tier(cell.tier, manager, config, blocks, cell.mode)
    engine = Engine(manager, tier, cell.in_flight)
    for prompt in TRAFFIC[cell.traffic](cell.seed):
        engine.play(prompt)
    total = engine.prompt_tokens
    policy = manager.block_pool.computecache
    return {
        "device": round(engine.device_tokens / total, 4),
        "tier_found": round(engine.tier_tokens / total, 4),
        "found": round((engine.device_tokens + engine.tier_tokens) / total, 4),
        "fallbacks": policy.fallbacks + policy.counters.rebuilds,
        "off_because": policy.off_because,
    }
