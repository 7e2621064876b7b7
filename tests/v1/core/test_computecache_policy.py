#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Safety suite of the policy: deterministic, needs neither vLLM nor anything installed.

    python3 tests/v1/core/test_computecache_policy.py

The queue here is a small one of the same shape as vLLM's; the same properties are held
on vLLM's own BlockPool in test_computecache_block_pool.py.
"""

import dataclasses
import hashlib
import importlib.util
import logging
import random
import sys
import tracemalloc
import unittest
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[3]


def load_policy_module():
    path = ROOT / "vllm/v1/core/computecache_policy.py"
    spec = importlib.util.spec_from_file_location("computecache_policy_under_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


policy_module = load_policy_module()
ComputeCachePolicy, Settings = policy_module.ComputeCachePolicy, policy_module.Settings
NORMAL, NO_DEMOTION, LRU = policy_module.GuardState


def digest(*numbers):
    """A block hash: bytes, as uniform as vLLM's."""
    return hashlib.sha256(repr(numbers).encode()).digest()


class Block:
    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = False
        self.block_hash = None
        self.block_hash_num_tokens = None
        self.prev_free_block = self.next_free_block = None


class Queue:
    """Head and tail sentinels and links, as FreeKVCacheBlockQueue has them."""

    def __init__(self, blocks=()):
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        for block in blocks:
            self.append(block)

    def insert(self, block, before):
        previous = before.prev_free_block
        previous.next_free_block = before.prev_free_block = block
        block.prev_free_block, block.next_free_block = previous, before

    def append(self, block):
        self.insert(block, self.fake_free_list_tail)

    def prepend(self, block):
        self.insert(block, self.fake_free_list_head.next_free_block)

    def remove(self, block):
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None

    def blocks(self):
        found, block = [], self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            found.append(block)
            block = block.next_free_block
        return found

    def ids(self):
        return [block.block_id for block in self.blocks()]


def active(num_blocks, **settings):
    settings = {"mode": "active", "log_every": 0, **settings}
    return ComputeCachePolicy(Settings(**settings), num_blocks, hash_block_size=16)


class Pool:
    """As much of BlockPool as calls the policy: get, touch and free, in upstream's order."""

    def __init__(self, policy, num_blocks):
        self.policy = policy
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.queue = Queue(self.blocks)
        self.watched = set()
        self.serial = 0

    def get(self, count):
        self.policy.reorder_free_queue(self.queue, count, self.watched)
        victims = self.queue.blocks()[:count]
        for block in victims:
            self.queue.remove(block)
        for block in victims:
            self.watched.discard(block.block_id)
            self.policy.on_evicted(block)
            block.block_hash = block.block_hash_num_tokens = None
            block.ref_cnt = 1
        return victims

    def compute(self, count):
        """A new chain of `count` cached blocks, head first, in use."""
        chain = self.get(count)
        self.serial += 1
        for depth, block in enumerate(chain):
            block.block_hash = digest(self.serial, depth)
            block.block_hash_num_tokens = 16 * (depth + 1)
        return chain

    def touch(self, blocks):
        for block in blocks:
            self.policy.on_access(block)
            if block.ref_cnt == 0:
                self.queue.remove(block)
            block.ref_cnt += 1

    def free(self, blocks):
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.block_hash is None:
                self.queue.prepend(block)
            elif block.ref_cnt == 0:
                self.queue.append(block)

    def one_use(self, count):
        self.free(self.compute(count))

    def hot(self, count):
        """A chain that was computed and then reused once."""
        chain = self.compute(count)
        self.free(chain)
        self.touch(chain)
        self.free(chain)
        return chain

    def usable(self, chain, hashes):
        """Blocks of the chain that a new request would hit: a contiguous prefix."""
        count = 0
        for block, block_hash in zip(chain, hashes, strict=True):
            if block.block_hash != block_hash:
                break
            count += 1
        return count


def hashed_queue(count, **settings):
    """A policy and a queue of `count` free cached blocks, never reused."""
    policy = active(count, **settings)
    blocks = [Block(number) for number in range(count)]
    for block in blocks:
        block.block_hash = digest(block.block_id)
    return policy, blocks, Queue(blocks)


def reuse(policy, queue, block):
    """Touch a free block and free it again in its old place."""
    policy.on_access(block)
    behind = block.next_free_block
    queue.remove(block)
    queue.insert(block, behind)


class LoudQueue:
    def __getattr__(self, name):
        raise AssertionError(f"the queue was looked at: {name}")


class OffTest(unittest.TestCase):
    def test_lru_mode_returns_before_it_looks_at_the_queue(self):
        policy = ComputeCachePolicy(Settings(), 8, 16)
        policy.on_access(LoudQueue())
        policy.on_evicted(LoudQueue())
        policy.reorder_free_queue(LoudQueue(), 4, LoudQueue())
        policy.reset()
        self.assertFalse(policy.enabled)
        self.assertEqual((policy.decisions, policy.fallbacks), (0, 0))

    def test_a_reset_in_lru_mode_only_asks(self):
        policy = ComputeCachePolicy(Settings(), 8, 16)
        before = dict(vars(policy))
        policy.reset()
        self.assertEqual(vars(policy), before)

    def test_active_does_nothing_without_prefix_caching(self):
        policy = ComputeCachePolicy(Settings(mode="active"), 8, 16, enable_caching=False)
        policy.reorder_free_queue(LoudQueue(), 4, ())
        self.assertFalse(policy.enabled)

    def test_scan_limit_1_is_lru(self):
        policy, blocks, queue = hashed_queue(8, scan_limit=1)
        reuse(policy, queue, blocks[0])
        policy.reorder_free_queue(queue, 3, ())
        self.assertEqual(queue.ids(), list(range(8)))
        self.assertEqual(policy.reordered_decisions, 0)


class OrderTest(unittest.TestCase):
    def test_one_use_blocks_go_before_reused_ones(self):
        policy, blocks, queue = hashed_queue(8)
        for block in blocks[:4]:
            reuse(policy, queue, block)
        policy.reorder_free_queue(queue, 3, ())
        self.assertEqual(queue.ids()[:3], [4, 5, 6])
        self.assertEqual(sorted(queue.ids()), list(range(8)))
        self.assertEqual(policy.reordered_decisions, 1)

    def test_unhashed_blocks_go_first_of_all(self):
        policy, blocks, queue = hashed_queue(8)
        blocks[5].block_hash = None
        reuse(policy, queue, blocks[0])
        policy.reorder_free_queue(queue, 2, ())
        self.assertEqual(queue.ids()[:2], [5, 1])

    def test_equal_blocks_keep_the_queue_s_order(self):
        policy, _, queue = hashed_queue(8)
        for count in (1, 3, 8):
            policy.reorder_free_queue(queue, count, ())
            self.assertEqual(queue.ids(), list(range(8)))

    def test_among_reused_blocks_the_least_recently_used_goes_first(self):
        pool = Pool(active(64), 40)
        first, second = pool.hot(20), pool.hot(20)
        pool.touch(first)
        pool.free(first)
        victims = pool.get(5)
        self.assertEqual(victims, second[:14:-1])  # tail first

    def test_a_protected_block_is_the_last_resort(self):
        policy, blocks, queue = hashed_queue(6)
        for block in blocks[3:]:
            reuse(policy, queue, block)
        policy.reorder_free_queue(queue, 5, {0, 4})
        self.assertEqual(queue.ids()[:4], [1, 2, 3, 5])
        self.assertIn(queue.ids()[4], {0, 4})

    def test_an_unhashed_protected_block_is_last_too(self):
        pool = Pool(active(8), 8)
        pool.one_use(8)
        blocks = pool.get(2)
        pool.watched = {blocks[0].block_id}
        pool.free(blocks)
        self.assertEqual([b.block_id for b in pool.get(1)], [blocks[1].block_id])
        self.assertNotIn(blocks[0], pool.get(6))
        self.assertEqual(pool.get(1), [blocks[0]])
        self.assertEqual(pool.policy.counters.victims_protected, 1)

    def test_protected_ids_are_only_asked_for_membership(self):
        class Ids:
            def __contains__(self, block_id):
                return block_id == 0

        policy, _, queue = hashed_queue(4)
        policy.reorder_free_queue(queue, 1, Ids())
        self.assertEqual((queue.ids()[0], policy.fallbacks), (1, 0))


class ChainTest(unittest.TestCase):
    def test_losing_k_of_20_hot_blocks_leaves_20_minus_k_usable(self):
        for lost in range(21):
            pool = Pool(active(64), 40)
            chain = pool.hot(20)
            hashes = [block.block_hash for block in chain]
            pool.get(20 + lost)
            self.assertEqual(pool.usable(chain, hashes), 20 - lost)

    def test_no_cached_parent_goes_before_its_child(self):
        for seed in range(20):
            rng = random.Random(seed)
            pool = Pool(active(64, scan_limit=rng.choice((2, 3, 16, 64))), 60)
            chains = []
            for _ in range(60):
                chain = pool.compute(rng.randrange(1, 9))
                chains.append((chain, [block.block_hash for block in chain]))
                pool.free(chain)
                chain, hashes = rng.choice(chains)
                hit = chain[: pool.usable(chain, hashes)]
                pool.touch(hit[: rng.randrange(len(hit) + 1)])
                pool.free([block for block in hit if block.ref_cnt])
                for chain, hashes in chains:
                    alive = [b.block_hash == h for b, h in zip(chain, hashes, strict=True)]
                    self.assertEqual(alive, sorted(alive, reverse=True), f"seed {seed}")
            self.assertEqual(pool.policy.fallbacks, 0)

    def test_a_hot_prefix_as_large_as_half_the_pool_outlives_any_flood(self):
        for scan_limit in (2, 16, 64):
            for flood in (1, 10, 60, 120):
                pool = Pool(active(256, scan_limit=scan_limit), 255)
                chain = pool.hot(128)
                hashes = [block.block_hash for block in chain]
                for _ in range(1200 // flood):
                    pool.one_use(flood)
                kept = pool.usable(chain, hashes)
                self.assertGreaterEqual(kept, 128 if scan_limit == 64 else 116, (scan_limit, flood))


class CountingBlock(Block):
    """Notes in `seen` that somebody asked whether the block is in use or hashed."""

    seen = None

    def __getattribute__(self, name):
        if name in ("ref_cnt", "block_hash") and CountingBlock.seen is not None:
            CountingBlock.seen.add(object.__getattribute__(self, "block_id"))
        return object.__getattribute__(self, name)


class BoundTest(unittest.TestCase):
    def test_a_decision_looks_at_no_more_than_n_plus_scan_limit_minus_1_blocks(self):
        for scan_limit in (2, 3, 16, 64):
            rng = random.Random(scan_limit)
            pool = Pool(active(300, scan_limit=scan_limit), 300)
            pool.blocks = [CountingBlock(number) for number in range(300)]
            pool.queue = Queue(pool.blocks)
            running, inspected = [], 0
            for _ in range(400):
                count = rng.choice((1, 1, 2, 17, 60))
                while len(pool.queue.blocks()) < count:
                    pool.free(running.pop(0))
                CountingBlock.seen = seen = set()
                pool.policy.reorder_free_queue(pool.queue, count, pool.watched)
                CountingBlock.seen = None
                bound = count + scan_limit - 1
                self.assertLessEqual(len(seen - {-1}), bound)
                self.assertLessEqual(pool.policy.counters.inspected_blocks - inspected, bound)
                victims = pool.queue.blocks()[:count]
                for block in victims:
                    pool.queue.remove(block)
                for block in victims:
                    pool.policy.on_evicted(block)
                    pool.serial += 1
                    block.block_hash = digest(pool.serial) if rng.random() < 0.9 else None
                    block.ref_cnt = 1
                inspected = pool.policy.counters.inspected_blocks
                running.append(victims)
                if rng.random() < 0.3:
                    old = [b for b in rng.sample(pool.blocks, 20) if b.block_hash and not b.ref_cnt]
                    pool.touch(old)
                    running.append(old)
                while len(running) > 4:
                    pool.free(running.pop(rng.randrange(len(running))))
            self.assertEqual(pool.policy.fallbacks, 0)

    def test_a_decision_allocates_nothing_proportional_to_the_pool(self):
        peaks = []
        for size in (500, 50_000):
            policy, _, queue = hashed_queue(size)
            policy.reorder_free_queue(queue, 8, ())
            tracemalloc.start()
            policy.reorder_free_queue(queue, 8, ())
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        self.assertLess(peaks[1], 2 * peaks[0] + 1000)

    def test_memory_is_at_most_32_bytes_a_block(self):
        for size in (1024, 20_480, 100_000):
            tracemalloc.start()
            policy = active(size)
            spent = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            self.assertTrue(policy.enabled)
            self.assertLess(spent, 32 * size + 8000)

    def test_memory_stays_there_when_every_block_is_handed_out_alone(self):
        size = 1024
        pool = Pool(active(size), size)
        hot = pool.hot(100)
        for number in range(6 * size):
            pool.one_use(1)
            if number % 7 == 0:
                pool.touch(hot[number % 100 :][:1])
                pool.free(hot[number % 100 :][:1])
        policy = pool.policy
        words = {id(word): sys.getsizeof(word) for word in policy.lists.words}
        spent = sys.getsizeof(policy.lists.words) + sum(words.values())
        spent += sys.getsizeof(policy.model._tags) + sys.getsizeof(policy.model._last)
        self.assertLess(spent, 32 * size)


def scheduler_with(name, settings):
    """What bind_scheduler reads of vLLM's Scheduler."""
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=settings)
    return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=name and transfer))


class CompanyTest(unittest.TestCase):
    LAZY = (
        ("SimpleCPUOffloadConnector", {"lazy_offload": True}),
        ("LMCacheMPConnector", {"lmcache.mp.lazy_offload": True}),
    )

    def test_a_connector_that_stores_lazily_leaves_plain_lru_and_is_named_once(self):
        inner = [{"kv_connector": n, "kv_connector_extra_config": s} for n, s in self.LAZY]
        for name, settings in (*self.LAZY, ("MultiConnector", {"connectors": inner[1:]})):
            policy, _, queue = hashed_queue(8)
            with self.assertLogs(policy_module.logger, "WARNING") as logs:
                policy.bind_scheduler(scheduler_with(name, settings))
            policy.reorder_free_queue(queue, 2, ())
            self.assertEqual((policy.enabled, policy.decisions, len(logs.output)), (False, 0, 1))
            self.assertIn("LMCache" if "Simple" not in name else "Simple", logs.output[0])

    def test_other_connectors_and_none_change_nothing(self):
        eager = {"kv_connector": "SimpleCPUOffloadConnector", "lazy_offload": False}
        for name, settings in (
            (None, {}),
            ("OffloadingConnector", {"cpu_bytes_to_use": 1}),
            ("SimpleCPUOffloadConnector", {"lazy_offload": False}),
            ("MultiConnector", {"connectors": [eager, {"kv_connector": "ExampleConnector"}]}),
        ):
            policy, _, _ = hashed_queue(8)
            policy.bind_scheduler(scheduler_with(name, settings))
            self.assertEqual((policy.enabled, policy.pool), (True, "scheduler"))

    def test_a_scheduler_of_another_shape_is_a_counted_failure(self):
        policy, _, _ = hashed_queue(8)
        with self.assertLogs(policy_module.logger, "ERROR"):
            policy.bind_scheduler(object())
        self.assertEqual((policy.enabled, policy.fallbacks), (True, 1))

    def test_in_lru_mode_nobody_is_looked_at(self):
        policy = policy_module.ComputeCachePolicy(policy_module.Settings(), 8, 1)
        policy.bind_scheduler(object())
        self.assertEqual((policy.pool, policy.fallbacks), ("scheduler", 0))

    def test_whoever_reads_the_queue_behind_a_cursor_switches_the_policy_off(self):
        policy, blocks, queue = hashed_queue(8)
        queue.iter_blocks_after = lambda cursor: iter(blocks[cursor.block_id + 1 :])
        for _ in range(2):  # the second with the lists begun anew
            policy.reorder_free_queue(queue, 1, ())
            policy.reset()
        policy.reorder_free_queue(queue, 1, ())
        self.assertTrue(policy.enabled)
        with self.assertLogs(policy_module.logger, "WARNING") as logs:
            read = [list(queue.iter_blocks_after(blocks[5])) for _ in range(2)]
        self.assertEqual(read, [blocks[6:]] * 2)
        self.assertEqual((policy.enabled, len(logs.output)), (False, 1))
        self.assertIn("cursor", policy.off_because)


class FallbackTest(unittest.TestCase):
    def test_a_pinned_block_leaves_the_queue_as_it_was(self):
        policy, blocks, queue = hashed_queue(8)
        reuse(policy, queue, blocks[0])
        blocks[3].ref_cnt = 1
        with self.assertLogs(policy_module.logger, "WARNING") as logs:
            for _ in range(3):
                policy.reorder_free_queue(queue, 2, ())
        self.assertEqual(queue.ids(), list(range(8)))
        self.assertEqual((policy.counters.rebuilds, len(logs.output)), (3, 1))
        blocks[3].ref_cnt = 0
        policy.reorder_free_queue(queue, 2, ())
        self.assertEqual((queue.ids()[:2], policy.counters.rebuilds), ([1, 2], 3))
        self.assertEqual(policy.fallbacks, 0)

    def test_a_broken_link_is_not_followed(self):
        policy, blocks, queue = hashed_queue(8)
        blocks[4].next_free_block = None
        with self.assertLogs(policy_module.logger, "WARNING"):
            policy.reorder_free_queue(queue, 6, ())
        self.assertEqual(policy.counters.rebuilds + policy.fallbacks, 1)
        self.assertIs(queue.fake_free_list_head.next_free_block, blocks[0])

    def test_a_policy_that_keeps_failing_switches_itself_off(self):
        class Broken:
            def __bool__(self):
                raise RuntimeError("no answer")

        policy, _, queue = hashed_queue(8)
        with self.assertLogs(policy_module.logger, "WARNING") as logs:
            for _ in range(policy_module.MAX_FALLBACKS + 5):
                policy.reorder_free_queue(queue, 4, Broken())
        self.assertEqual((policy.enabled, policy.off_because), (False, "8 failures in a row"))
        self.assertEqual((policy.fallbacks, len(logs.output)), (policy_module.MAX_FALLBACKS, 2))

    def test_where_other_code_keeps_changing_the_queue_the_policy_switches_itself_off(self):
        policy, blocks, queue = hashed_queue(8)
        blocks[3].ref_cnt = 1
        with self.assertLogs(policy_module.logger, "WARNING") as logs:
            for _ in range(policy_module.MAX_REBUILDS + 5):
                policy.reorder_free_queue(queue, 1, ())
        self.assertFalse(policy.enabled)
        self.assertIn("other code", policy.off_because)
        rebuilds = policy.counters.rebuilds
        self.assertEqual((rebuilds, len(logs.output)), (policy_module.MAX_REBUILDS, 2))
        self.assertEqual(queue.ids(), list(range(8)))

    def test_an_exception_from_outside_is_counted_and_logged_once(self):
        class Broken:
            def __bool__(self):
                raise RuntimeError("no answer")

        policy, _, queue = hashed_queue(8)
        with self.assertLogs(policy_module.logger, "ERROR") as logs:
            policy.reorder_free_queue(queue, 2, Broken())
            policy.on_access(object.__new__(type("NotABlock", (), {"is_null": False})))
        self.assertEqual((policy.fallbacks, len(logs.output)), (2, 1))
        self.assertEqual(queue.ids(), list(range(8)))

    def test_no_exception_leaves_the_eviction_hook(self):
        policy, _, queue = hashed_queue(8)
        stranger = Block(99)  # of no block of this pool
        with self.assertLogs(policy_module.logger, "ERROR") as logs:
            policy.on_evicted(stranger)
            policy.on_evicted(stranger)
        self.assertEqual((policy.fallbacks, len(logs.output)), (2, 1))
        policy.reorder_free_queue(queue, 2, ())
        self.assertEqual(policy.fallbacks, 2)

    def test_a_reset_that_fails_switches_the_policy_off(self):
        policy, blocks, queue = hashed_queue(8)
        model = policy_module.ReuseModel
        policy_module.ReuseModel = None
        try:
            with self.assertLogs(policy_module.logger, "ERROR") as logs:
                policy.reset()
        finally:
            policy_module.ReuseModel = model
        self.assertEqual((policy.enabled, policy.fallbacks, len(logs.output)), (False, 1, 1))
        policy.on_access(blocks[0])
        policy.on_evicted(blocks[0])
        policy.reorder_free_queue(queue, 2, ())
        self.assertEqual((queue.ids(), policy.decisions), (list(range(8)), 0))


class ReuseTest(unittest.TestCase):
    def test_a_recycled_block_starts_clean(self):
        pool = Pool(active(8), 6)
        pool.hot(6)
        fresh = pool.compute(3)
        pool.free(fresh)
        self.assertEqual(set(pool.get(3)), set(fresh))

    def test_the_samples_of_one_request_are_not_reuse(self):
        pool = Pool(active(64), 40)
        sampled = pool.compute(8)
        for _ in range(3):
            pool.touch(sampled)
        for _ in range(4):
            pool.free(sampled)
        pool.hot(8)
        pool.one_use(24)
        self.assertEqual(set(pool.get(8)), set(sampled))

    def test_how_old_a_block_in_use_must_be_is_as_the_documents_say(self):
        for size in (1, 64, 128, 256, 511, 512, 767, 1024, 20_480, 100_000):
            model = policy_module.ReuseModel(Settings(mode="active"), size)
            blocks = policy_module.SHARED_UNITS * model.unit
            if size < 512:
                self.assertEqual(blocks, 8)
            else:
                self.assertLessEqual(blocks, size / 32)
                self.assertGreaterEqual(blocks, size / 48)

    def test_a_prefix_shared_while_in_use_is_reuse_once_it_is_old(self):
        pool = Pool(active(64), 40)
        shared = pool.compute(8)
        pool.one_use(12)
        pool.touch(shared)
        pool.free(shared)
        pool.free(shared)
        pool.one_use(12)
        hashes = [block.block_hash for block in shared]
        for _ in range(20):
            pool.one_use(12)
        self.assertEqual(pool.usable(shared, hashes), 8)

    def test_a_block_invalidated_in_the_queue_is_the_next_victim_of_its_list(self):
        pool = Pool(active(8), 6)
        chain = pool.hot(6)
        pool.policy.reorder_free_queue(pool.queue, 1, ())
        pool.policy.on_evicted(chain[0])
        chain[0].block_hash = None
        self.assertEqual(len(pool.get(6)), 6)
        self.assertEqual(pool.policy.fallbacks, 0)

    def test_reset_forgets_what_was_reused(self):
        pool = Pool(active(8), 6)
        chain = pool.hot(3)
        pool.one_use(3)
        pool.policy.reset()
        self.assertEqual(pool.get(3), chain[::-1])


def fitted(**settings):
    """A model that saw 300 hashes of each kind; one in four came back after half a pool."""
    model = policy_module.ReuseModel(Settings(mode="active", **settings), 256)
    model.reuse_events = policy_module.MIN_REUSE_EVENTS
    for number in range(300):
        for kind in range(policy_module.KINDS):
            model.advance(number)
            model.observe_computed([digest(number << 2 | kind)], kind, number)
            if number % 4 == 0 and number >= 128:
                model.observe_hits([digest(number - 128 << 2 | kind)], kind, number)
    model.advance(600)
    return model


class WeightTest(unittest.TestCase):
    REUSED, COLD = policy_module.REUSED, policy_module.COLD

    def test_reuse_weight_raises_the_worth_of_reused_blocks(self):
        low, high = fitted(reuse_weight=0), fitted(reuse_weight=640)
        age = policy_module.age_bin(128)
        self.assertGreater(high.keep[self.REUSED][age], low.keep[self.REUSED][age])
        self.assertEqual(high.keep[self.COLD], low.keep[self.COLD])

    def test_quick_demote_penalty_lowers_the_worth_of_never_reused_blocks(self):
        low, high = fitted(quick_demote_penalty=0), fitted(quick_demote_penalty=409_600)
        age = policy_module.age_bin(64)
        self.assertLess(high.index[self.COLD][age], low.index[self.COLD][age])
        self.assertEqual(high.index[self.REUSED], low.index[self.REUSED])

    def test_age_weight_lowers_the_worth_of_old_favourites(self):
        low, high = fitted(age_weight=0), fitted(age_weight=100)
        old = policy_module.age_bin(20 * 256)
        self.assertLess(high.keep[self.REUSED][old], low.keep[self.REUSED][old])

    def test_depth_weight_keeps_a_long_reused_prefix_longer(self):
        victims = {}
        for depth_weight in (0, 1):
            pool = Pool(active(512, scan_limit=4096, depth_weight=depth_weight), 400)
            pool.policy.model.index = [[1.0] * 32] * 3
            chain = pool.hot(200)
            pool.one_use(200)
            pool.policy.model.keep = [[1.0] * 32, [1.0] * 32, [0.95] * 32]
            pool.policy.reorder_free_queue(pool.queue, 8, ())
            victims[depth_weight] = pool.queue.blocks()[0] in chain
        self.assertEqual(victims, {0: True, 1: False})

    def test_demotion_is_measured_against_the_block_that_would_go_next(self):
        """Any worth, age and depth of the lists' oldest blocks; each list's index names it."""
        rng = random.Random(1)
        pool = Pool(active(512, depth_weight=1), 30)
        pool.policy.model.index = [[1.0] * 32] * 3  # no reason to demote
        pool.hot(8)
        pool.one_use(8)  # by a request that hit: continuing
        pool.one_use(8)
        pool.policy.reorder_free_queue(pool.queue, 1, ())
        lists, order, model = pool.policy.lists, pool.policy.order, pool.policy.model
        model.now = 1000
        model.index = [[1.0] * 32, [2.0] * 32, [3.0] * 32]
        places = range(policy_module.FIRST_LIST, policy_module.PROTECTED)
        fronts = {place: lists.ends[place - 1].next_free_block for place in places}
        self.assertEqual(len({block.block_id for block in fronts.values()}), 3)
        named = set()
        for _ in range(300):
            model.keep = [[rng.choice((0.8, 1.0, 1.5))] * 32 for _ in range(3)]
            for place, block in fronts.items():
                block.block_hash_num_tokens = rng.choice((16, 32_000))
                stamp = 1000 - rng.randrange(200, 210)
                kind = place - policy_module.FIRST_LIST
                word = stamp << policy_module.STAMP_SHIFT | kind << policy_module.KIND_SHIFT
                lists.words[block.block_id] = word | place
            place, _ = order._lowest(fronts)
            self.assertEqual(order._eviction_cost(), place - policy_module.FIRST_LIST + 1.0)
            named.add(place)
        self.assertEqual(named, set(places))

    def test_about_one_request_in_eight_is_not_demoted(self):
        pool = Pool(active(4096), 4000)
        pool.policy.order._eviction_cost = lambda: 1.0  # more than a never reused block is worth
        for _ in range(400):
            pool.one_use(128)
        counters = pool.policy.counters
        self.assertGreater(counters.demoted_blocks / counters.victims_never_reused, 0.7)
        self.assertLess(counters.demoted_blocks / counters.victims_never_reused, 0.97)

    def test_quick_demote_penalty_decides_a_demotion(self):
        demoted = {}
        for penalty in (0, 10**9):
            pool = Pool(active(256, quick_demote_penalty=penalty), 80)
            policy = pool.policy
            model = fitted(quick_demote_penalty=penalty)
            policy.model = policy.lists.model = policy.order.model = model
            policy._clock = 601
            pool.hot(40)
            pool.free(pool.get(1))
            policy._clock += 200  # longer idle than any reuse that was observed
            pool.one_use(40)
            pool.get(20)
            demoted[penalty] = policy.counters.demoted_blocks > 0
        self.assertEqual(demoted, {0: False, 10**9: True})


class DebtTest(unittest.TestCase):
    def test_credit_is_kept_up_to_a_pool_and_spent_in_parts(self):
        debt = policy_module.Debt(num_blocks=100, scan_limit=2)
        debt.taken = 3
        debt.bill(5, payable=True)
        self.assertEqual(debt.due(), 8 + 2 * policy_module.SAVED_SCANS)
        debt.repay(40)
        self.assertEqual((debt.owed, debt.due()), (0, 32))
        debt.repay(32)
        debt.repay(32)
        self.assertEqual(debt.due(), 4)  # 100 + 8 - 40 - 32 - 32
        debt.save(1000)
        debt.bill(1, payable=False)
        self.assertEqual(debt.owed, 0)
        for _ in range(3):
            debt.repay(32)
        self.assertEqual(debt.due(), 4)  # of one pool: 100 - 3 * 32

    def test_what_is_sorted_beside_the_decisions_is_paid_for(self):
        pool = Pool(active(256), 200)
        hot, taken = pool.hot(50), 100
        for number in range(400):
            count = 1 + number % 40
            pool.one_use(count)
            taken += count
            if number % 5 == 0:
                pool.touch(hot[:30])
                pool.free(hot[:30])
                taken += 30
        self.assertGreater(pool.policy.counters.sorted_blocks, 0)
        self.assertLessEqual(pool.policy.counters.sorted_blocks, taken + 256)


class SettingsTableTest(unittest.TestCase):
    def test_every_setting_and_counter_says_what_it_is_and_its_bounds(self):
        for setting in dataclasses.fields(Settings):
            self.assertTrue(setting.metadata["help"])
            if setting.name == "mode":
                self.assertIn(setting.default, setting.metadata["choices"])
            else:
                low, high = setting.metadata["low"], setting.metadata["high"]
                self.assertLessEqual(low, setting.default)
                self.assertLessEqual(setting.default, high)
        for counter in dataclasses.fields(policy_module.Counters):
            self.assertTrue(counter.metadata["help"].endswith("."))


class ModelTest(unittest.TestCase):
    def test_a_kind_that_comes_back_is_worth_more_than_one_that_does_not(self):
        model = policy_module.ReuseModel(Settings(mode="active", reuse_weight=0), 256)
        model.reuse_events = policy_module.MIN_REUSE_EVENTS
        for number in range(400):
            model.advance(number)
            model.observe_computed([digest(2 * number)], policy_module.COLD, number)
            model.observe_computed([digest(2 * number + 1)], policy_module.CONTINUING, number)
            if number >= 100:
                model.observe_hits([digest(2 * number - 199)], policy_module.CONTINUING, number)
        model.advance(600)
        self.assertGreater(
            model.index[policy_module.CONTINUING][0], model.index[policy_module.COLD][0]
        )

    def test_the_worth_never_falls_with_youth_or_with_reuse(self):
        model = fitted()
        for row in model.keep:
            self.assertEqual(row, sorted(row, reverse=True))
        for column in zip(*model.keep, strict=True):
            self.assertEqual(max(column), column[policy_module.REUSED])

    def test_the_index_is_the_best_hit_rate_over_the_moment_to_stop(self):
        hazards = [0.0] * policy_module.BINS
        hazards[9] = 0.5
        start, end = policy_module.BIN_STARTS[9], policy_module.BIN_STARTS[10]
        index = policy_module.gittins(hazards)
        self.assertAlmostEqual(index[0], 0.5 / (start + 0.75 * (end - start)))
        self.assertAlmostEqual(index[9], 0.5 / (0.75 * (end - start)))
        self.assertEqual(index[10], 0.0)

    def guarded(self, hits, demoted=True):
        """The guard of 256 blocks; each hash comes back a unit later and was there if `hits`."""
        model = policy_module.ReuseModel(Settings(mode="active"), 256)
        model.guard.demoted = demoted
        for number in range(1, 4 * policy_module.GUARD_LEAST):
            model.advance(number)
            model.observe_computed([digest(number)], policy_module.COLD, number)
            observe = model.observe_hits if hits(model) else model.observe_computed
            observe([digest(number - 1)], policy_module.COLD, number)
            if model.guard.compared_now:
                model.guard.settle(model.now)
        return model

    def assertGuard(self, model, state, trips):
        self.assertEqual((model.guard.state, model.guard.trips), (state, trips))

    def test_where_lru_hits_more_the_guard_ends_demotion_then_everything(self):
        model = self.guarded(lambda model: False)
        self.assertGuard(model, LRU, 2)
        model.advance(model.now + 2 * (policy_module.GUARD_POOLS + 1) * 256)
        self.assertGuard(model, NORMAL, 2)

    def test_where_demotion_was_the_fault_the_lists_stay(self):
        model = self.guarded(lambda model: model.guard.state is not NORMAL)
        self.assertGuard(model, NO_DEMOTION, 1)

    def test_where_nothing_was_demoted_lru_takes_over_at_once(self):
        model = self.guarded(lambda model: False, demoted=False)
        self.assertGuard(model, LRU, 1)

    def test_a_few_lost_hits_are_chance(self):
        last = 2 * policy_module.GUARD_LEAST
        lost = range(last - 4, last)
        model = self.guarded(lambda model: model.now not in lost)
        self.assertGuard(model, NORMAL, 0)

    def test_no_request_alone_can_trip_the_guard(self):
        for lead in (8, 64, 1000):
            guard = policy_module.ReuseModel(Settings(mode="active"), 256).guard
            guard.compared_now = policy_module.GUARD_LEAST + 1
            guard.settle(0)
            guard.compared_now = guard.lead_now = lead
            self.assertFalse(guard.settle(0), lead)

    def trip(self, model):
        """Let LRU lead until it takes over; returns for how many pools."""
        guard = model.guard
        guard.demoted = False
        for _ in range(200):
            guard.compared_now = guard.lead_now = 4
            if guard.settle(model.now):
                return (guard.until - model.now) // model.pool_units
        raise AssertionError("the guard never trips")

    def test_lru_takes_over_for_longer_each_time_and_is_forgiven_in_time(self):
        model = policy_module.ReuseModel(Settings(mode="active"), 256)
        held = []
        for _ in range(4):
            held.append(self.trip(model))
            self.assertIs(model.guard.state, LRU)
            model.advance(model.guard.until)
            self.assertIs(model.guard.state, NORMAL)
        self.assertEqual(held, [16, 32, 64, 64])
        for _ in range(2):
            model.advance(model.now + policy_module.GUARD_MAX_POOLS * model.pool_units)
        self.assertEqual(self.trip(model), 32)

    def test_a_quiet_time_halves_the_next_lru_time(self):
        model = policy_module.ReuseModel(Settings(mode="active"), 256)
        for _ in range(2):
            last = self.trip(model)
            model.advance(model.guard.until)
        self.assertEqual(last, 32)
        for expected in (32, 32, 16):  # after 1, 1 and 2 times 64 quiet pools
            quiet = 1 if expected == 32 else 2
            for _ in range(quiet):
                model.advance(model.now + policy_module.GUARD_MAX_POOLS * model.pool_units)
            self.assertEqual(self.trip(model), expected)
            model.advance(model.guard.until)

    def test_the_guard_lets_a_policy_be_that_hits_as_much(self):
        model = self.guarded(lambda model: True)
        self.assertGuard(model, NORMAL, 0)

    def test_the_horizon_is_the_age_at_which_the_pool_would_be_full(self):
        model = policy_module.ReuseModel(Settings(mode="active"), 256)
        for number in range(4000):  # one new block a clock unit
            model.advance(number)
            model.observe_computed([digest(number * 7919)], policy_module.COLD, number)
            if number == 200:
                model.find_horizon()
                self.assertEqual(model.lru_horizon, policy_module.EVER)  # nothing had to go yet
        model.find_horizon()
        self.assertAlmostEqual(model.lru_horizon, 256, delta=16)

    def test_in_guarded_order_the_oldest_front_goes_first(self):
        pool = Pool(active(64), 40)
        chain = pool.hot(20)
        pool.one_use(20)
        pool.policy.model.guard.state = LRU
        self.assertEqual(pool.get(4), chain[:15:-1])


class SettingsTest(unittest.TestCase):
    def read(self, **environ):
        return Settings.from_environ({f"COMPUTECACHE_{k}": v for k, v in environ.items()})

    def test_defaults(self):
        self.assertEqual(self.read(), Settings("lru", 64, 64, 1, 1, 4096, 256))

    def test_stray_characters_are_understood(self):
        for raw in ("active", "Active ", "'active'", "active\r", '"ACTIVE"\r\n', "\tactive"):
            with self.assertNoLogs(policy_module.logger):
                self.assertEqual(self.read(MODE=raw).mode, "active", repr(raw))
        for raw in ("32", " 32", "'32'", "32\r"):
            with self.assertNoLogs(policy_module.logger):
                self.assertEqual(self.read(SCAN_LIMIT=raw).scan_limit, 32, repr(raw))

    def test_an_invalid_value_means_the_default_and_one_warning_that_shows_it(self):
        cases = [
            ("MODE", ("activ", "on", "1", "active lru", "actïve", "lru,active", '""')),
            ("SCAN_LIMIT", ("0", "-1", "64.0", "1e3", "many", "1_000", "٦٤", "6 4", "0x40")),
            ("REUSE_WEIGHT", ("-1", "none", "nan", "9" * 5000)),
            ("LOG_EVERY", ("-256", "often")),
        ]
        for name, values in cases:
            for raw in values:
                with self.assertLogs(policy_module.logger, "WARNING") as logs:
                    self.assertEqual(self.read(**{name: raw}), Settings(), repr(raw))
                self.assertEqual(len(logs.output), 1)
                self.assertIn(f"COMPUTECACHE_{name}={raw!r}", logs.output[0])

    def test_values_above_the_upper_bound_are_cut_with_a_warning(self):
        with self.assertLogs(policy_module.logger, "WARNING") as logs:
            self.assertEqual(self.read(SCAN_LIMIT="5000").scan_limit, 4096)
        self.assertIn("'5000'", logs.output[0])

    def test_unset_and_blank_are_the_default_without_a_word(self):
        for raw in ("", "  "):
            with self.assertNoLogs(policy_module.logger):
                self.assertEqual(self.read(MODE=raw, SCAN_LIMIT=raw), Settings())

    def test_the_effective_settings_are_logged_at_start(self):
        with self.assertLogs(policy_module.logger, "INFO") as logs:
            ComputeCachePolicy.from_environ(8, 16)
        self.assertIn("scan_limit=64", "".join(logs.output))


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)
    unittest.main()
