# SPDX-License-Identifier: Apache-2.0
"""KV tiers below a real KVCacheManager: the schedulers' halves of offload connectors.

A tier is told what the engine does, in this order, and moves no data: the classes that choose
what to store and to load are the real ones, a transfer is complete one engine step later.

    offer(request, device_tokens)  tokens that the tier would load behind the device's hit
    started(request, tokens)       so many were loaded, and the request has its blocks
    step(new)                      an engine step ran; `new` is the request it started, if any
    finished(request)              the request ended, and its blocks are about to be freed
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

BLOCK_TOKENS = 16


class NoTier:
    """What the device loses is computed again."""

    def offer(self, request: Any, device_tokens: int) -> int:
        return 0

    def started(self, request: Any, tokens: int) -> None:
        pass

    def step(self, new: Any) -> None:
        pass

    def finished(self, request: Any) -> None:
        pass


class SimpleTier:
    """vLLM's SimpleCPUOffloadConnector: a second BlockPool; lazy stores follow a queue cursor."""

    def __init__(self, manager: Any, config: Any, blocks: int, lazy: bool) -> None:
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

        self._manager = manager
        tokens = 1 << 20
        vllm_config = SimpleNamespace(
            kv_events_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
            speculative_config=None,
            model_config=SimpleNamespace(max_model_len=tokens),
            max_in_flight_tokens=tokens,
            num_prefill_lookahead_tokens=0,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        )
        block_bytes = config.kv_cache_tensors[0].block_stride
        size = blocks * block_bytes
        self.scheduler = SimpleCPUOffloadScheduler(
            vllm_config, config, size, BLOCK_TOKENS, BLOCK_TOKENS, lazy_offload=lazy
        )
        self.scheduler.bind_gpu_block_pool(manager.block_pool)
        self._running: dict[str, Any] = {}

    def offer(self, request: Any, device_tokens: int) -> int:
        return self.scheduler.get_num_new_matched_tokens(request, device_tokens)[0] or 0

    def started(self, request: Any, tokens: int) -> None:
        blocks = self._manager.get_blocks(request.request_id)
        self.scheduler.update_state_after_alloc(request, blocks, tokens)
        self._running[request.request_id] = request

    def step(self, new: Any) -> None:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        fresh = []
        if new is not None:
            ids = self._manager.get_block_ids(new.request_id)
            fresh = [SimpleNamespace(req_id=new.request_id, block_ids=ids)]
        others = [name for name in self._running if new is None or name != new.request_id]
        cached = SimpleNamespace(
            req_ids=others, new_block_ids=[None] * len(others), resumed_req_ids=set()
        )
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(
                preempted_req_ids=None,
                finished_req_ids=set(),
                kv_connector_block_state=None,
                scheduled_new_reqs=fresh,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=dict.fromkeys(self._running, 1),
            )
        )
        loaded = meta.load_event_to_reqs.get(meta.load_event, [])
        stored = {meta.store_event: 1} if meta.store_event >= 0 else {}
        self.scheduler.update_connector_output(
            SimpleNamespace(
                finished_recving=set(loaded),
                finished_sending=set(),
                kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(
                    completed_store_events=stored
                ),
            )
        )

    def finished(self, request: Any) -> None:
        ids = self._manager.get_block_ids(request.request_id)
        self.scheduler.request_finished_all_groups(request, ids)
        del self._running[request.request_id]


class LMCacheTier:
    """LMCache's eviction-aware store queue over a tier that keeps the last used blocks.

    The queue is LMCache's own; what its manager does with it (pin, store, unpin parent first)
    is repeated here, since the manager needs a running LMCache server.
    """

    def __init__(self, manager: Any, blocks: int) -> None:
        from lmcache.integration.vllm.lazy_offload_policy.eviction_aware import (
            EvictionAwarePolicyConfig,
            EvictionAwareStoreQueue,
        )

        self._manager = manager
        self._pool = manager.block_pool
        self._queue = EvictionAwareStoreQueue(EvictionAwarePolicyConfig(), self._pool)
        self._blocks = blocks
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._in_flight: list[tuple[str, list[Any]]] = []
        self._ended: set[str] = set()
        self._allocated = 0

    def offer(self, request: Any, device_tokens: int) -> int:
        first = device_tokens // BLOCK_TOKENS
        most = (request.num_tokens - 1) // BLOCK_TOKENS
        found = 0
        for block_hash in request.block_hashes[first:most]:
            if bytes(block_hash) not in self._stored:
                break
            self._stored.move_to_end(bytes(block_hash))
            found += 1
        return found * BLOCK_TOKENS

    def started(self, request: Any, tokens: int) -> None:
        known = request.num_computed_tokens // BLOCK_TOKENS
        blocks = self._manager.get_blocks(request.request_id).blocks[0]
        hashes = request.block_hashes
        self._allocated = len(blocks) - known
        fresh = {
            block.block_id: block.block_hash
            for block, block_hash in zip(blocks, hashes, strict=False)
            if bytes(block_hash) not in self._stored
        }
        if fresh:
            range_of_tokens = SimpleNamespace(start=0, end=len(hashes) * BLOCK_TOKENS)
            meta = SimpleNamespace(request_id=request.request_id, op=range_of_tokens)
            self._queue.add(meta, fresh)

    def step(self, new: Any) -> None:
        from lmcache.integration.vllm.lazy_offload_policy.base import DrainSignals

        for _, blocks in self._in_flight:
            for block in blocks:
                self._keep(bytes(block.block_hash)[:-4])
            self._pool.free_blocks(blocks)
        self._in_flight.clear()
        taken, self._allocated = self._allocated, 0
        drain = self._queue.drain(DrainSignals(taken, taken, self._ended, set()))
        for item in drain.items:
            for _, hashes in item.metadatas:
                blocks = [self._pool.blocks[block_id] for block_id in hashes]
                if any(b.block_hash != hashes[b.block_id] for b in blocks):
                    break
                self._pool.touch(blocks)
                self._in_flight.append((item.request_id, blocks))

    def finished(self, request: Any) -> None:
        self._ended.add(request.request_id)

    def _keep(self, block_hash: bytes) -> None:
        self._stored[block_hash] = None
        self._stored.move_to_end(block_hash)
        while len(self._stored) > self._blocks:
            self._stored.popitem(last=False)
