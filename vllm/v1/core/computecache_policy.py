# SPDX-License-Identifier: Apache-2.0
"""ComputeCache: a bounded eviction policy beside vLLM's BlockPool.

BlockPool owns reference counts, hash maps, KV events and block tables. This module
only changes the order of blocks that are already free, just before BlockPool pops
its victims from the front of the free queue. `ComputeCachePolicy` says how,
`ReuseModel` says what the measured reuse is worth. docs/policy.md has the picture.
"""

import logging
import os
from array import array
from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

logger = logging.getLogger(__name__)

MODES = ("lru", "active")
MAX_SCAN_LIMIT = 4096
MAX_WEIGHT = 1_000_000_000
MAX_DIGITS = 12


@dataclass(frozen=True)
class Settings:
    """Effective settings of one policy; the defaults are the safe ones.

    mode: ``lru`` leaves the free queue alone, ``active`` reorders it.
    scan_limit: a decision for n victims looks at n + scan_limit - 1 blocks at most;
        1 means plain LRU.
    reuse_weight: strength, in sampled observations, of the belief that a block which
        was reused will be reused again. Higher keeps reused blocks longer.
    depth_weight: bonus for a reused prefix, proportional to its length; 1 doubles the
        keep value at 32,768 tokens. Higher keeps long prefixes longer.
    age_weight: how fast that belief fades, per pool's worth of allocations. Higher
        drops old favourites sooner.
    quick_demote_penalty: strength, in 1/64 observations, of the belief that a block
        which was never reused will not be. Higher demotes one-use blocks sooner.
    log_every: decisions between two summary lines in the log; 0 means none.
    """

    mode: str = "lru"
    scan_limit: int = 64
    reuse_weight: int = 64
    depth_weight: int = 1
    age_weight: int = 1
    quick_demote_penalty: int = 4096
    log_every: int = 256

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read ``COMPUTECACHE_<FIELD>``; an invalid value means its default and one warning.

        Space, CR, quotes and case around a value are understood; nothing else is guessed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = f"COMPUTECACHE_{field.name.upper()}"
            raw = environ.get(name, "")
            text = raw.strip(" \t\r\n\"'").lower()
            if not raw.strip():
                continue  # Compose passes an unset variable as an empty one
            if field.name == "mode":
                if text in MODES:
                    values["mode"] = text
                else:
                    logger.warning(
                        "%s=%r is not one of %s: using %s.",
                        name,
                        raw,
                        " | ".join(MODES),
                        field.default,
                    )
                continue
            low, high = (1, MAX_SCAN_LIMIT) if field.name == "scan_limit" else (0, MAX_WEIGHT)
            whole = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
            if not (whole and int(text) >= low):
                logger.warning(
                    "%s=%r is not a whole number from %d to %d: using %d.",
                    name,
                    raw,
                    low,
                    high,
                    field.default,
                )
            else:
                values[field.name] = min(int(text), high)
                if int(text) > high:
                    logger.warning("%s=%r is above the upper bound: using %d.", name, raw, high)
        return cls(**values)


@dataclass
class Counters:
    """What one policy has done since it was built; the metrics collector reads it."""

    decisions: int = 0  # calls with at least one victim to choose
    reordered_decisions: int = 0  # decisions that moved a victim to the front
    inspected_blocks: int = 0  # blocks looked at to make the decisions
    sorted_blocks: int = 0  # freed blocks sorted besides, at most one for each block taken
    demoted_blocks: int = 0  # never reused blocks put first in line when they were sorted
    fallbacks: int = 0  # decisions left to plain queue order by a failure
    victims_unhashed: int = 0
    victims_never_reused: int = 0
    victims_reused: int = 0
    victims_protected: int = 0
    protected_hits: int = 0  # hits on blocks older than LRU's estimated horizon
    lru_guard_trips: int = 0  # times that measured reuse did worse than LRU


COLD, CONTINUING, REUSED = range(3)  # kinds of block, see ReuseModel
KINDS = 3
BINS = 32  # ages in half octaves of a clock unit
UNITS_PER_POOL = 256  # resolution of the clock that ages are measured by
COHORTS_PER_POOL, COHORTS = 16, 128
SAMPLED_POOL = 256  # blocks of the pool that the sample stands for, at least
MAX_SAMPLE_RATE = 64  # one block hash in this many is followed, at most
HISTORY_POOLS = 8  # the sample remembers this many pools' worth of hashes
SHRINKAGE = 512.0  # observations by which a kind's reuse is pulled to the overall one
PRIOR_HAZARD = 0.25  # reuse in a half octave that reuse_weight believes in
DECAY = 0.7  # of all evidence, per pool's worth of allocations
MIN_REUSE_EVENTS = 32  # decisions with a hit before measurement replaces the fixed order
GUARD_DECAY, GUARD_SIGMAS, GUARD_SHARE, GUARD_LEAST = 0.999, 1.5, 0.02, 128
GUARD_POOLS, GUARD_MAX_POOLS = 8, 64  # how long plain LRU order is kept
DEPTH_TOKENS = 32768  # see Settings.depth_weight


def age_bin(age: int) -> int:
    """Half-octave bin of an age in clock units: 0 for 0, then 1 for each factor of sqrt 2."""
    return min((age * age).bit_length(), BINS - 1)


def _bin_starts() -> list[int]:
    starts = [BINS * BINS * 2**BINS] * (BINS + 1)
    age = 0
    for number in range(BINS):
        while age_bin(age) < number:
            age += 1
        starts[number] = age
    starts[BINS] = 2 * starts[BINS - 1]
    return starts


BIN_STARTS = _bin_starts()
BIN_WIDTHS = [b - a for a, b in pairwise(BIN_STARTS)]


class ReuseModel:
    """How soon blocks of each kind come back, measured on a sample of block hashes.

    Kinds: COLD blocks were computed by a request that hit nothing, CONTINUING blocks by
    one that extended a cached prefix; both were never reused. REUSED blocks were.

    The sample is a direct-mapped directory of hashes (1 in `mask + 1`) that outlives
    eviction, so reuse is seen whether or not the block was still there. Its ages give
    each kind a hazard per half octave (hits over blocks at risk, Kaplan-Meier), pulled
    towards the hazard of all kinds and the beliefs in Settings. The index of an age is

        max over later ages y of  P(reuse before y) / E[time in the pool until reuse or y],

    the expected hits per block and clock unit of keeping a block on (Gittins' index of
    optimal stopping; hit density in LHD, Beckmann et al., NSDI 2018). `keep` is its
    monotone hull: never lower for a younger block or a later kind, so that a parent, which
    is at least as young and as reused as its child, never ranks below it.

    The guard compares real hits on the sample with those of plain LRU: a hash that comes
    back younger than LRU's horizon, the age at which as many distinct hashes were seen
    as the pool holds, would have been a hit. Where LRU does better by more than chance,
    `lru` is set for some pools' worth of allocations, twice as long each time.

    Memory: 13 bytes for each of max(1024, 8 * num_blocks / (mask + 1)) slots.
    """

    def __init__(self, settings: Settings, num_blocks: int) -> None:
        self.settings = settings
        self.num_blocks = num_blocks
        self.unit = max(1, num_blocks // UNITS_PER_POOL)  # blocks per clock unit
        rate = 1 if num_blocks < 4 * SAMPLED_POOL else 8
        while rate < MAX_SAMPLE_RATE and rate * SAMPLED_POOL < num_blocks:
            rate *= 2
        self.rate = rate
        self.mask = rate - 1
        self.pool_units = max(1, num_blocks // self.unit)
        self._cohort_units = max(1, self.pool_units // COHORTS_PER_POOL)
        slots = max(4 * SAMPLED_POOL, HISTORY_POOLS * num_blocks // rate)
        self._tags = array("I", bytes(4 * slots))
        self._stamps = array("Q", bytes(8 * slots))
        self._kinds = bytearray(slots)
        self.reset()

    def reset(self) -> None:
        """Forget everything: the cache was emptied, its hashes mean nothing any more."""
        slots = len(self._tags)
        self._tags = array("I", bytes(4 * slots))
        self._live = [array("i", bytes(4 * (COHORTS + 1))) for _ in range(KINDS)]
        self._hits = [[0.0] * BINS for _ in range(KINDS)]
        self._lost = [[0.0] * BINS for _ in range(KINDS)]
        self._cohort = 0
        self._forgotten = -COHORTS  # the youngest cohort that is counted with the old ones
        self._next_fit = 0
        self.now = 0
        self.reuse_events = 0
        self.unobserved = 0  # blocks handed out and not yet seen with their hash
        self.lru = False
        self.lru_horizon = self.pool_units  # clock units
        self.trips = 0
        self._lru_until = 0
        self._guard_pools = GUARD_POOLS
        self._lead = self._disagreed = self._compared = 0.0
        never, again = [0.0] * BINS, [1.0] * BINS
        self.index = [never, never, again]  # until measured: never reused go first
        self.keep = [never, never, again]

    def advance(self, now: int) -> None:
        """Move the clock (in units); refit once per pool's worth of allocations."""
        self.now = now
        cohort = now // self._cohort_units
        if cohort != self._cohort:
            for number in range(max(self._cohort + 1, cohort - COHORTS + 1), cohort + 1):
                for live in self._live:
                    live[COHORTS] += live[number % COHORTS]
                    live[number % COHORTS] = 0
            self._cohort = cohort
            self._forgotten = cohort - COHORTS
        if now >= self._next_fit:
            self._next_fit = now + self.pool_units
            self._fit()

    def observe(self, tag: int, kind: int, stamp: int, hit: bool | None) -> None:
        """A sampled hash was referenced at `stamp`; `hit` says if the pool still had it.

        None: it was in use, which says nothing about the worth of keeping free blocks.
        """
        tags, stamps, kinds, live = self._tags, self._stamps, self._kinds, self._live
        slot = (tag >> 6) % len(tags)  # the low 6 bits choose the sample
        known, before, was = tags[slot], stamps[slot], kinds[slot]
        units, forgotten = self._cohort_units, self._forgotten
        tags[slot], stamps[slot], kinds[slot] = tag, stamp, kind
        cohort = stamp // units
        live[kind][cohort % COHORTS if cohort > forgotten else COHORTS] += 1
        if not known:
            return
        cohort = before // units
        live[was][cohort % COHORTS if cohort > forgotten else COHORTS] -= 1
        age = stamp - before if stamp > before else 0
        number = min((age * age).bit_length(), BINS - 1)
        if known != tag:
            self._lost[was][number] += 1
        elif hit is not None:
            self._hits[was][number] += 1
            self._compare(age <= self.lru_horizon, hit)

    def _compare(self, lru_hit: bool, hit: bool) -> None:
        self._lead = self._lead * GUARD_DECAY + lru_hit - hit
        self._disagreed = self._disagreed * GUARD_DECAY + (lru_hit != hit)
        self._compared = self._compared * GUARD_DECAY + 1
        noise = GUARD_SIGMAS * self._disagreed**0.5 + GUARD_SHARE * self._compared
        if self._compared > GUARD_LEAST and self._lead > noise and not self.lru:
            self.lru = True
            self.trips += 1
            self._lru_until = self.now + self._guard_pools * self.pool_units
            self._guard_pools = min(2 * self._guard_pools, GUARD_MAX_POOLS)

    def _fit(self) -> None:
        if self.lru and self.now >= self._lru_until:
            self.lru = False
            self._lead = self._disagreed = self._compared = 0.0
        lost = [list(row) for row in self._lost]
        self._add_live(lost)
        if self.reuse_events >= MIN_REUSE_EVENTS:
            self._rank(lost)
        for row in self._hits + self._lost:
            row[:] = [DECAY * count for count in row]

    def _add_live(self, lost: list[list[float]]) -> None:
        """Count hashes not seen again so far, and find the age of LRU's last block."""
        seen, horizon = self.unobserved / self.rate, None
        for back in range(min(COHORTS, self._cohort + 1)):
            age = back * self._cohort_units
            for kind, live in enumerate(self._live):
                count = live[(self._cohort - back) % COHORTS]
                lost[kind][age_bin(age)] += count
                seen += count
            if horizon is None and seen * self.rate >= self.num_blocks:
                horizon = age + self._cohort_units // 2
        for kind, live in enumerate(self._live):
            lost[kind][age_bin(COHORTS * self._cohort_units)] += live[COHORTS]
        self.lru_horizon = self.pool_units if horizon is None else horizon

    def _rank(self, lost: list[list[float]]) -> None:
        settings = self.settings
        overall = _hazards(
            [sum(c) for c in zip(*self._hits, strict=True)],
            [sum(c) for c in zip(*lost, strict=True)],
            [0.0] * BINS,
            0.5,
            0.0,
        )
        pulled = [SHRINKAGE * hazard for hazard in overall]
        index = []
        for kind in range(KINDS):
            if kind == REUSED:
                believed = [
                    settings.reuse_weight
                    * PRIOR_HAZARD
                    / (1 + settings.age_weight * start / self.pool_units)
                    for start in BIN_STARTS[:BINS]
                ]
                extra_hits = [a + b for a, b in zip(pulled, believed, strict=True)]
                extra_risk = SHRINKAGE + settings.reuse_weight
            else:
                extra_hits = pulled
                extra_risk = SHRINKAGE + settings.quick_demote_penalty / 64
            hazards = _hazards(self._hits[kind], lost[kind], extra_hits, extra_risk, extra_risk)
            index.append(_gittins(hazards))
        hull = [list(accumulate(reversed(row), max))[::-1] for row in index]
        for kind in (CONTINUING, REUSED):
            hull[kind] = [max(pair) for pair in zip(hull[kind - 1], hull[kind], strict=True)]
        self.index, self.keep = index, hull


def _hazards(
    hits: list[float], lost: list[float], extra_hits: list[float], floor: float, extra_risk: float
) -> list[float]:
    """Reuse per half octave: hits over blocks at risk, each with its prior (Kaplan-Meier)."""
    hazards = []
    at_risk = sum(hits) + sum(lost)
    for hit, gone, extra in zip(hits, lost, extra_hits, strict=True):
        risk = max(0.0, at_risk - gone / 2) + extra_risk
        hazards.append(min(1.0, (hit + extra) / risk) if risk > floor / 2 else 0.0)
        at_risk -= hit + gone
    return hazards


def _gittins(hazards: list[float]) -> list[float]:
    """Expected hits per clock unit from each age on, under the best moment to stop."""
    survival = list(accumulate(hazards, lambda alive, hazard: alive * (1 - hazard), initial=1.0))
    spent = [
        width * (a + b) / 2 for width, (a, b) in zip(BIN_WIDTHS, pairwise(survival), strict=True)
    ]
    index = []
    for start in range(BINS):
        best = time = 0.0
        for stop in range(start, BINS):
            time += spent[stop]
            gain = survival[start] - survival[stop + 1]
            if time and gain > best * time:
                best = gain / time
        index.append(best)
    return index


# A block's word: stamp << 7 | let through << 6 | kind << 4 | observed << 3 | place. The
# stamp is the clock unit of the last use and, once the block is sorted, of its sorting.
PLACE_MASK, OBSERVED, KIND_SHIFT, KIND_MASK, LET_THROUGH, STAMP_SHIFT = 7, 8, 4, 3, 64, 7
# Places in queue order, each a run of neighbours; 0 is the rest: in use or not sorted yet.
SPENT, FIRST_LIST, PROTECTED = 1, 2, 5  # a kind's list is at FIRST_LIST + kind
PLACES = 5
ONE_IN = 8  # never reused allocations, drawn at random, of which one is not demoted
SAVED_SCANS, SAVED_BLOCKS = 16, 1024  # scan limits, and blocks, that are sorted late at a time
MAX_FALLBACKS = 8  # decisions failing in a row after which the policy switches itself off
SHARED_UNITS = 8  # a touch of a block in use is reuse if its last use is this old


class QueueError(RuntimeError):
    """The free queue is not what BlockPool promises; the decision is left alone."""


class ComputeCachePolicy:
    """Five lists in one free queue; the least valuable list gives the victim.

    Freed blocks arrive at the tail. They are sorted, oldest first, each into the end of
    one list, and the lists are neighbours in the queue:

        front | spent | cold | continuing | reused | protected | not sorted yet | tail

    Every list keeps the order in which BlockPool freed its blocks: least recently used
    first, and the tail of a chain before its head. Victims are taken from the front of a
    list, spent blocks first (without a hash, or demoted); then, one run of equal age at a
    time, from the list whose oldest block has the lowest keep value (`ReuseModel`), ties
    to the older; blocks with a reuse watcher go last, when nothing else is left in view.

    A never reused block is demoted when it is sorted, if keeping it promises less than
    the block that would be evicted instead; one allocation in eight is let through.

    Bound: a decision for n victims looks at n + scan_limit - 1 blocks at most. Besides,
    each block that a request takes, new or from the cache, pays for sorting one freed
    block when the blocks are handed out (`sorted_blocks`), so sorting keeps up; blocks
    that have not paid yet do so later, at most 1,024 at a time. Moving a run of blocks is
    one splice. Only reset, the first decision after it and a fallback are proportional to
    the pool. Once per pool's worth of allocations the model is refitted, a fixed number
    of operations. Memory: 8 bytes a block, and the model.

    Differs from LRU only in which list gives the victim. In guarded LRU order the oldest
    front goes first, to within one clock unit (1/256 of the pool). Not promised: to tell
    a connector's pin on a free block or a preempted request's resumption from reuse, to
    know the kind of a later chunk of a long prompt (it counts as cold), or to follow
    counts when move_block_hashes gives a hash to another block.
    """

    def __init__(
        self,
        settings: Settings,
        num_blocks: int,
        hash_block_size: int,
        enable_caching: bool = True,
    ) -> None:
        self.settings = settings
        self.num_blocks = num_blocks
        self.hash_block_size = hash_block_size
        self.enabled = settings.mode == "active" and enable_caching
        self.counters = Counters()
        self.model = ReuseModel(settings, num_blocks if self.enabled else 1)
        self._warned = False
        self.reset()

    @classmethod
    def from_environ(
        cls, num_blocks: int, hash_block_size: int, enable_caching: bool = True
    ) -> "ComputeCachePolicy":
        """Build the policy of one BlockPool from ``COMPUTECACHE_*``; never raises."""
        policy = cls(Settings.from_environ(), num_blocks, hash_block_size, enable_caching)
        logger.info(
            "ComputeCache: %s, %d blocks, %s",
            "active" if policy.enabled else "plain LRU",
            num_blocks,
            policy.settings,
        )
        if os.environ.get("COMPUTECACHE_METRICS_PORT"):
            try:
                from vllm.v1.core.computecache_metrics import serve_policy

                serve_policy(policy)
            except Exception:
                logger.exception("ComputeCache: metrics are not served; serving goes on.")
        return policy

    @property
    def decisions(self) -> int:
        return self.counters.decisions

    @property
    def reordered_decisions(self) -> int:
        return self.counters.reordered_decisions

    @property
    def fallbacks(self) -> int:
        return self.counters.fallbacks

    def reset(self) -> None:
        """The prefix cache was emptied: every block is unsorted, nothing is remembered."""
        self._words = array("Q", [OBSERVED]) * (self.num_blocks if self.enabled else 0)
        self._queue = None
        self._forget_lists()
        self.model.reset()
        self._trips = self._failed = 0
        self._clock = 0  # blocks handed out or taken out of the free queue by a hit
        self._fresh = COLD  # the word of a block handed out by the current decision
        self._hit_since_decision = self._reuse_since_decision = False

    def _forget_lists(self) -> None:
        words = self._words
        if self._queue is not None:
            for block_id in range(len(words)):
                words[block_id] &= ~PLACE_MASK
        self._counts = [0] * (PLACES + 1)
        self._ends: list[Any] = []  # last block up to the end of each place; [0] is the head
        self._queue: Any = None  # the one that the lists are in
        self._protected: Container[int] = ()
        self._before: tuple[Any, int] = (None, 0)
        self._owed = 0  # freed blocks to sort when the decision's blocks are handed out
        self._saved = self.num_blocks  # blocks that have not paid yet: at first, every one
        self._taken_back = 0  # blocks touched in the free queue since the last decision

    # -- what BlockPool tells ---------------------------------------------------------

    def on_access(self, block: Any) -> None:
        """`block` is about to be touched: before it leaves the free queue, if it is free.

        A free block that is taken back counts as reuse. A block in use counts only if
        its last use is at least 1/32 of a pool old, so that the samples of one request,
        which arrive together, do not.
        """
        if not self.enabled or block.is_null:
            return
        try:
            self._access(block)
        except Exception:
            self._fall_back("on_access")

    def _access(self, block: Any) -> None:
        words, model = self._words, self.model
        block_id = block.block_id
        word = words[block_id]
        kind = word >> KIND_SHIFT & KIND_MASK
        stamp = word >> STAMP_SHIFT
        self._hit_since_decision = True
        if block.ref_cnt:
            if model.now - stamp < SHARED_UNITS:
                if kind == COLD:
                    words[block_id] = word + (CONTINUING - COLD << KIND_SHIFT)
                return
        else:
            place = word & PLACE_MASK
            if place:
                self._counts[place] -= 1
                if block is self._ends[place]:
                    head, before = self._ends[0], block.prev_free_block
                    if before is not head and not words[before.block_id] & PLACE_MASK:
                        before = head  # only blocks prepended since the last decision
                    self._set_end(place, block, before)
            self._clock += 1
            self._taken_back += 1
            if model.now - stamp > model.lru_horizon:
                self.counters.protected_hits += 1
        self._reuse_since_decision = True
        if not word & OBSERVED:
            model.unobserved -= 1
        if block.block_hash is not None:
            tag = _tag(block.block_hash)
            if not tag & model.mask:
                if not word & OBSERVED:
                    model.observe(tag, kind, stamp, False)
                model.observe(tag, REUSED, model.now, None if block.ref_cnt else True)
        words[block_id] = model.now << STAMP_SHIFT | REUSED << KIND_SHIFT | OBSERVED

    def on_evicted(self, block: Any) -> None:
        """`block` loses its hash: handed out, or invalidated where it stands."""
        if not self.enabled:
            return
        if self._owed:
            self._pay()
        if block.ref_cnt or block.next_free_block is not None:
            return  # invalidated where it stands: it is found without a hash in its turn
        words, counters = self._words, self.counters
        word = words[block.block_id]
        words[block.block_id] = self._fresh
        if word & OBSERVED:
            self.model.unobserved += 1
        if word & PLACE_MASK == PROTECTED:
            counters.victims_protected += 1
        elif block.block_hash is None:
            counters.victims_unhashed += 1
        elif word >> KIND_SHIFT & KIND_MASK == REUSED:
            counters.victims_reused += 1
        else:
            counters.victims_never_reused += 1

    def _pay(self) -> None:
        """Sort a freed block for each one that the request took, new or from the cache.

        What finds nothing to sort is saved: the blocks that it took are freed later.
        """
        owed, self._owed = self._owed, 0
        try:
            late = min(self._saved, SAVED_BLOCKS, SAVED_SCANS * self.settings.scan_limit)
            done = self._sort(owed + late)
            self._saved = min(self._saved + owed - done, self.num_blocks)
            self.counters.sorted_blocks += done
        except Exception:
            self._fall_back("sorting")

    def reorder_free_queue(
        self, queue: Any, num_blocks: int, protected_block_ids: Container[int]
    ) -> None:
        """Arrange `queue` so that its first `num_blocks` blocks are the victims.

        `protected_block_ids` is only asked for membership. Never raises: on a failure the
        queue keeps a valid order, `counters.fallbacks` grows and the first one is logged.
        """
        if not self.enabled or num_blocks < 1:
            return
        counters = self.counters
        counters.decisions += 1
        if self.settings.scan_limit > 1:
            try:
                if self._queue is not queue:
                    self._forget_lists()
                    self._queue = queue
                    self._ends = [queue.fake_free_list_head] * (PLACES + 1)
                self._protected = protected_block_ids
                self._decide(num_blocks)
                self._failed = 0
            except Exception:
                self._fall_back("a decision")
        log_every = self.settings.log_every
        if log_every and counters.decisions % log_every == 0:
            logger.info("ComputeCache: %s, lru guard %s", counters, self.model.lru)

    def _fall_back(self, where: str) -> None:
        self.counters.fallbacks += 1
        self._forget_lists()
        if not self._warned:
            self._warned = True
            logger.exception(
                "ComputeCache: %s failed; this and later failures leave the free queue's"
                " own order. Serving goes on.",
                where,
            )
        self._failed += 1
        if self._failed == MAX_FALLBACKS:
            self.enabled = False
            logger.error("ComputeCache: %d failures in a row: off from now on.", self._failed)

    # -- a decision -------------------------------------------------------------------

    def _decide(self, num_blocks: int) -> None:
        model, counters = self.model, self.counters
        self._clock += num_blocks
        now = self._clock // model.unit
        if now != model.now:
            model.advance(now)
            counters.lru_guard_trips += model.trips - self._trips
            self._trips = model.trips
        if self._reuse_since_decision:
            model.reuse_events += 1
        kind = CONTINUING if self._hit_since_decision else COLD
        self._fresh = now << STAMP_SHIFT | kind << KIND_SHIFT
        if crc32(b"%d" % counters.decisions) % ONE_IN == 0:
            self._fresh |= LET_THROUGH
        self._hit_since_decision = self._reuse_since_decision = False

        budget = num_blocks + self.settings.scan_limit - 1
        absorbed = 0
        if any(self._counts):
            absorbed, complete = self._absorb_front(budget)
            if not complete:  # more of them than the decision needs: it takes these
                counters.inspected_blocks += absorbed
                return
        self._moved = False
        budget -= absorbed
        _, spent, cold, continuing, *_ = self._counts
        spare = spent + cold + continuing >= num_blocks  # no need to touch reused blocks
        newly_sorted = self._sort(min(budget, self.settings.scan_limit - 1) if spare else budget)
        walked = self._choose(num_blocks, budget - newly_sorted)
        counters.inspected_blocks += absorbed + newly_sorted + walked
        counters.reordered_decisions += self._moved
        self._owed = num_blocks + self._taken_back
        self._taken_back = 0

    def _absorb_front(self, budget: int) -> tuple[int, bool]:
        """Add the blocks that BlockPool prepended since the last decision to spent.

        Returns how many and whether that was all; if `budget` ends first, nothing changes.
        """
        words, ends, protected = self._words, self._ends, self._protected
        found = []
        block = ends[0].next_free_block
        while not words[block.block_id] & PLACE_MASK:
            if len(found) == budget:
                return budget, False
            found.append(block)
            block = _next(block)
        end = ends[0]
        for block in found:
            place = PROTECTED if block.block_id in protected else SPENT
            if not words[block.block_id] & OBSERVED:
                self.model.unobserved -= 1
            words[block.block_id] |= OBSERVED | place
            if place == PROTECTED:
                self._move(block, block, 1, place)
                continue
            self._counts[SPENT] += 1
            if ends[SPENT] is end:  # spent was empty: these are all of it
                self._set_end(SPENT, end, block)
                end = block
        return len(found), True

    def _sort(self, budget: int) -> int:
        """Sort up to `budget` freed blocks, oldest first, into the lists; how many were."""
        block = self._ends[PLACES].next_free_block
        tail = self._queue.fake_free_list_tail
        if block is tail or not budget:
            return 0
        words, protected, model = self._words, self._protected, self.model
        mask = model.mask
        sorted_now = model.now << STAMP_SHIFT | OBSERVED
        runs: list[tuple[Any, Any, int, int]] = []  # first, last, blocks, place
        looked = start = demoted = unobserved = run_place = 0
        last_word = -1
        first = last = None
        before, before_place = self._before  # the hashed block sorted before, and where to
        while looked < budget and block is not tail:
            following = block.next_free_block
            if following is None or block.ref_cnt:
                raise QueueError(f"block {block.block_id} is in use or not linked")
            block_id = block.block_id
            word = words[block_id]
            if word != last_word:  # else the same as for the block before
                last_word = word
                fresh = not word & OBSERVED
                kind, used = word >> KIND_SHIFT & KIND_MASK, word >> STAMP_SHIFT
                hashed_place = self._place(kind, word & LET_THROUGH)
                sorted_word = sorted_now | kind << KIND_SHIFT
            unobserved += fresh
            block_hash = block.block_hash
            if block_hash is None:
                place = SPENT
            else:
                place = hashed_place
                if place < before_place and self._is_parent(block, before):
                    place = before_place
                before, before_place = block, place
                demoted += place == SPENT
                if fresh:
                    tag = crc32(block_hash) if type(block_hash) is bytes else _tag(block_hash)
                    if not tag & mask:
                        model.observe(tag, kind, used, False)
            if protected and block_id in protected:
                place = PROTECTED
            words[block_id] = sorted_word | place
            if place != run_place:
                if run_place:
                    runs.append((first, last, looked - start, run_place))
                first, start, run_place = block, looked, place
            looked += 1
            last = block
            block = following
        runs.append((first, last, looked - start, run_place))
        for run in runs:
            self._move(*run)
        self._before = before, before_place
        model.unobserved -= unobserved
        self.counters.demoted_blocks += demoted
        return looked

    def _is_parent(self, block: Any, child: Any) -> bool:
        """Whether `block`, freed right after `child`, covers one block less of its chain."""
        tokens, more = block.block_hash_num_tokens, child.block_hash_num_tokens
        return tokens is not None and more is not None and more - tokens == self.hash_block_size

    def _place(self, kind: int, let_through: int) -> int:
        """The list of a hashed block; spent if keeping it is not worth an eviction."""
        model = self.model
        if model.lru:
            return FIRST_LIST + REUSED  # the last list: nothing moves
        if kind != REUSED and not let_through:
            worth = model.index[kind][0]
            if worth < self._eviction_cost():
                return SPENT
        return FIRST_LIST + kind

    def _eviction_cost(self) -> float:
        """Index of the block that the lists would give up next."""
        model = self.model
        costs = []
        for kind in range(KINDS):
            if self._counts[FIRST_LIST + kind]:
                block = self._ends[FIRST_LIST + kind - 1].next_free_block
                age = age_bin(model.now - (self._words[block.block_id] >> STAMP_SHIFT))
                costs.append((model.keep[kind][age], -age, model.index[kind][age]))
        return min(costs)[2] if costs else 0.0

    def _choose(self, num_blocks: int, budget: int) -> int:
        """Bring the victims to the front of the queue, walking at most `budget` blocks.

        Victims for which the budget does not last are the first in the queue as it is:
        spent, then cold blocks. Returns how many blocks were walked.
        """
        words, counts, ends = self._words, self._counts, self._ends
        head = ends[0]
        need = num_blocks
        runs: list[tuple[Any, Any, int, int]] = []  # first, last, blocks, place
        spent = min(need, counts[SPENT])
        need -= spent
        walked = 0
        left = list(counts)
        fronts = {
            place: ends[place - 1].next_free_block
            for place in range(FIRST_LIST, PROTECTED)
            if counts[place]
        }
        while need and fronts:
            place, limit = self._lowest(fronts) if walked < budget else (min(fronts), None)
            first = block = fronts[place]
            length = most = min(need, left[place])
            if limit is None and most == left[place]:
                last = ends[place]
            elif limit is None and place == min(fronts):
                last = None  # what is left to choose is next in the queue as it is
            else:
                length = 0
                most = min(most, budget - walked)
                while length < most:
                    last, block = block, _next(block)
                    length += 1
                    if limit is not None and words[block.block_id] >> STAMP_SHIFT > limit:
                        break
                walked += length
            runs.append((first, last, length, place))
            need -= length
            left[place] -= length
            if left[place]:
                fronts[place] = block
            else:
                del fronts[place]

        # Everything is chosen; from here on the queue changes.
        at = ends[SPENT] if spent else head
        counts[SPENT] -= spent
        if spent and not counts[SPENT]:
            self._set_end(SPENT, at, head)
        for first, last, length, place in runs:
            counts[place] -= length
            if last is None:
                continue
            if not counts[place]:
                self._set_end(place, last, ends[place - 1])
            if first.prev_free_block is not at:
                self._moved = True
                _splice(first, last, at)
            at = last
        if need:  # only blocks with a watcher are left in view
            protected = min(need, counts[PROTECTED])
            counts[PROTECTED] -= protected
            if protected and not counts[PROTECTED]:
                self._set_end(PROTECTED, ends[PROTECTED], head)
        return walked

    def _lowest(self, fronts: dict[int, Any]) -> tuple[int, int | None]:
        """The list to take from, and the stamp up to which its blocks go first.

        None: all of them do. Equal values go by age, so that no child is left behind.
        """
        if len(fronts) == 1:
            return min(fronts), None
        model, words, now = self.model, self._words, self.model.now
        ranked = []
        for place, front in fronts.items():
            stamp = words[front.block_id] >> STAMP_SHIFT
            keep = 0.0 if model.lru else model.keep[place - FIRST_LIST][age_bin(now - stamp)]
            if place == FIRST_LIST + REUSED:
                tokens = front.block_hash_num_tokens or 0
                keep *= 1 + self.settings.depth_weight * tokens / DEPTH_TOKENS
            ranked.append((keep, stamp, place))
        ranked.sort()
        (keep, stamp, place), (next_keep, next_stamp, _) = ranked[:2]
        if model.lru:
            return place, next_stamp - 1
        if model.keep[place - FIRST_LIST][0] < next_keep:
            return place, None  # even its youngest block would go before the others' oldest
        limit = now - BIN_STARTS[age_bin(now - stamp)]
        return place, min(limit, next_stamp - 1) if keep == next_keep else limit

    # -- the lists in the queue -------------------------------------------------------

    def _move(self, first: Any, last: Any, length: int, place: int) -> None:
        """Put the run first..last, in no list so far, at the end of `place`."""
        ends = self._ends
        end = ends[place]
        self._counts[place] += length
        if first.prev_free_block is not end:
            self._moved = True
            _splice(first, last, end)
        self._set_end(place, end, last)

    def _set_end(self, place: int, old: Any, new: Any) -> None:
        """The end of `place`, and of the empty places behind it, is `new` instead of `old`."""
        ends = self._ends
        for later in range(place, PLACES + 1):
            if ends[later] is not old:
                break
            ends[later] = new


def _tag(block_hash: Any) -> int:
    """32 bits of a block hash, the same in every process for vLLM's bytes."""
    return crc32(block_hash) if type(block_hash) is bytes else hash(block_hash) & 0xFFFFFFFF


def _next(block: Any) -> Any:
    """The following block of the free queue; QueueError if that cannot be."""
    following = block.next_free_block
    if following is None or block.ref_cnt:
        raise QueueError(f"block {block.block_id} is in use or not linked")
    return following


def _splice(first: Any, last: Any, after: Any) -> None:
    """Move the neighbours first..last behind `after`, which is not one of them."""
    before, behind = first.prev_free_block, last.next_free_block
    before.next_free_block = behind
    behind.prev_free_block = before
    following = after.next_free_block
    after.next_free_block = first
    first.prev_free_block = after
    last.next_free_block = following
    following.prev_free_block = last
