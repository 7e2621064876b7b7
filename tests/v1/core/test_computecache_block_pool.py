# SPDX-License-Identifier: Apache-2.0
"""The policy on vLLM's own BlockPool, patched; needs the installed, patched vLLM."""

import hashlib
import random
from types import SimpleNamespace

import pytest
import vllm.v1.core.block_pool as block_pool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.v1.core import computecache_policy as policy_module
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lab.pool import unpatched_block_pool

BLOCK_SIZE = 16


def make_pool(num_blocks, mode="active", module=block_pool, caching=True, events=False, **env):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPUTECACHE_MODE", mode)
        patch.setenv("COMPUTECACHE_LOG_EVERY", "0")
        patch.delenv("COMPUTECACHE_METRICS_PORT", raising=False)
        for name, value in env.items():
            patch.setenv(f"COMPUTECACHE_{name.upper()}", str(value))
        return module.BlockPool(
            num_blocks,
            enable_caching=caching,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=events,
        )


class Client:
    """Requests as vLLM's cache manager makes them: hit, touch, get, cache, free tail first."""

    def __init__(self, pool):
        self.pool = pool

    def hashes(self, name, count):
        return [hashlib.sha256(f"{name}/{depth}".encode()).digest() for depth in range(count)]

    def hit(self, name, count):
        """Blocks of the longest cached prefix."""
        found = []
        for block_hash in self.hashes(name, count):
            blocks = self.pool.get_cached_block(block_hash, [0])
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def start(self, name, count, cached=0, blocks=()):
        """Blocks of a request up to `count`; a later chunk goes on from its `blocks`."""
        if not cached:
            blocks = self.hit(name, count)
            cached = len(blocks)
            self.pool.touch(blocks)
        blocks = blocks + self.pool.get_new_blocks(count - cached)
        # What cache_full_blocks and its KV event read of a request.
        request = SimpleNamespace(
            block_hashes=self.hashes(name, count),
            all_token_ids=[0] * count * BLOCK_SIZE,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            session_id=None,
            num_tokens=count * BLOCK_SIZE,
        )
        self.pool.cache_full_blocks(request, blocks, cached, count, BLOCK_SIZE, 0)
        return blocks

    def finish(self, blocks):
        self.pool.free_blocks(reversed(blocks))

    def run(self, name, count):
        self.finish(self.start(name, count))


def free_blocks(pool):
    """The free queue front to tail, both directions and its length checked."""
    queue = pool.free_block_queue
    found, previous = [], queue.fake_free_list_head
    block = previous.next_free_block
    while block is not queue.fake_free_list_tail:
        assert block.prev_free_block is previous
        found.append(block)
        previous, block = block, block.next_free_block
    assert queue.fake_free_list_tail.prev_free_block is previous
    assert len(found) == queue.num_free_blocks
    return found


def check(pool):
    """Every invariant of the pool, and of the policy's lists in its queue."""
    free = free_blocks(pool)
    free_ids = {block.block_id for block in free}
    assert len(free_ids) == len(free)
    for block in pool.blocks:
        if not block.is_null:
            assert (block.block_id in free_ids) == (block.ref_cnt == 0)
    policy = pool.computecache
    assert policy.fallbacks == 0
    policy.lists.check()
    if policy.lists.queue is None:
        return
    for block in pool.blocks:
        if block.ref_cnt:
            assert not policy.lists.words[block.block_id] & policy_module.PLACE_MASK


HOT_CASES = [
    (hot, flood, scan)
    for hot in (8, 20, 40, 55)
    for flood in (10, 20, 40, 60)
    for scan in (16, 32, 64)
]


def kept_after_flood(pool, hot, flood, prompts=20):
    client = Client(pool)
    client.run("hot", hot)
    client.run("hot", hot)
    for number in range(prompts):
        client.run(f"flood {number}", flood)
    return len(client.hit("hot", hot))


@pytest.mark.parametrize(("hot", "flood", "scan_limit"), HOT_CASES)
def test_a_flood_leaves_the_hot_prefix(hot, flood, scan_limit):
    kept = kept_after_flood(make_pool(128, scan_limit=scan_limit), hot, flood)
    assert kept >= kept_after_flood(make_pool(128, "lru"), hot, flood)
    if scan_limit > hot and hot + flood + 1 <= 128:
        assert kept == hot


@pytest.mark.parametrize("prefixes", [1, 2, 4])
def test_a_hot_set_that_is_used_between_floods_is_kept(prefixes):
    """Each use frees the whole prefix again but allocates little that pays for sorting it."""
    pool = make_pool(2625)
    client = Client(pool)
    hot = 2048 // prefixes
    for _ in range(3):
        for number in range(prefixes):
            client.run(f"hot {number}", hot)
            pool.free_blocks(pool.get_new_blocks(4))
    for day in range(3):
        for number in range(6):
            client.run(f"flood {day} {number}", 256)
        for number in range(prefixes):
            assert len(client.hit(f"hot {number}", hot)) == hot
            client.run(f"hot {number}", hot)
            pool.free_blocks(pool.get_new_blocks(4))
        check(pool)


def test_losing_k_of_20_hot_blocks_leaves_20_minus_k_usable():
    for lost in range(21):
        pool = make_pool(64)
        client = Client(pool)
        client.run("hot", 20)
        client.run("hot", 20)
        pool.get_new_blocks(63 - 20 + lost)
        assert len(client.hit("hot", 20)) == 20 - lost


def random_run(pool, steps, seed, events=None):
    """A long run of every operation; a trace of what the pool did, block by block."""
    rng = random.Random(seed)
    client = Client(pool)
    running, log = [], []
    for step in range(steps):
        choice = rng.random()
        if choice < 0.5:
            name = rng.choice(("a", "b", "c", f"once {step}"))
            count = rng.randrange(1, 14)
            if count <= pool.get_num_free_blocks():
                running.append(client.start(name, count))
                log.append([block.block_id for block in running[-1]])
        elif choice < 0.9 and running:
            client.finish(running.pop(rng.randrange(len(running))))
        elif choice < 0.93 and running:
            blocks = running.pop(rng.randrange(len(running)))
            pool.unpin_blocks(blocks[::-1], lambda block: log.append(block.block_id))
        elif choice < 0.96:
            pool.evict_blocks({rng.randrange(1, pool.num_gpu_blocks)})
        elif choice < 0.97 and not running:
            log.append(pool.reset_prefix_cache())
        log.append([block.block_id for block in free_blocks(pool)])
        log.append([(block.ref_cnt, block.block_hash) for block in pool.blocks])
        if events is not None:
            events.append(pool.take_events())
    return log


def test_lru_mode_is_bit_identical_to_unpatched():
    theirs, ours = [], []
    expected = random_run(
        make_pool(60, module=unpatched_block_pool(), events=True), 3000, 7, theirs
    )
    assert random_run(make_pool(60, "lru", events=True), 3000, 7, ours) == expected
    assert [repr(event) for event in ours] == [repr(event) for event in theirs]


@pytest.mark.parametrize("scan_limit", [2, 16, 64])
def test_invariants_hold_after_every_step_of_a_random_run(scan_limit):
    rng = random.Random(scan_limit)
    pool = make_pool(60, scan_limit=scan_limit)
    client = Client(pool)
    running = []
    for step in range(2000):
        if rng.random() < 0.55:
            count = rng.randrange(1, 16)
            if count <= pool.get_num_free_blocks():
                running.append(client.start(rng.choice(("a", "b", f"once {step}")), count))
        elif running:
            client.finish(running.pop(rng.randrange(len(running))))
        check(pool)
    assert pool.computecache.decisions > 300
    assert pool.computecache.reordered_decisions > 20


def test_kv_events_remove_a_child_before_its_parent():
    pool = make_pool(40, events=True)
    client = Client(pool)
    rng = random.Random(1)
    depth_of, alive = {}, {}
    for step in range(400):
        name, count = rng.choice(("a", "b", "c", f"once {step}")), rng.randrange(1, 12)
        for depth, block_hash in enumerate(client.hashes(name, count)):
            depth_of[maybe_convert_block_hash(block_hash)] = (name, depth)
        client.run(name, count)
        for event in pool.take_events():
            if isinstance(event, BlockRemoved):
                name, depth = depth_of[event.block_hashes[0]]
                assert max(alive[name]) == depth, "a cached child was left behind"
                alive[name].discard(depth)
            else:
                for block_hash in event.block_hashes:
                    name, depth = depth_of[block_hash]
                    alive.setdefault(name, set()).add(depth)
    assert pool.computecache.counters.victims_reused > 0


@pytest.mark.parametrize("scan_limit", [2, 4, 16, 64])
def test_no_cached_child_is_left_without_its_parent(scan_limit):
    """Prompts computed in chunks, with one partial block each, while the model measures."""
    for seed in range(8):
        rng = random.Random(seed)
        pool = make_pool(rng.choice((48, 120)), scan_limit=scan_limit)
        client = Client(pool)
        names, running = {}, []
        for step in range(250):
            name = rng.choice(("a", "b", "c", f"once {step}"))
            names[name] = count = rng.randrange(1, 24)
            chunk = rng.choice((3, 100))
            if count + 1 > pool.get_num_free_blocks():
                continue
            blocks = []
            for end in range(min(chunk, count), count + chunk, chunk):
                done, blocks = blocks, client.start(name, min(end, count), len(blocks), blocks)
                assert blocks[: len(done)] == done
            running.append(blocks + pool.get_new_blocks(1))
            while len(running) > 2:
                client.finish(running.pop(rng.randrange(len(running))))
            check(pool)
            for name in ("a", "b", "c", *list(names)[-40:]):
                cached = [
                    pool.get_cached_block(h, [0]) is not None for h in client.hashes(name, 24)
                ]
                assert cached == sorted(cached, reverse=True), (seed, step, name)


def repeat_whole(client, name, count):
    """A prompt of whole blocks: vLLM computes its last block again, though it is cached."""
    blocks = client.hit(name, count - 1)
    client.pool.touch(blocks)
    client.finish(client.start(name, count, cached=len(blocks), blocks=blocks))
    return len(blocks)


@pytest.mark.parametrize(("pool_blocks", "length", "prompts"), [(512, 32, 6), (900, 64, 6)])
def test_a_last_block_that_is_computed_again_is_no_loss(pool_blocks, length, prompts):
    """LRU computes it again as well: the guard must still let the policy meet a flood."""
    pool = make_pool(pool_blocks)
    client = Client(pool)
    for _ in range(30):
        for number in range(prompts):
            repeat_whole(client, f"hot {number}", length)
    assert pool.computecache.model.guard.trips == 0
    kept = 0
    for day in range(5):
        for number in range(pool_blocks * 12 // 10 // 60):
            client.run(f"flood {day} {number}", 60)
        kept += sum(repeat_whole(client, f"hot {number}", length) for number in range(prompts))
    assert kept > 0.9 * 5 * prompts * (length - 1)
    assert pool.computecache.model.guard.trips == 0


def fresh_words(policy):
    return sum(bool(word & policy_module.FRESH) for word in policy.lists.words)


def test_a_sort_that_fails_leaves_the_books_in_order():
    pool = make_pool(512)
    client = Client(pool)
    for day in range(20):
        for blocks in [client.start(f"{day} {number}", 40) for number in range(12)]:
            client.finish(blocks)
        pinned = free_blocks(pool)[-1]
        pinned.ref_cnt = 1
        pool.free_blocks(pool.get_new_blocks(1))
        pinned.ref_cnt = 0
        assert pool.computecache.model.unobserved == fresh_words(pool.computecache)
    assert pool.computecache.counters.rebuilds == 20
    assert pool.computecache.enabled  # no more than one in a pool's worth of allocations


def test_rebuilds_in_the_eviction_hook_alone_switch_the_policy_off():
    pool = make_pool(1024)
    client = Client(pool)
    for number in range(10):
        client.run(f"a {number}", 100)
    for blocks in [client.start(f"b {number}", 90) for number in range(11)]:
        client.finish(blocks)
    free_blocks(pool)[-5].ref_cnt = 1
    for _ in range(40):
        pool.free_blocks(pool.get_new_blocks(1))
    policy = pool.computecache
    assert not policy.enabled
    assert policy.counters.rebuilds == policy_module.MAX_REBUILDS


def test_the_null_block_is_never_a_victim():
    pool = make_pool(64)
    Client(pool).run("a", 4)
    for _ in range(8):
        pool.evict_blocks({0})
    check(pool)
    assert pool.computecache.counters.victims_unhashed == 4


def test_blocks_invalidated_where_they_stand_are_victims_without_a_hash():
    pool = make_pool(64)
    client = Client(pool)
    client.run("a", 20)
    client.run("a", 20)
    for _ in range(31):
        pool.free_blocks(pool.get_new_blocks(1))
    reused = client.hit("a", 20)
    pool.evict_blocks({block.block_id for block in reused})
    before = pool.computecache.counters.victims_unhashed
    pool.get_new_blocks(63)
    counters = pool.computecache.counters
    assert counters.victims_reused == 0
    assert counters.victims_unhashed - before >= len(reused) == 20


def test_watched_blocks_go_last_and_tell_their_watcher():
    pool = make_pool(30)
    client = Client(pool)
    blocks, told = client.start("watched", 8), []
    pool.unpin_blocks(blocks[::-1], told.append)
    client.run("hot", 10)
    client.run("hot", 10)
    client.run("once", 11)
    pool.get_new_blocks(21)
    assert told == []
    check(pool)
    pool.get_new_blocks(8)
    assert sorted(block.block_id for block in told) == sorted(b.block_id for b in blocks)
    assert pool.computecache.counters.victims_protected == 8


def test_a_pinned_block_is_never_given_out():
    pool = make_pool(30)
    client = Client(pool)
    client.run("hot", 8)
    pinned = client.hit("hot", 8)
    pool.touch(pinned)
    given = pool.get_new_blocks(21)
    assert not {b.block_id for b in given} & {b.block_id for b in pinned}
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)


def test_reset_forgets_reuse_and_the_lists():
    pool = make_pool(30, events=True)
    client = Client(pool)
    client.run("hot", 8)
    client.run("hot", 8)
    client.run("once", 15)
    assert pool.reset_prefix_cache()
    assert isinstance(pool.take_events()[-1], AllBlocksCleared)
    check(pool)
    before = free_blocks(pool)
    assert pool.get_new_blocks(8) == before[:8]
    check(pool)


def test_with_caching_off_the_policy_stays_away():
    pool, plain = make_pool(30, caching=False), make_pool(30, "lru", caching=False)
    for count in (3, 5, 7):
        ours, theirs = pool.get_new_blocks(count), plain.get_new_blocks(count)
        assert [b.block_id for b in ours] == [b.block_id for b in theirs]
        pool.free_blocks(ours)
        plain.free_blocks(theirs)
    assert pool.computecache.decisions == 0


def test_a_failure_in_the_policy_does_not_stop_the_pool(monkeypatch, caplog):
    pool = make_pool(30)
    client = Client(pool)
    client.run("hot", 8)
    client.run("hot", 8)

    def fail(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(type(pool.computecache.order), "choose", fail)
    before = free_blocks(pool)
    assert pool.get_new_blocks(4) == before[:4]
    assert pool.computecache.fallbacks == 1
    assert len(free_blocks(pool)) == len(before) - 4


@pytest.mark.parametrize("mode", ["lru", "active"])
def test_a_pool_class_with_an_init_of_its_own_serves_in_plain_lru(mode):
    pool = make_pool(8, mode)

    class Own(block_pool.BlockPool):
        def __init__(self):
            vars(self).update({k: v for k, v in vars(pool).items() if k != "computecache"})

    own = Own()
    first = free_blocks(own)
    blocks = own.get_new_blocks(3)
    own.free_blocks(blocks)
    own.touch(blocks[:1])
    own.free_blocks(blocks[:1])
    assert own.reset_prefix_cache()
    assert (blocks, own.computecache.enabled) == (first[:3], False)


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, touch, free, unpin, invalidate and reset."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool(24, scan_limit=5)
        self.client = Client(self.pool)
        self.running = []
        self.serial = 0

    @rule(name=st.sampled_from("abcd"), count=st.integers(1, 9), once=st.booleans())
    def start(self, name, count, once):
        self.serial += 1
        if count <= self.pool.get_num_free_blocks():
            self.running.append(self.client.start(f"{name}{self.serial if once else ''}", count))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.client.finish(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def unpin(self, data):
        blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.unpin_blocks(blocks[::-1], lambda block: None)

    @rule(name=st.sampled_from("abcd"), keep=st.booleans())
    def pin(self, name, keep):
        blocks = self.client.hit(name, 9)
        self.pool.touch(blocks)
        if keep:
            self.running.append(blocks)
        else:
            self.client.finish(blocks)

    @precondition(lambda self: self.running and self.pool.get_num_free_blocks())
    @rule()
    def decode(self):
        self.running[-1] = self.running[-1] + self.pool.get_new_blocks(1)

    @rule(block_id=st.integers(1, 23))
    def invalidate(self, block_id):
        self.pool.evict_blocks({block_id})

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @invariant()
    def pool_is_sound(self):
        check(self.pool)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


class ForeignMachine(RuleBasedStateMachine):
    """Other code moves and takes blocks of the free queue between any two hooks."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool(24, scan_limit=5)
        self.client = Client(self.pool)
        self.running = []
        self.serial = 0

    @rule(name=st.sampled_from("abcd"), count=st.integers(1, 9), once=st.booleans())
    def start(self, name, count, once):
        self.serial += 1
        if count <= self.pool.get_num_free_blocks():
            self.running.append(self.client.start(f"{name}{self.serial if once else ''}", count))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.client.finish(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(count=st.integers(1, 3))
    def decode(self, count):
        first = free_blocks(self.pool)[:count]
        if len(first) == count:
            on = self.pool.computecache.enabled
            self.running.append(self.pool.get_new_blocks(count))
            assert on or self.running[-1] == first

    @rule(data=st.data(), count=st.integers(1, 4), whole=st.booleans(), to_front=st.booleans())
    def move(self, data, count, whole, to_front):
        """Some blocks go to an end of the queue: neighbours, or any."""
        free = free_blocks(self.pool)
        if not free:
            return
        if whole:
            at = data.draw(st.integers(0, len(free) - 1))
            chosen = free[at : at + count]
        else:
            chosen = data.draw(st.permutations(free))[:count]
        queue = self.pool.free_block_queue
        for block in chosen:
            queue.remove(block)
        (queue.prepend_n if to_front else queue.append_n)(chosen)

    @rule(data=st.data(), evict=st.booleans())
    def take(self, data, evict):
        """A block leaves the queue without a word, or with that of its eviction only."""
        free = free_blocks(self.pool)
        if not free:
            return
        block = data.draw(st.sampled_from(free))
        self.pool.free_block_queue.remove(block)
        if evict:
            self.pool._maybe_evict_cached_block(block)
        block.ref_cnt += 1
        self.running.append([block])

    @rule(data=st.data())
    def splice(self, data):
        """A run of neighbours moves to the middle of the queue, by its links alone."""
        free = free_blocks(self.pool)
        if len(free) < 3:
            return
        first = data.draw(st.integers(0, len(free) - 2))
        last = data.draw(st.integers(first, len(free) - 2))
        rest = free[:first] + free[last + 1 :]
        policy_module._splice(free[first], free[last], data.draw(st.sampled_from(rest)))

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @invariant()
    def queue_is_whole(self):
        free = free_blocks(self.pool)
        ids = {block.block_id for block in free}
        assert len(ids) == len(free)
        for block in self.pool.blocks:
            if not block.is_null:
                assert (block.block_id in ids) == (block.ref_cnt == 0)
        assert self.pool.computecache.fallbacks == 0


TestForeignMachine = ForeignMachine.TestCase
TestForeignMachine.settings = settings(TestPoolMachine.settings, max_examples=150)
