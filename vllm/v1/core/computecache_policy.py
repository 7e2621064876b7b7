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
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import expm1
from random import Random
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
    victims_protected: int = 0  # that had been sorted; the hook cannot tell others
    protected_hits: int = 0  # hits on blocks older than LRU's estimated horizon
    lru_guard_trips: int = 0  # times that measured reuse did worse than LRU


COLD, CONTINUING, REUSED = range(3)  # kinds of block, see ReuseModel
KINDS = 3
BINS = 32  # ages in half octaves of a clock unit
UNITS_PER_POOL = 256  # resolution of the clock that ages are measured by
COHORTS_PER_POOL, COHORTS = 16, 128
SAMPLED_POOL = 1024  # blocks of the pool that the sample stands for, at least
MAX_SAMPLE_RATE = 64  # one block hash in this many is followed, at most
HISTORY_POOLS = 8  # the sample remembers this many pools' worth of hashes
LEAST_SLOTS = 512  # of the directory
SHRINKAGE = 256.0  # observations by which a kind's reuse is pulled to the overall one
PRIOR_HAZARD = 0.25  # reuse in a half octave that reuse_weight believes in
DECAY = 0.7  # of all evidence, per pool's worth of allocations
MIN_REUSE_EVENTS = 48  # decisions with a hit before measurement replaces the fixed order
GUARD_WINDOW, GUARD_LEAST_WINDOW = 4, 512  # sampled pools, comparisons
GUARD_SIGMAS, GUARD_PRIOR, GUARD_SHARE, GUARD_LEAST = 1.0, 36.0, 0.002, 64  # see settle
GUARD_POOLS, GUARD_MAX_POOLS = 8, 64  # how long the guard holds
EVER = 1 << 62  # an age that nothing reaches
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

    The sample is a direct-mapped directory of hashes (1 in `rate`: digests, in bytes, that
    are `below` a bound) that outlives eviction, so reuse is seen whether or not the block
    was still there. Its ages give each kind a hazard per half octave (hits over blocks at
    risk, Kaplan-Meier), pulled towards the hazard of all kinds and the beliefs in Settings.
    The index of an age is

        max over later ages y of  P(reuse before y) / E[time in the pool until reuse or y],

    the expected hits per block and clock unit of keeping a block on (Gittins' index of
    optimal stopping; hit density in LHD, Beckmann et al., NSDI 2018). `keep` is its
    monotone hull: never lower for a younger block or a later kind, so that a parent, which
    is at least as young and as reused as its child, never ranks below it.

    The guard compares real hits on the sample with those of plain LRU: a hash that comes
    back younger than LRU's horizon, the age at which as many distinct hashes were seen
    as the pool holds, would have been a hit. Where LRU does better by more than chance
    nothing is demoted for some pools' worth of allocations; where nothing was demoted since
    the last time, `lru` is set instead, twice as long each time (and half as long again
    after 64 pools' worth without).

    Memory: 12 bytes for each of max(512, 8 * num_blocks / rate) slots.
    """

    def __init__(self, settings: Settings, num_blocks: int) -> None:
        self.settings = settings
        self.num_blocks = num_blocks
        self.unit = max(1, num_blocks // UNITS_PER_POOL)  # blocks per clock unit
        rate = 1 if num_blocks < SAMPLED_POOL else 16
        while rate < MAX_SAMPLE_RATE and rate * SAMPLED_POOL < num_blocks:
            rate *= 2
        self.rate = rate
        self.below = bytes([256 // rate]) if rate > 1 else b"\xff" * 64  # hashes in the sample
        self.pool_units = max(1, num_blocks // self.unit)
        self._cohort_units = max(1, self.pool_units // COHORTS_PER_POOL)
        slots = max(LEAST_SLOTS, HISTORY_POOLS * num_blocks // rate)
        self._guard_decay = 1 - 1 / max(GUARD_LEAST_WINDOW, GUARD_WINDOW * num_blocks // rate)
        self._tags = array("I", bytes(4 * slots))  # 0: nothing there
        self._last = array("Q", bytes(8 * slots))  # stamp << 2 | kind
        self.reset()

    def reset(self) -> None:
        """Forget everything: the cache was emptied, its hashes mean nothing any more."""
        slots = len(self._tags)
        self._tags = array("I", bytes(4 * slots))
        self._live = [[0] * (COHORTS + 1) for _ in range(KINDS)]  # hashes by cohort of last use
        self._hits = [[0.0] * BINS for _ in range(KINDS)]
        self._lost = [[0.0] * BINS for _ in range(KINDS)]
        self._cohort = 0
        self._forgotten = -COHORTS  # the youngest cohort that is counted with the old ones
        self._next_fit = 0
        self.now = 0
        self.reuse_events = 0
        self.unobserved = 0  # blocks handed out and not yet seen with their hash
        self.demotes, self.lru = True, False  # what the guard leaves of the policy
        self.demoted = False  # whether a word called for it since the guard last tripped
        self.lru_horizon = EVER  # clock units, as of the cohort of the last comparison
        self._horizon_at = 0
        self.trips = 0
        self._guarded_until = self._forgiven_at = 0
        self._guard_pools = GUARD_POOLS
        self._lead = self._variance = self._compared = 0.0
        self.compared_now = self._lead_now = 0
        never, again = [0.0] * BINS, [1.0] * BINS
        self.index = [never, never, again]  # until measured: never reused go first
        self.keep = [never, never, again]

    def advance(self, now: int) -> None:
        """Move the clock (in units); refit once per pool's worth of allocations."""
        self.now = now
        cohort = now // self._cohort_units
        if cohort != self._cohort:
            begun = self._cohort
            if begun < cohort - COHORTS:
                begun = cohort - COHORTS
            while begun < cohort:
                begun += 1
                slot = begun % COHORTS
                for live in self._live:
                    if live[slot]:
                        live[COHORTS] += live[slot]
                        live[slot] = 0
            self._cohort = cohort
            self._forgotten = cohort - COHORTS
        if now >= self._next_fit:
            self._next_fit = now + self.pool_units
            self._fit()

    def observe(
        self,
        hashes: Sequence[bytes] | Mapping[bytes, Any],
        kind: int,
        stamp: int,
        hit: bool | None,
        lookup: Callable[[bytes], Any] | None = None,
    ) -> None:
        """Sampled hashes were referenced at `stamp`; `hit` says if the pool still had them.

        None: that says nothing about the worth of keeping free blocks, for they were in use.
        Neither does a block that was computed again while a copy was cached: `lookup` finds
        another than the one that `hashes` then gives for each hash. vLLM does so with the last
        block of a prompt that it has whole, whatever the policy.
        """
        tags, last, slots = self._tags, self._last, len(self._tags)
        live, lost = self._live, self._lost
        units, forgotten = self._cohort_units, self._forgotten
        latest = stamp << 2 | kind
        cohort = stamp // units
        cohort = cohort % COHORTS if cohort > forgotten else COHORTS
        live[kind][cohort] += len(hashes)
        for block_hash in hashes:
            tag = crc32(block_hash) or 1
            slot = tag % slots
            known, before = tags[slot], last[slot]
            tags[slot], last[slot] = tag, latest
            if not known:
                continue
            was, before = before & 3, before >> 2
            cohort = before // units
            cohort = cohort % COHORTS if cohort > forgotten else COHORTS
            live[was][cohort] -= 1
            age = stamp - before if stamp > before else 0
            if known != tag:
                octave = (age * age).bit_length()  # age_bin, as fast as it can be had
                lost[was][octave if octave < BINS else BINS - 1] += 1
            elif hit is not None and (not lookup or lookup(block_hash) is hashes[block_hash]):
                self._hits[was][age_bin(age)] += 1
                if self._horizon_at != self._cohort:
                    self.find_horizon()
                self.compared_now += 1
                self._lead_now += (age <= self.lru_horizon) - hit

    def settle(self) -> bool:
        """Once a decision: weigh the hits compared since, as one event. Whether the guard trips.

        LRU's lead, a decaying sum, is more than chance above one standard deviation (the root
        of the squared leads of events, and of a prior: no event alone can trip it, nor can a
        few small ones) and 0.2 per cent of the hits compared.
        """
        decay = self._guard_decay**self.compared_now
        lead = self._lead_now
        self._lead = self._lead * decay + lead
        self._variance = self._variance * decay + lead * lead
        self._compared = self._compared * decay + self.compared_now
        self.compared_now = self._lead_now = 0
        deviation = (self._variance + GUARD_PRIOR) ** 0.5
        noise = GUARD_SIGMAS * deviation + GUARD_SHARE * self._compared
        if self._compared <= GUARD_LEAST or self._lead <= noise or self.lru:
            return False
        pools = GUARD_POOLS
        if not self.demoted:  # demotion was not the reason
            self.lru = True
            self._guard_pools = pools = min(2 * self._guard_pools, GUARD_MAX_POOLS)
        self.demotes = self.demoted = False
        self.trips += 1
        self._guarded_until = self.now + pools * self.pool_units
        self._forgiven_at = self._guarded_until + GUARD_MAX_POOLS * self.pool_units
        self._lead = self._variance = self._compared = 0.0
        return True

    def _fit(self) -> None:
        if not self.demotes and self.now >= self._guarded_until:
            self.demotes, self.lru = True, False
            self._lead = self._variance = self._compared = 0.0
        elif self._guard_pools > GUARD_POOLS and self.now >= self._forgiven_at:
            self._guard_pools //= 2
            self._forgiven_at = self.now + GUARD_MAX_POOLS * self.pool_units
        lost = [list(row) for row in self._lost]
        self._add_live(lost)
        if self.reuse_events >= MIN_REUSE_EVENTS:
            self._rank(lost)
        for row in self._hits + self._lost:
            row[:] = [DECAY * count for count in row]

    def _add_live(self, lost: list[list[float]]) -> None:
        """Count the hashes that were not seen again so far as lost at their age."""
        for back in range(min(COHORTS, self._cohort + 1)):
            age = back * self._cohort_units
            for kind, live in enumerate(self._live):
                lost[kind][age_bin(age)] += live[(self._cohort - back) % COHORTS]
        for kind, live in enumerate(self._live):
            lost[kind][age_bin(COHORTS * self._cohort_units)] += live[COHORTS]

    def find_horizon(self) -> None:
        """Set `lru_horizon`, the age below which as many distinct hashes are as the pool holds.

        Hashes that share a slot count once, so d of them are expected in
        slots * (1 - exp(-d / slots)) slots (linear counting, Whang et al., 1990).
        """
        self._horizon_at = self._cohort
        slots = len(self._tags)
        distinct = (self.num_blocks - self.unobserved) / self.rate
        enough = -slots * expm1(-distinct / slots)
        cold, continuing, reused = self._live
        seen = 0
        for back in range(min(COHORTS, self._cohort + 1)):
            cohort = (self._cohort - back) % COHORTS
            seen += cold[cohort] + continuing[cohort] + reused[cohort]
            if seen >= enough:
                self.lru_horizon = back * self._cohort_units + self._cohort_units // 2
                return
        self.lru_horizon = EVER

    def _rank(self, lost: list[list[float]]) -> None:
        settings = self.settings
        all_hits = [sum(column) for column in zip(*self._hits, strict=True)]
        all_risk = _at_risk(all_hits, [sum(column) for column in zip(*lost, strict=True)])
        pull = [min(SHRINKAGE, risk) for risk in all_risk]  # no evidence pulls at nothing
        pulled = [
            strength * hits / risk if risk else 0.0
            for strength, hits, risk in zip(pull, all_hits, all_risk, strict=True)
        ]
        index = []
        for kind in range(KINDS):
            if kind == REUSED:
                weight = float(settings.reuse_weight)
                fading = [1 + settings.age_weight * a / self.pool_units for a in BIN_STARTS[:BINS]]
                believed = [weight * PRIOR_HAZARD / by for by in fading]
            else:
                weight = settings.quick_demote_penalty / 64
                believed = [0.0] * BINS
            hits = [sum(c) for c in zip(self._hits[kind], pulled, believed, strict=True)]
            risks = _at_risk(self._hits[kind], lost[kind])
            risks = [risk + more + weight for risk, more in zip(risks, pull, strict=True)]
            hazards = [
                min(1.0, hit / risk) if risk else 0.0 for hit, risk in zip(hits, risks, strict=True)
            ]
            index.append(_gittins(hazards))
        hull = [list(accumulate(reversed(row), max))[::-1] for row in index]
        for kind in (CONTINUING, REUSED):
            hull[kind] = [max(pair) for pair in zip(hull[kind - 1], hull[kind], strict=True)]
        self.index, self.keep = index, hull


def _at_risk(hits: Sequence[float], lost: Sequence[float]) -> list[float]:
    """Blocks that reach each half octave; those lost in it count half (actuarial estimate)."""
    risks = []
    reached = sum(hits) + sum(lost)
    for hit, gone in zip(hits, lost, strict=True):
        risk = reached - gone / 2
        risks.append(risk if risk > 0.25 else 0.0)
        reached -= hit + gone
    return risks


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


# A block's word: stamp << 9 | flags | kind << 4 | place. The stamp is the clock unit of the
# last use and, once the block is sorted, of its sorting.
PLACE_MASK, FRESH, KIND_SHIFT, KIND_MASK, STAMP_SHIFT = 7, 8, 4, 3, 9
LET_THROUGH, UNHASHED, WATCHED = 64, 128, 256
UNUSUAL = FRESH | UNHASHED | WATCHED | REUSED << KIND_SHIFT  # as a victim
# Places in queue order, each a run of neighbours; 0 is the rest: in use or not sorted yet.
SPENT, FIRST_LIST, PROTECTED = 1, 2, 5  # a kind's list is at FIRST_LIST + kind
PLACES = 5
LET_THROUGH_SHARE = 1 / 8  # of never reused allocations, drawn at random, that are not demoted
SAVED_SCANS, SAVED_BLOCKS = 16, 1024  # scan limits, and blocks, that are sorted late at a time
MAX_FALLBACKS = 8  # failures, one decision after another, that switch the policy off
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
    of operations. Memory: 8 bytes a block, 32 for each different word, and the model.

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
        self._words = [UNHASHED] * (self.num_blocks if self.enabled else 0)
        self._queue = None
        self._forget_lists()
        self.model.reset()
        self._failed = self._failed_at = 0  # failures in a row, decision of the last one
        self._clock = 0  # blocks handed out or taken out of the free queue by a hit
        self._same: dict[int, int] = {}  # the words of this clock unit, each one object
        self._taken = REUSED << KIND_SHIFT  # the word of a block that is taken back
        self._fresh = FRESH  # the word of a block handed out by the current decision
        self._random = Random(0).random
        self._hit_since_decision = self._reuse_since_decision = False

    def _forget_lists(self) -> None:
        if self._queue is not None:
            self._words = [self._one(word & ~PLACE_MASK) for word in self._words]
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
            words, model = self._words, self.model
            block_id = block.block_id
            word = words[block_id]
            in_use = block.ref_cnt
            self._hit_since_decision = True
            if in_use:
                if model.now - (word >> STAMP_SHIFT) < SHARED_UNITS:
                    if not word & KIND_MASK << KIND_SHIFT:
                        words[block_id] = self._one(word | CONTINUING << KIND_SHIFT)
                    return
            else:
                place = word & PLACE_MASK
                if place:
                    self._counts[place] -= 1
                    if block is self._ends[place]:
                        self._take_end(block, place)
                self._clock += 1
                self._taken_back += 1
                if model.now - (word >> STAMP_SHIFT) > model.lru_horizon:
                    self.counters.protected_hits += 1
            self._reuse_since_decision = True
            if word & FRESH:
                model.unobserved -= 1
            words[block_id] = self._taken
            block_hash = block.block_hash
            if block_hash is not None and block_hash < model.below:
                if word & FRESH:
                    kind = word >> KIND_SHIFT & KIND_MASK
                    model.observe((block_hash,), kind, word >> STAMP_SHIFT, False)
                model.observe((block_hash,), REUSED, model.now, None if in_use else True)
        except Exception:
            self._fall_back("on_access")

    def _take_end(self, block: Any, place: int) -> None:
        """The last block of `place` is about to be taken out of the queue."""
        head, before = self._ends[0], block.prev_free_block
        if before is not head and not self._words[before.block_id] & PLACE_MASK:
            before = head  # only blocks prepended since the last decision
        self._set_end(place, block, before)

    def _one(self, word: int) -> int:
        """The one object that stands for this word in this clock unit."""
        return self._same.setdefault(word, word)

    def on_evicted(self, block: Any) -> None:
        """`block` loses its hash: handed out, or invalidated where it stands."""
        words = self._words  # none in lru mode
        if not words or block.ref_cnt:
            return
        block_id = block.block_id
        word = words[block_id]
        if block.next_free_block is not None:  # it keeps its place in the queue
            words[block_id] = self._one(word | UNHASHED)
            return
        words[block_id] = self._fresh
        if word & UNUSUAL:
            self._correct(word, block)
        if self._owed:
            self._pay()

    def _correct(self, word: int, block: Any) -> None:
        """The decision counted its victims as never reused and observed: this one was not."""
        if block.is_null:  # never handed out
            self._words[block.block_id] = word
            return
        counters = self.counters
        unhashed = word & UNHASHED
        if word & FRESH:
            self.model.unobserved -= 1
        if not word & PLACE_MASK:  # taken before it was sorted
            unhashed = block.block_hash is None
        if word & WATCHED:
            counters.victims_protected += 1
        elif unhashed:
            counters.victims_unhashed += 1
        elif word & REUSED << KIND_SHIFT:
            counters.victims_reused += 1
        else:
            return
        counters.victims_never_reused -= 1

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
        counters.victims_never_reused += num_blocks  # until on_evicted sees what they are
        self.model.unobserved += num_blocks
        if self.settings.scan_limit > 1:
            try:
                if self._queue is not queue:
                    self._forget_lists()
                    self._queue = queue
                    self._ends = [queue.fake_free_list_head] * (PLACES + 1)
                self._protected = protected_block_ids
                self._decide(num_blocks)
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
        decision = self.counters.decisions
        self._failed = self._failed + 1 if decision - self._failed_at < 2 else 1
        self._failed_at = decision
        if self._failed == MAX_FALLBACKS:
            self.enabled = False
            logger.error("ComputeCache: %d failures in a row: off from now on.", self._failed)

    # -- a decision -------------------------------------------------------------------

    def _decide(self, num_blocks: int) -> None:
        model, counters, queue = self.model, self.counters, self._queue
        self._clock += num_blocks
        now = self._clock // model.unit
        if now != model.now:
            model.advance(now)
            self._same.clear()
            self._taken = self._one(now << STAMP_SHIFT | REUSED << KIND_SHIFT)
        if model.compared_now and model.settle():
            counters.lru_guard_trips += 1
        if self._reuse_since_decision:
            model.reuse_events += 1
        fresh = now << STAMP_SHIFT | FRESH
        if self._hit_since_decision:
            fresh |= CONTINUING << KIND_SHIFT
        if self._random() < LET_THROUGH_SHARE:
            fresh |= LET_THROUGH
        self._fresh = self._one(fresh)
        self._hit_since_decision = self._reuse_since_decision = False

        budget = num_blocks + self.settings.scan_limit - 1
        counts, ends = self._counts, self._ends
        absorbed = 0
        listed = ends[PLACES] is not ends[0]
        if listed and not self._words[ends[0].next_free_block.block_id] & PLACE_MASK:
            absorbed, complete = self._absorb_front(budget)
            if not complete:  # more of them than the decision needs: it takes these
                counters.inspected_blocks += absorbed
                self._saved = min(self._saved + num_blocks, self.num_blocks)
                return
        self._moved = False
        budget -= absorbed
        # Only sort a few where there is no need to touch reused blocks.
        spare = counts[SPENT] + counts[FIRST_LIST] + counts[FIRST_LIST + CONTINUING] >= num_blocks
        few = self.settings.scan_limit - 1
        newly_sorted = self._sort(few if spare and few < budget else budget)
        walked = self._choose(num_blocks, budget - newly_sorted)
        counters.inspected_blocks += absorbed + newly_sorted + walked
        counters.reordered_decisions += self._moved
        owed, self._taken_back = num_blocks + self._taken_back, 0
        if ends[PLACES].next_free_block is queue.fake_free_list_tail:
            self._saved = min(self._saved + owed, self.num_blocks)
        else:
            self._owed = owed

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
            block_id = block.block_id
            place = PROTECTED if block_id in protected else SPENT
            word = words[block_id]
            if word & FRESH:
                self.model.unobserved -= 1
            word = word & ~FRESH | place
            if place == PROTECTED:
                word |= WATCHED
            elif block.block_hash is None:
                word |= UNHASHED
            words[block_id] = self._one(word)
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
        words, model, one = self._words, self.model, self._one
        watched = self._protected or None
        pool = getattr(block, "pool", None)
        lookup = None if pool is None else pool.cached_block_hash_to_block.get_one_block
        before, before_place = self._before  # the hashed block sorted before, and where to
        sample: dict[bytes, Any] = {}  # blocks to follow by their hash, all with the same word
        runs: list[tuple[Any, Any, int, int]] = []  # first, last, blocks, place
        first, start, run_place = block, 0, 0
        kind = used = looked = fresh = fresh_from = unhashed = 0
        plain = False
        last_word = None
        try:
            for looked in range(budget):
                if block is tail:
                    break
                if block.ref_cnt:
                    raise QueueError(f"block {block.block_id} is in use")
                block_id = block.block_id
                word = words[block_id]
                if word is not last_word:  # else the same as for the block before
                    if sample:
                        model.observe(sample, kind, used, False, lookup)
                        sample = {}
                    last_word = word
                    if fresh:
                        model.unobserved -= looked - fresh_from
                    fresh, fresh_from = word & FRESH, looked
                    wanted = model.below if fresh else b""
                    kind, used = word >> KIND_SHIFT & KIND_MASK, word >> STAMP_SHIFT
                    hashed_place = self._place(kind, word & LET_THROUGH)
                    sorted_word = model.now << STAMP_SHIFT | kind << KIND_SHIFT
                    hashed_word = one(sorted_word | hashed_place)
                    plain = False  # a hashed block goes to hashed_place, as the one before it did
                block_hash = block.block_hash
                if plain and block_hash is not None:
                    words[block_id] = hashed_word
                    before = block
                else:
                    if block_hash is None:
                        place, kept = SPENT, UNHASHED
                    else:
                        place, kept = hashed_place, 0
                        if place < before_place and self._is_parent(block, before):
                            place = before_place
                        before, before_place = block, place
                    if watched and block_id in watched:
                        place, kept = PROTECTED, WATCHED
                    unhashed += kept == UNHASHED
                    words[block_id] = one(sorted_word | kept | place)
                    if place != run_place:
                        if run_place:
                            runs.append((first, block.prev_free_block, looked - start, run_place))
                            first, start = block, looked
                        run_place = place
                    plain = place == hashed_place >= before_place and not watched
                if block_hash is not None and block_hash < wanted:
                    sample[block_hash] = block
                block = block.next_free_block
            else:
                looked = budget
        finally:  # their words say so already
            if fresh:
                model.unobserved -= looked - fresh_from
        runs.append((first, block.prev_free_block, looked - start, run_place))
        demoted = -unhashed
        for first, last, length, place in runs:
            self._move(first, last, length, place)
            if place == SPENT:
                demoted += length
        self.counters.demoted_blocks += demoted
        self._before = before, before_place
        if sample:
            model.observe(sample, kind, used, False, lookup)
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
        if kind != REUSED and not let_through and model.demotes:
            worth = model.index[kind][0]
            if worth < self._eviction_cost():
                model.demoted = True
                return SPENT
        return FIRST_LIST + kind

    def _eviction_cost(self) -> float:
        """Index of the block that the lists would give up next."""
        model, words, counts, ends = self.model, self._words, self._counts, self._ends
        least, cost = None, 0.0
        for kind in range(KINDS):
            if counts[FIRST_LIST + kind]:
                front = ends[FIRST_LIST + kind - 1].next_free_block
                age = age_bin(model.now - (words[front.block_id] >> STAMP_SHIFT))
                rank = model.keep[kind][age], -age
                if least is None or rank < least:
                    least, cost = rank, model.index[kind][age]
        return cost

    def _choose(self, num_blocks: int, budget: int) -> int:
        """Bring the victims to the front of the queue, walking at most `budget` blocks.

        Victims for which the budget does not last are the first in the queue as it is:
        spent, then cold blocks. Returns how many blocks were walked.
        """
        words, counts, ends = self._words, self._counts, self._ends
        head = ends[0]
        if num_blocks < counts[SPENT]:
            counts[SPENT] -= num_blocks
            return 0
        spent = counts[SPENT]
        need = num_blocks - spent
        if need < counts[FIRST_LIST] and not any(counts[FIRST_LIST + CONTINUING : PROTECTED]):
            counts[FIRST_LIST] -= need  # the next in the queue as it is
            need = 0
        runs: list[tuple[Any, Any, int, int]] = []  # first, last, blocks, place
        walked = 0
        left = list(counts)
        places = range(FIRST_LIST, PROTECTED) if need else ()
        fronts = {place: ends[place - 1].next_free_block for place in places if counts[place]}
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
        counts[SPENT] = 0
        if spent:
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
