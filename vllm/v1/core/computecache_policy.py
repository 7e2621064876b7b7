# SPDX-License-Identifier: Apache-2.0
"""ComputeCache: a bounded eviction policy beside vLLM's BlockPool.

BlockPool owns reference counts, hash maps, KV events and block tables. This module only
changes the order of blocks that are already free: before BlockPool pops its victims from
the front of the free queue and, to sort what was freed, in the eviction hook after that.

In reading order: Settings, Counters, hazard arithmetic, Guard (when to step back to LRU),
ReuseModel (what keeping a block is worth), the block word, FreeLists (the lists in the free
queue), Ordering (who joins which list, and who goes), Debt (how much may be sorted) and
ComputeCachePolicy with the hooks that BlockPool calls. docs/policy.md has the picture and a
glossary.
"""

import logging
import os
from array import array
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from itertools import accumulate, pairwise
from math import expm1, sqrt
from random import Random
from typing import Any
from zlib import crc32

logger = logging.getLogger(__name__)

Block = Any  # vLLM's KVCacheBlock: this file needs the standard library only
Queue = Any  # vLLM's FreeKVCacheBlockQueue


# -- settings --------------------------------------------------------------------------

MODES = ("lru", "active")
MAX_SCAN_LIMIT = 4096  # blocks; more would let one decision take milliseconds
MAX_WEIGHT = 1_000_000_000  # any weight this high leaves the evidence no say
MAX_DIGITS = 12  # of a setting's text; int() of a very long one takes long


def _whole(default: int, low: int, high: int, meaning: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "help": meaning})


@dataclass(frozen=True)
class Settings:
    """Effective settings of one policy; the defaults are the safe ones.

    The one table of settings: a field's metadata has its `help` and its bounds, `low` and
    `high` (for `mode` the `choices`).
    """

    mode: str = field(
        default="lru",
        metadata={
            "choices": MODES,
            "help": "`lru` leaves the free queue alone, `active` reorders it.",
        },
    )
    scan_limit: int = _whole(
        64,
        1,
        MAX_SCAN_LIMIT,
        "A decision for n victims looks at n + scan_limit - 1 blocks at most; 1 means plain LRU.",
    )
    reuse_weight: int = _whole(
        64,
        0,
        MAX_WEIGHT,
        "Strength, in sampled observations, of the belief that a block which was reused will be "
        "reused again. Higher keeps reused blocks longer.",
    )
    depth_weight: int = _whole(
        1,
        0,
        MAX_WEIGHT,
        "Bonus for a reused prefix, proportional to its length; 1 doubles the keep value at "
        "32,768 tokens. Higher keeps long prefixes longer.",
    )
    age_weight: int = _whole(
        1,
        0,
        MAX_WEIGHT,
        "How fast the belief in reuse fades, per pool's worth of allocations. Higher drops old "
        "favourites sooner.",
    )
    quick_demote_penalty: int = _whole(
        4096,
        0,
        MAX_WEIGHT,
        "Strength, in 1/64 observations, of the belief that a block which was never reused will "
        "not be. Higher demotes one-use blocks sooner.",
    )
    log_every: int = _whole(
        256, 0, MAX_WEIGHT, "Decisions between two summary lines in the log; 0 means none."
    )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read ``COMPUTECACHE_<FIELD>``; an invalid value means its default and one warning.

        Space, CR, quotes and case around a value are understood; nothing else is guessed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for setting in fields(cls):
            name = f"COMPUTECACHE_{setting.name.upper()}"
            raw = environ.get(name, "")
            if raw.strip():  # Compose passes an unset variable as an empty one
                values[setting.name] = _parsed(setting, name, raw)
        return cls(**values)


def _parsed(setting: "Field[Any]", name: str, raw: str) -> Any:
    """The value of one setting; a warning, and the default or the bound, if it is none."""
    text = raw.strip(" \t\r\n\"'").lower()
    if setting.name == "mode":
        if text in MODES:
            return text
        expected = " | ".join(MODES)
        logger.warning("%s=%r is not one of %s: using %s.", name, raw, expected, setting.default)
        return setting.default
    low, high = setting.metadata["low"], setting.metadata["high"]
    whole = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    if not whole or int(text) < low:
        logger.warning(
            "%s=%r is not a whole number from %d to %d: using %d.",
            name,
            raw,
            low,
            high,
            setting.default,
        )
        return setting.default
    if int(text) > high:
        logger.warning("%s=%r is above the upper bound: using %d.", name, raw, high)
    return min(int(text), high)


# -- counters --------------------------------------------------------------------------


def _count(meaning: str) -> Any:
    return field(default=0, metadata={"help": meaning})


@dataclass
class Counters:
    """What one policy has done since it was built; the metrics serve each with its `help`."""

    decisions: int = _count("Allocations for which the policy was asked to choose victims.")
    reordered_decisions: int = _count("Decisions that moved a victim to the front of the queue.")
    inspected_blocks: int = _count("Free-queue blocks looked at while choosing.")
    sorted_blocks: int = _count(
        "Freed blocks sorted into a list beside the decisions: at most one for each block that "
        "requests took, and one pool's worth more after each start, reset and fallback."
    )
    demoted_blocks: int = _count("Never reused blocks put first in line when they were sorted.")
    fallbacks: int = _count("Decisions left to LRU because of an unexpected state or an error.")
    rebuilds: int = _count(
        "Times the free queue was not as BlockPool and the policy leave it: other code moved "
        "blocks in it, and the policy began its lists anew."
    )
    victims_unhashed: int = _count("Victims that had no hash.")
    victims_never_reused: int = _count("Victims with a hash that no request took from the cache.")
    victims_reused: int = _count("Victims that a request had taken from the cache.")
    victims_protected: int = _count("Victims with a reuse watcher that had been sorted.")
    protected_hits: int = _count("Prefix hits on blocks older than the age at which LRU evicts.")
    lru_guard_trips: int = _count(
        "Times LRU measured better: a trip ends demotion or, where nothing was demoted since "
        "the last one, puts the policy on LRU order for a time."
    )


# -- hazard arithmetic -----------------------------------------------------------------

BINS = 32  # ages in half octaves of a clock unit; the last holds all above 2**15.5 units


def age_bin(age: int) -> int:
    """Half-octave bin of an age in clock units: 0 for 0, then 1 for each factor of sqrt 2."""
    return min((age * age).bit_length(), BINS - 1)


def _bin_starts() -> list[int]:
    """The first age of each bin and, as if it were an octave, the end of the last."""
    starts = []
    age = 0
    for number in range(BINS):
        while age_bin(age) < number:
            age += 1
        starts.append(age)
    return [*starts, 2 * starts[-1]]


BIN_STARTS = _bin_starts()
BIN_WIDTHS = [end - start for start, end in pairwise(BIN_STARTS)]


def at_risk(hits: Sequence[float], lost: Sequence[float]) -> list[float]:
    """Blocks that reach each half octave; those lost in it count half (actuarial estimate)."""
    risks = []
    reached = sum(hits) + sum(lost)
    for hit, gone in zip(hits, lost, strict=True):
        risk = reached - gone / 2
        risks.append(risk if risk > 0.25 else 0.0)
        reached -= hit + gone
    return risks


def gittins(hazards: Sequence[float]) -> list[float]:
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


# -- the guard -------------------------------------------------------------------------


class GuardState(Enum):
    """What the guard leaves of the policy."""

    NORMAL = "normal"  # all of it
    NO_DEMOTION = "no demotion"  # the lists, and none of the demotion
    LRU = "lru"  # the least recently used block goes, to within a clock unit


NORMAL, NO_DEMOTION, LRU = GuardState

GUARD_SIGMAS = 1.0  # standard deviations that LRU must lead by; more lets a loss go on
GUARD_PRIOR = 36.0  # hits squared, of variance: six hits lost at once show nothing yet
GUARD_SHARE = 0.002  # of the hits compared: a lead this small is not worth a trip
GUARD_LEAST = 64  # comparisons before the first verdict
GUARD_WINDOW = 4  # pools' worth of samples that the sums remember
GUARD_LEAST_WINDOW = 512  # comparisons that they remember at least
GUARD_POOLS = 8  # pools' worth of allocations without demotion; half of the first LRU time
GUARD_MAX_POOLS = 64  # pools' worth: the longest LRU time, and the quiet that halves the next


class Guard:
    """Compares the real hits with those of plain LRU, and steps back where LRU does better.

        state        event                                         next         for
        NORMAL       LRU leads by more than chance, and something  NO_DEMOTION  8 pools' worth
                     was demoted since the last trip
        NORMAL       LRU leads so, and nothing was demoted         LRU          16, 32, 64, 64, ...
        NO_DEMOTION  LRU still leads                               LRU          16, 32, 64, 64, ...
        any other    its time is over                              NORMAL

    Each LRU time is twice the one before, up to 64 pools' worth of allocations; for every 64
    pools' worth that passed without a trip, the next one is halved.

    LRU leads by more than chance when

        lead > GUARD_SIGMAS * sqrt(sum of squared leads + GUARD_PRIOR) + GUARD_SHARE * compared.

    All three sums decay. What was compared between two decisions is one event: the blocks of
    a request are hit or lost together. The prior keeps one event, or a few small ones, from
    tripping the guard.
    """

    def __init__(self, pool_units: int, window: int) -> None:
        self.state = NORMAL
        self.trips = 0
        self.demoted = False  # whether the policy demoted blocks since the last trip
        self.compared_now = self.lead_now = 0  # since the last decision
        self.until = 0  # clock units: the end of the state, unless it is NORMAL
        self._pool_units = pool_units
        self._decay = 1 - 1 / window  # of the sums, per comparison
        self._lead = self._variance = self._compared = 0.0
        self._lru_pools = GUARD_POOLS  # half of the next LRU time
        self._forgiven_at = 0  # clock units: when the next LRU time is halved

    def compare(self, lead: int) -> None:
        """A block came back. `lead` is 1 where only LRU had kept it, -1 where only the pool."""
        self.compared_now += 1
        self.lead_now += lead

    def settle(self, now: int) -> bool:
        """Once a decision: weigh what was compared since, as one event. Whether it trips."""
        self._weigh()
        if self.state is LRU or self._compared <= GUARD_LEAST or self._lead <= self._chance():
            return False
        self.state = self._step_back()
        pools = GUARD_POOLS
        if self.state is LRU:
            self._lru_pools = pools = min(2 * self._lru_pools, GUARD_MAX_POOLS)
        self.trips += 1
        self.demoted = False
        self.until = now + pools * self._pool_units
        self._forgiven_at = self.until + GUARD_MAX_POOLS * self._pool_units
        self._lead = self._variance = self._compared = 0.0
        return True

    def relax(self, now: int) -> None:
        """Once a pool's worth: back to NORMAL when the time is over, then forgive."""
        if self.state is not NORMAL and now >= self.until:
            self.state = NORMAL
            self._lead = self._variance = self._compared = 0.0
        elif self._lru_pools > GUARD_POOLS and now >= self._forgiven_at:
            self._lru_pools //= 2
            self._forgiven_at = now + GUARD_MAX_POOLS * self._pool_units

    def _weigh(self) -> None:
        decay, lead = self._decay**self.compared_now, self.lead_now
        self._lead = self._lead * decay + lead
        self._variance = self._variance * decay + self._surprise(lead)
        self._compared = self._compared * decay + self.compared_now
        self.compared_now = self.lead_now = 0

    def _surprise(self, lead: int) -> float:
        """Variance of one event: its blocks come and go together."""
        return lead * lead

    def _chance(self) -> float:
        """The lead of LRU, in hits, that chance explains."""
        return GUARD_SIGMAS * sqrt(self._variance + GUARD_PRIOR) + GUARD_SHARE * self._compared

    def _step_back(self) -> GuardState:
        """Where a trip leads: demotion is the first suspect, if there was any."""
        return NO_DEMOTION if self.demoted else LRU


# -- the model -------------------------------------------------------------------------

COLD, CONTINUING, REUSED = range(3)  # kinds of block, see ReuseModel
KINDS = 3
UNITS_PER_POOL = 256  # clock units in a pool's worth of allocations: resolution of ages
COHORTS_PER_POOL = 16  # groups by time of last use, for the horizon and the blocks at risk
COHORTS = 128  # the youngest are told apart: 8 pools' worth; older hashes are one more
SAMPLED_POOL = 1024  # blocks: smaller pools follow every hash, larger ones about this many
LEAST_SAMPLE_RATE = 16  # block hashes of which one is followed, from SAMPLED_POOL blocks on
MAX_SAMPLE_RATE = 64  # block hashes of which one is followed, in the largest pools
HISTORY_POOLS = 8  # pools' worth of hashes that the sample remembers
LEAST_SLOTS = 512  # of the directory, so that few hashes of a small pool share one
SHRINKAGE = 256.0  # pseudo-observations that pull a kind's hazard to that of all kinds
PRIOR_HAZARD = 0.25  # reuse in a half octave that reuse_weight believes in
DECAY = 0.7  # of all evidence, per pool's worth of allocations: hot sets drift
MIN_REUSE_EVENTS = 48  # decisions with a hit before measurement replaces the fixed order
EVER = 1 << 62  # clock units: an age that nothing reaches


def _no_copy(block_hash: bytes) -> bool:
    return False


class ReuseModel:
    """How soon blocks of each kind come back, measured on a sample of block hashes.

    Kinds: COLD blocks were computed by a request that hit nothing, CONTINUING blocks by
    one that extended a cached prefix; both were never reused. REUSED blocks were.

    The sample is a direct-mapped directory of hashes (1 in `rate`: digests, in bytes, that
    are `below` a bound) that outlives eviction, so reuse is seen whether or not the block
    was still there. Its ages give each kind a hazard per half octave (hits over blocks at
    risk, Kaplan-Meier), shrunk towards the pooled hazard of all kinds (256
    pseudo-observations) and towards the priors in Settings. The `index` of an age is

        max over later ages y of  P(reuse before y) / E[time in the pool until reuse or y]:

    how many hits a block is expected to give per clock unit in the pool, if it is dropped at
    the best moment (Gittins' index of optimal stopping; hit density in LHD, Beckmann et al.,
    NSDI 2018). `keep` is its monotone hull: never lower for a younger block or a later kind,
    so that a parent, which is at least as young and as reused as its child, never ranks below
    it.

    `guard` compares the hits on the sample with those of plain LRU: a hash that comes back
    younger than `lru_horizon` would have been a hit.

    Memory: 12 bytes for each of max(512, 8 * num_blocks / rate) slots.
    """

    def __init__(self, settings: Settings, num_blocks: int) -> None:
        self.settings = settings
        self.num_blocks = num_blocks
        self.unit = max(1, num_blocks // UNITS_PER_POOL)  # blocks per clock unit
        rate = 1 if num_blocks < SAMPLED_POOL else LEAST_SAMPLE_RATE
        while rate < MAX_SAMPLE_RATE and rate * SAMPLED_POOL < num_blocks:
            rate *= 2
        self.rate = rate
        self.below = bytes([256 // rate]) if rate > 1 else b"\xff" * 64  # hashes in the sample
        self.pool_units = max(1, num_blocks // self.unit)
        self._cohort_units = max(1, self.pool_units // COHORTS_PER_POOL)
        slots = max(LEAST_SLOTS, HISTORY_POOLS * num_blocks // rate)
        self._tags = array("I", bytes(4 * slots))  # 0: nothing there
        self._last = array("Q", bytes(8 * slots))  # stamp << 2 | kind
        self._live = [[0] * (COHORTS + 1) for _ in range(KINDS)]  # hashes by cohort of last use
        self._hits = [[0.0] * BINS for _ in range(KINDS)]
        self._lost = [[0.0] * BINS for _ in range(KINDS)]
        self._cohort = 0
        self._forgotten = -COHORTS  # the youngest cohort that is counted with the old ones
        self._next_fit = 0
        self.now = 0
        self.reuse_events = 0
        self.unobserved = 0  # blocks handed out and not yet seen with their hash
        self.lru_horizon = EVER  # clock units, as of the cohort of the last comparison
        self._horizon_at = 0
        window = max(GUARD_LEAST_WINDOW, GUARD_WINDOW * num_blocks // rate)
        self.guard = Guard(self.pool_units, window)
        never, again = [0.0] * BINS, [1.0] * BINS
        self.index = [never, never, again]  # until measured: never reused go first
        self.keep = [never, never, again]

    def advance(self, now: int) -> None:
        """Move the clock (in units); refit once per pool's worth of allocations."""
        self.now = now
        cohort = now // self._cohort_units
        if cohort != self._cohort:
            for begun in range(self._cohort + 1, cohort + 1):
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

    def observe(self, hashes: Collection[bytes], kind: int, stamp: int) -> None:
        """Sampled hashes were used at `stamp` by blocks that were in use all along.

        That says nothing about the worth of keeping free blocks.
        """
        for _ in self._returns(hashes, kind, stamp):
            pass

    def observe_hits(self, hashes: Collection[bytes], kind: int, stamp: int) -> None:
        """Sampled hashes were used at `stamp`, and the pool had kept their free blocks."""
        for _, was, age in self._returns(hashes, kind, stamp):
            self._came_back(was, age, True)

    def observe_computed(
        self,
        hashes: Collection[bytes],
        kind: int,
        stamp: int,
        is_copy: Callable[[bytes], bool] = _no_copy,
    ) -> None:
        """Sampled hashes were computed at `stamp`: those that were seen before had been lost.

        A block computed while a copy is cached (`is_copy`) says nothing, as in `observe`. vLLM
        does so with the last block of a prompt that it has whole, whatever the policy.
        """
        for block_hash, was, age in self._returns(hashes, kind, stamp):
            if not is_copy(block_hash):
                self._came_back(was, age, False)

    def _returns(
        self, hashes: Collection[bytes], kind: int, stamp: int
    ) -> Iterator[tuple[bytes, int, int]]:
        """Note the use of all `hashes`; each that is known, with its kind and age until then."""
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
            if known == tag:
                yield block_hash, was, age
            else:
                octave = (age * age).bit_length()  # age_bin, as fast as it can be had
                lost[was][octave if octave < BINS else BINS - 1] += 1

    def _came_back(self, was: int, age: int, hit: bool) -> None:
        """A hash that was of kind `was` is used again; `hit` says if the pool still had it."""
        self._hits[was][age_bin(age)] += 1
        if self._horizon_at != self._cohort:
            self.find_horizon()
        self.guard.compare((age <= self.lru_horizon) - hit)

    def find_horizon(self) -> None:
        """Set `lru_horizon`: plain LRU would still hold anything that is younger.

        It is the age at which the number of distinct hashes used since equals the pool's size.
        Hashes that share a slot count once.
        """
        self._horizon_at = self._cohort
        enough = self._slots_of((self.num_blocks - self.unobserved) / self.rate)
        cold, continuing, reused = self._live
        seen = 0
        for back in range(min(COHORTS, self._cohort + 1)):
            cohort = (self._cohort - back) % COHORTS
            seen += cold[cohort] + continuing[cohort] + reused[cohort]
            if seen >= enough:
                self.lru_horizon = back * self._cohort_units + self._cohort_units // 2
                return
        self.lru_horizon = EVER

    def _slots_of(self, distinct: float) -> float:
        """Slots that so many hashes are expected to fill (linear counting, Whang et al., 1990)."""
        slots = len(self._tags)
        return -slots * expm1(-distinct / slots)

    def _fit(self) -> None:
        """What is done once per pool's worth of allocations."""
        self.guard.relax(self.now)
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

    def _rank(self, lost: list[list[float]]) -> None:
        """Measure `index` and `keep` anew."""
        all_hits = [sum(column) for column in zip(*self._hits, strict=True)]
        all_risk = at_risk(all_hits, [sum(column) for column in zip(*lost, strict=True)])
        pull = [min(SHRINKAGE, risk) for risk in all_risk]  # no evidence pulls at nothing
        pulled = [
            strength * hits / risk if risk else 0.0
            for strength, hits, risk in zip(pull, all_hits, all_risk, strict=True)
        ]
        index = []
        for kind in range(KINDS):
            weight, believed = self._belief(kind)
            hits = [sum(c) for c in zip(self._hits[kind], pulled, believed, strict=True)]
            risks = at_risk(self._hits[kind], lost[kind])
            risks = [risk + more + weight for risk, more in zip(risks, pull, strict=True)]
            index.append(
                gittins(
                    [
                        min(1.0, h / risk) if risk else 0.0
                        for h, risk in zip(hits, risks, strict=True)
                    ]
                )
            )
        hull = [list(accumulate(reversed(row), max))[::-1] for row in index]
        for kind in (CONTINUING, REUSED):
            hull[kind] = [max(pair) for pair in zip(hull[kind - 1], hull[kind], strict=True)]
        self.index, self.keep = index, hull

    def _belief(self, kind: int) -> tuple[float, list[float]]:
        """The prior of a kind: observations it counts for, and the hits among them by age."""
        settings = self.settings
        if kind != REUSED:
            return settings.quick_demote_penalty / 64, [0.0] * BINS
        weight = float(settings.reuse_weight)
        fading = [1 + settings.age_weight * age / self.pool_units for age in BIN_STARTS[:BINS]]
        return weight, [weight * PRIOR_HAZARD / by for by in fading]


# -- the block word --------------------------------------------------------------------

# What the policy knows of a block is one integer, its word:
#   bits 0-2 place | 3 fresh | 4-5 kind | 6 let through | 7 unhashed | 8 watched | 9.. stamp
# The stamp is the clock unit of the last use and, once the block is sorted, of its sorting.
PLACE_MASK = 7
FRESH = 1 << 3  # handed out, and not yet seen with its hash
KIND_SHIFT = 4
KIND_MASK = 3
LET_THROUGH = 1 << 6  # computed by a request whose blocks are not demoted
UNHASHED = 1 << 7  # had no hash when it was sorted, or lost it where it stood
WATCHED = 1 << 8  # had a reuse watcher when it was sorted
STAMP_SHIFT = 9
UNUSUAL = FRESH | UNHASHED | WATCHED | REUSED << KIND_SHIFT  # as a victim

# Places in queue order, each a run of neighbours; 0 is the rest: in use or not sorted yet.
SPENT = 1  # the next victims: without a hash, or demoted
FIRST_LIST = 2  # a kind's list is at FIRST_LIST + kind
PROTECTED = 5  # the last victims: with a reuse watcher
PLACES = 5
PLACES_IN_ORDER = tuple(range(1, PLACES + 1))


# -- the lists -------------------------------------------------------------------------

Run = tuple[Block, Block, int, int]  # neighbours in the queue: first, last, blocks, place


class QueueError(RuntimeError):
    """Other code moved or took blocks of the lists: they are begun anew, nothing is moved."""


class FreeLists:
    """The five lists in the free queue: their counts and ends, and every block's word.

        front | prepended | spent | cold | continuing | reused | protected | not sorted | tail

    `ends[place]` is the last block up to the end of a place, which is that of the place before
    where the place is empty; `ends[0]` is the queue's head. BlockPool appends behind the lists
    and prepends before them. `check` says what holds between any two calls of the policy.

    Other code may have moved or taken any block in the meantime, so no splice relies on the
    books: the blocks that move were walked in the same call, each with the word it must have
    (`run_from`, `Ordering.sort`), and the block they move behind is in a list (`stands`). What
    does not fit is a QueueError.
    """

    def __init__(self, model: ReuseModel, num_blocks: int) -> None:
        self.model = model
        self.words = [UNHASHED] * num_blocks  # by block id
        self.queue: Queue = None  # the one that the lists are in
        self._same: dict[int, int] = {}  # the words of this clock unit, each one object
        self._clear()

    def _clear(self) -> None:
        self.counts = [0] * (PLACES + 1)
        self.ends: list[Block] = []
        self.protected: Container[int] = ()  # ids of blocks with a reuse watcher
        self.moved = False  # whether the decision changed the order of the queue
        self.before: Block = None  # the hashed block that was sorted last ...
        self.before_place = 0  # ... and where to

    def attach(self, queue: Queue) -> None:
        """After `forget`, begin with every block of `queue` unsorted."""
        self.queue = queue
        self.ends = [queue.fake_free_list_head] * (PLACES + 1)

    def forget(self) -> None:
        """There are no lists; what is known of each block stays. In proportion to the pool."""
        if self.queue is not None:
            self.words = [self.intern(word & ~PLACE_MASK) for word in self.words]
            self.model.unobserved = sum(bool(word & FRESH) for word in self.words)
        self.queue = None
        self._clear()

    def begin_unit(self) -> None:
        """The clock moved: words of the unit before are not made any more."""
        self._same.clear()

    def intern(self, word: int) -> int:
        """The one object that stands for this word in this clock unit: memory, and `is`."""
        return self._same.setdefault(word, word)

    # -- blocks come and go -----------------------------------------------------------

    def take_out(self, block: Block, place: int) -> None:
        """`block` of `place` is about to be taken out of the queue."""
        if not self.counts[place]:
            raise QueueError(f"block {block.block_id} was in no list")
        self.counts[place] -= 1
        if block is self.ends[place]:
            head, before = self.ends[0], block.prev_free_block
            if before is not head and not self.words[before.block_id] & PLACE_MASK:
                before = head  # only blocks prepended since the last decision
            self._set_end(place, block, before)

    def absorb(self, budget: int) -> tuple[int, bool]:
        """Add the blocks that BlockPool prepended since the last decision to spent.

        Returns how many and whether that was all; if `budget` ends first, nothing changes.
        """
        words, ends = self.words, self.ends
        self.stand()
        if ends[PLACES] is ends[0]:
            return 0, True  # no lists: nothing stands before them
        found: list[Block] = []
        block, tail = ends[0].next_free_block, self.queue.fake_free_list_tail
        while block is tail or not words[block.block_id] & PLACE_MASK:
            if len(found) == budget:
                return budget, False
            found.append(block)
            block = _next(block)
        end = ends[0]
        for block in found:
            word = words[block.block_id]
            if word & FRESH:
                self.model.unobserved -= 1
                word &= ~FRESH
            if block.block_id in self.protected:
                words[block.block_id] = self.intern(word | PROTECTED | WATCHED)
                self.append(block, block, 1, PROTECTED)
                continue
            if block.block_hash is None:
                word |= UNHASHED
            words[block.block_id] = self.intern(word | SPENT)
            self.counts[SPENT] += 1
            if ends[SPENT] is end:  # spent was empty: these are all of it
                self._set_end(SPENT, end, block)
                end = block
        return len(found), True

    # -- surgery ----------------------------------------------------------------------

    def take(self, runs: Sequence[Run], need: int) -> None:
        """Everything is chosen: the spent blocks, then `runs`, are the front of the queue.

        `need` more victims are blocks with a watcher, or were not sorted yet.
        """
        counts, ends = self.counts, self.ends
        head = at = ends[0]
        if counts[SPENT]:
            at = ends[SPENT]
            self.stands(at)
            counts[SPENT] = 0
            self._set_end(SPENT, at, head)
        for first, last, length, place in runs:
            counts[place] -= length
            if last is None:  # not walked: they are next in the queue
                if counts[place]:
                    continue
                last = ends[place]
                if first.prev_free_block is not at:
                    raise QueueError(f"list {place} is not the first in the queue")
            if not counts[place]:
                self._set_end(place, last, ends[place - 1])
            if first.prev_free_block is not at:
                self.moved = True
                _splice(first, last, at)
            at = last
        protected = min(need, counts[PROTECTED])
        if protected:
            counts[PROTECTED] -= protected
            if not counts[PROTECTED]:
                self._set_end(PROTECTED, ends[PROTECTED], head)

    def append(self, first: Block, last: Block, length: int, place: int) -> None:
        """Put the run first..last, in no list so far, at the end of `place`."""
        end = self.ends[place]
        self.stands(end)
        self.counts[place] += length
        if first.prev_free_block is not end:
            self.moved = True
            _splice(first, last, end)
        self._set_end(place, end, last)

    def run_from(
        self, block: Block, most: int, place: int, limit: int | None
    ) -> tuple[Block, Block, int]:
        """From `block` on, at most `most` blocks of `place` with a stamp up to `limit`.

        The first is taken whatever its stamp; without a limit, all are. Returns the last, the
        one behind it and how many.
        """
        words, last, length = self.words, block, 0
        while length < most:
            if words[block.block_id] & PLACE_MASK != place:
                raise QueueError(f"block {block.block_id} is not in list {place}")
            last, block = block, _next(block)
            length += 1
            if limit is not None and words[block.block_id] >> STAMP_SHIFT > limit:
                break
        return last, block, length

    def front(self, place: int) -> Block:
        """The oldest block of a list that has some."""
        block = self.ends[place - 1].next_free_block
        if block is None:
            raise QueueError(f"list {place} has no front")
        return block

    def stand(self) -> None:
        """QueueError unless the ends are where the policy left them, as far as they show."""
        words, ends = self.words, self.ends
        before = ends[0]
        for place in PLACES_IN_ORDER:
            end = ends[place]
            if end is not before:
                if end.next_free_block is None or words[end.block_id] & PLACE_MASK != place:
                    raise QueueError(f"block {end.block_id} was the end of list {place}")
                before = end

    def stands(self, end: Block) -> None:
        """QueueError unless blocks can be put behind this end."""
        if end is self.ends[0]:
            return
        if end.next_free_block is None or not self.words[end.block_id] & PLACE_MASK:
            raise QueueError(f"block {end.block_id} has left the lists")

    def _set_end(self, place: int, old: Block, new: Block) -> None:
        """The end of `place`, and of the empty places behind it, is `new` instead of `old`."""
        ends = self.ends
        for later in range(place, PLACES + 1):
            if ends[later] is not old:
                break
            ends[later] = new

    def check(self) -> None:
        """Look at every block; AssertionError unless words, counts, ends and links agree."""
        assert self.model.unobserved == sum(bool(word & FRESH) for word in self.words)
        listed = sum(bool(word & PLACE_MASK) for word in self.words)
        if self.queue is None:
            assert not listed
            return
        free = self._linked()
        places = [self.words[block.block_id] & PLACE_MASK for block in free]
        # Blocks prepended since the last decision, the lists in their order, unsorted ones. No
        # block in use is in a list: all words with a place are found here.
        start = next((i for i, place in enumerate(places) if place), len(places))
        assert places[start : start + listed] == sorted(filter(None, places))
        assert len(places[start : start + listed]) == listed
        assert self.ends[0] is self.queue.fake_free_list_head
        at = start
        for place in range(1, PLACES + 1):
            assert places.count(place) == self.counts[place]
            at += self.counts[place]
            end = free[at - 1] if self.counts[place] else self.ends[place - 1]
            assert self.ends[place] is end

    def _linked(self) -> list[Block]:
        """The free queue front to tail; AssertionError unless it is linked both ways."""
        found, block = [], self.queue.fake_free_list_head
        while block is not self.queue.fake_free_list_tail:
            assert block.next_free_block.prev_free_block is block
            block = block.next_free_block
            found.append(block)
        return found[:-1]


def _next(block: Block) -> Block:
    """The following block of the free queue; QueueError if that cannot be."""
    following = block.next_free_block
    if following is None or block.ref_cnt:
        raise QueueError(f"block {block.block_id} is in use or not linked")
    return following


def _splice(first: Block, last: Block, after: Block) -> None:
    """Move the neighbours first..last behind `after`, which is not one of them."""
    before, behind = first.prev_free_block, last.next_free_block
    before.next_free_block = behind
    behind.prev_free_block = before
    following = after.next_free_block
    after.next_free_block = first
    first.prev_free_block = after
    last.next_free_block = following
    following.prev_free_block = last


# -- the order ---------------------------------------------------------------------------

DEPTH_TOKENS = 32768  # tokens of a reused prefix for which depth_weight 1 doubles its worth


def _is_copy(block_hash: bytes, block: Block) -> bool:
    """Whether BlockPool would give a request another block for this hash than `block`."""
    pool = getattr(block, "pool", None)
    if pool is None:
        return False
    return pool.cached_block_hash_to_block.get_one_block(block_hash) is not block


Starts = list[tuple[Block, int, int]]  # of a run: its first block, that one's number, and goal


class Ordering:
    """Which list a freed block joins, and which lists give the next victims.

    Every block is looked at before anything in the queue moves: a failure leaves its order.
    """

    def __init__(
        self, settings: Settings, lists: FreeLists, counters: Counters, hash_block_size: int
    ) -> None:
        self.settings = settings
        self.model = lists.model
        self.lists = lists
        self.counters = counters
        self.hash_block_size = hash_block_size

    # -- freed blocks -----------------------------------------------------------------

    def sort(self, budget: int) -> int:
        """Sort up to `budget` freed blocks, oldest first, into the lists; how many were."""
        lists, words, model = self.lists, self.lists.words, self.model
        lists.stands(lists.ends[PLACES])
        block, tail = lists.ends[PLACES].next_free_block, lists.queue.fake_free_list_tail
        starts: Starts = []
        sample: dict[bytes, Block] = {}  # blocks to follow by their hash, all with `word`
        before, word, wanted, plain = lists.before, -1, b"", False  # -1: no block's word
        since = new_word = looked = 0
        try:
            for looked in range(budget):
                if block is tail:
                    break
                if block.ref_cnt:
                    raise QueueError(f"block {block.block_id} is in use")
                block_id = block.block_id
                if words[block_id] is not word:  # what it means is worked out once for a run
                    if sample:
                        self._observe(sample, word)
                        sample = {}
                    model.unobserved -= bool(wanted) * (looked - since)
                    word, since, plain = words[block_id], looked, False
                    if word & PLACE_MASK:
                        raise QueueError(f"block {block_id} stands behind the lists")
                    wanted = model.below if word & FRESH else b""
                    new_word = self._sorted_word(word)
                block_hash = block.block_hash
                if block_hash is None:
                    plain = self._sort_apart(block, before, new_word, looked, starts)
                else:
                    if plain:
                        words[block_id] = new_word  # and to the same list as the one before it
                    else:
                        plain = self._sort_apart(block, before, new_word, looked, starts)
                    before = block
                    if block_hash < wanted:
                        sample[block_hash] = block
                block = block.next_free_block
            else:
                looked = budget
        finally:  # their words say so already
            model.unobserved -= bool(wanted) * (looked - since)
        lists.before = before
        self._move([*starts, (block, looked, 0)])
        if sample:
            self._observe(sample, word)
        return looked

    def _sort_apart(
        self,
        block: Block,
        before: Block,
        new_word: int,
        number: int,
        starts: Starts,
    ) -> bool:
        """Sort one block by itself; whether a hashed block behind it only needs `new_word`.

        `before` is the hashed block sorted before it; `number` counts the blocks of this sort.
        """
        lists = self.lists
        place = goal = new_word & PLACE_MASK
        if block.block_hash is None:
            goal = SPENT | UNHASHED
        else:
            if place < lists.before_place and self._is_parent(block, before):
                goal = lists.before_place
            lists.before_place = goal
        if place == SPENT:
            self.model.guard.demoted = True
        watched = bool(lists.protected)
        if watched and block.block_id in lists.protected:
            goal = PROTECTED | WATCHED
        alike = goal == place
        lists.words[block.block_id] = new_word if alike else lists.intern(new_word - place | goal)
        if not starts or starts[-1][2] != goal:
            starts.append((block, number, goal))
        return alike and not watched

    def _move(self, starts: Starts) -> None:
        """Move the runs that begin at `starts` to their lists; the last start is their end."""
        for (first, number, goal), (behind, end, _) in pairwise(starts):
            if goal == SPENT:  # with a hash
                self.counters.demoted_blocks += end - number
            place = goal & PLACE_MASK
            self.lists.append(first, behind.prev_free_block, end - number, place)

    def _is_parent(self, block: Block, child: Block) -> bool:
        """Whether `block`, freed right after `child`, covers one block less of its chain."""
        tokens, more = block.block_hash_num_tokens, child.block_hash_num_tokens
        return tokens is not None and more is not None and more - tokens == self.hash_block_size

    def _observe(self, sample: Mapping[bytes, Block], word: int) -> None:
        """Tell the model of sorted blocks, by their hash, that were computed with `word`."""
        kind, stamp = word >> KIND_SHIFT & KIND_MASK, word >> STAMP_SHIFT
        self.model.observe_computed(sample, kind, stamp, lambda h: _is_copy(h, sample[h]))

    # -- which list -------------------------------------------------------------------

    def _sorted_word(self, word: int) -> int:
        """What a hashed block with `word` has once it is sorted, if its child need not wait.

        It is spent if keeping it is not worth the eviction of another.
        """
        kind, state = word >> KIND_SHIFT & KIND_MASK, self.model.guard.state
        place = FIRST_LIST + kind
        if state is LRU:
            place = FIRST_LIST + REUSED  # the last list: nothing moves
        elif kind == REUSED or state is not NORMAL or word & LET_THROUGH:
            pass  # not to be demoted
        elif self.model.index[kind][0] < self._eviction_cost():
            place = SPENT
        return self.lists.intern(self.model.now << STAMP_SHIFT | kind << KIND_SHIFT | place)

    def _front_rank(self, place: int, front: Block) -> tuple[float, int, int]:
        """Keep value, stamp and place of a list with this oldest block; the lowest goes next.

        Equal values go by age, so that no child is left behind.
        """
        model = self.model
        stamp = self.lists.words[front.block_id] >> STAMP_SHIFT
        if model.guard.state is LRU:
            return 0.0, stamp, place
        keep = model.keep[place - FIRST_LIST][age_bin(model.now - stamp)]
        if place == FIRST_LIST + REUSED:
            tokens = front.block_hash_num_tokens or 0
            keep *= 1 + self.settings.depth_weight * tokens / DEPTH_TOKENS
        return keep, stamp, place

    def _eviction_cost(self) -> float:
        """Index of the block that the lists would give up next; 0 where there is none."""
        counts, least = self.lists.counts, None
        for place in range(FIRST_LIST, PROTECTED):
            if counts[place]:
                rank = self._front_rank(place, self.lists.front(place))
                if least is None or rank < least:
                    least = rank
        if least is None:
            return 0.0
        _, stamp, place = least
        return self.model.index[place - FIRST_LIST][age_bin(self.model.now - stamp)]

    def _ranked(self, fronts: Mapping[int, Block]) -> list[tuple[float, int, int]]:
        """The ranks of the lists with these `fronts`, lowest first."""
        return sorted(self._front_rank(place, front) for place, front in fronts.items())

    # -- victims ----------------------------------------------------------------------

    def choose(self, num_blocks: int, budget: int) -> int:
        """Bring the victims to the front of the queue, walking at most `budget` blocks.

        When the budget runs out, the remaining victims are taken in queue order: spent, then
        cold blocks. Returns how many blocks were walked.
        """
        counts = self.lists.counts
        if num_blocks < counts[SPENT]:
            counts[SPENT] -= num_blocks
            return 0
        need = num_blocks - counts[SPENT]
        if need < counts[FIRST_LIST] and not any(counts[FIRST_LIST + CONTINUING : PROTECTED]):
            self.lists.take([(None, None, need, FIRST_LIST)], 0)  # the next in the queue as it is
            return 0
        runs, walked = self._choose_runs(need, budget)
        self.lists.take(runs, need - sum(length for _, _, length, _ in runs))
        return walked

    def _choose_runs(self, need: int, budget: int) -> tuple[list[Run], int]:
        """The runs that give `need` victims after the spent ones, and the blocks walked.

        A run whose blocks stand next in the queue when it is their turn is not walked and has
        no last block.
        """
        left = list(self.lists.counts)
        runs: list[Run] = []
        walked = 0
        places = range(FIRST_LIST, PROTECTED) if need else ()
        fronts = {place: self.lists.front(place) for place in places if left[place]}
        while need and fronts:
            place, limit = self._lowest(fronts) if walked < budget else (min(fronts), None)
            first, last = fronts[place], None
            length = min(need, left[place])
            if limit is not None or place != min(fronts):
                most = min(length, budget - walked)
                last, fronts[place], length = self.lists.run_from(first, most, place, limit)
                walked += length
            runs.append((first, last, length, place))
            need -= length
            left[place] -= length
            if not left[place]:
                del fronts[place]
        return runs, walked

    def _lowest(self, fronts: Mapping[int, Block]) -> tuple[int, int | None]:
        """The list to take from, and the stamp up to which its blocks go first; None: all do."""
        if len(fronts) == 1:
            return min(fronts), None
        (keep, stamp, place), (next_keep, next_stamp, _) = self._ranked(fronts)[:2]
        model = self.model
        if model.guard.state is LRU:
            return place, next_stamp - 1
        if model.keep[place - FIRST_LIST][0] < next_keep:
            return place, None  # even its youngest block would go before the others' oldest
        limit = model.now - BIN_STARTS[age_bin(model.now - stamp)]
        return place, min(limit, next_stamp - 1) if keep == next_keep else limit


# -- the policy ------------------------------------------------------------------------

LET_THROUGH_SHARE = 1 / 8  # of never reused allocations, drawn at random, that are not demoted
SAVED_SCANS = 16  # scan limits' worth of saved sorting that one decision may spend, and ...
SAVED_BLOCKS = 1024  # ... blocks: the most that a request waits for, whatever the scan limit
MAX_FALLBACKS = 8  # failures, one decision after another, that switch the policy off
MAX_REBUILDS = 8  # in a pool's worth of allocations, that switch the policy off
SHARED_UNITS = 8  # clock units (8 blocks or more): a touch of a block in use is reuse if as old


class Debt:
    """Sorting that requests pay for, so that it keeps up with what they free.

    For each block that a request takes, new or from the cache, one freed block may be sorted
    after the pop. Credit that finds nothing to sort is saved, at most one pool's worth, since
    those blocks are freed later. At most min(1,024, 16 * scan_limit) saved ones are spent in
    one decision. At first every block of the pool is credit.
    """

    def __init__(self, num_blocks: int, scan_limit: int) -> None:
        self.owed = 0  # blocks to sort when the decision's blocks are handed out
        self.taken = 0  # blocks taken from the cache since the last decision
        self._saved = self._most = num_blocks
        self._late = min(SAVED_BLOCKS, SAVED_SCANS * scan_limit)

    def bill(self, num_blocks: int, payable: bool) -> None:
        """A decision gives `num_blocks` blocks: they and `taken` are owed, or else saved."""
        owed, self.taken = num_blocks + self.taken, 0
        if payable:
            self.owed = owed
        else:
            self._saved = min(self._saved + owed, self._most)

    def save(self, blocks: int) -> None:
        """So many blocks were handed out, and nothing can be sorted for them now."""
        self._saved = min(self._saved + blocks, self._most)

    def due(self) -> int:
        """Blocks to sort now."""
        return self.owed + min(self._saved, self._late)

    def repay(self, done: int) -> None:
        """So many of those due were sorted; the rest is saved."""
        self._saved = min(self._saved + self.owed - done, self._most)
        self.owed = 0


LAZY_SETTINGS = ("lazy_offload", "lmcache.mp.lazy_offload")  # of KV connectors


def lazy_connector(name: str, settings: Mapping[str, Any]) -> str:
    """The connector of these, or within a MultiConnector, that stores lazily; "" without one.

    Such a connector stores the blocks that LRU would evict next, and pins them meanwhile. It
    misses what the policy evicts first, and its pins look like reuse.
    """
    if any(settings.get(setting) for setting in LAZY_SETTINGS):
        return name
    for inner in settings.get("connectors") or ():
        found = lazy_connector(
            inner.get("kv_connector", ""), inner.get("kv_connector_extra_config") or {}
        )
        if found:
            return found
    return ""


def _serve_metrics(policy: "ComputeCachePolicy") -> None:
    if os.environ.get("COMPUTECACHE_METRICS_PORT"):
        try:
            from vllm.v1.core.computecache_metrics import serve_policy

            serve_policy(policy)
        except Exception:
            logger.exception("ComputeCache: metrics are not served; serving goes on.")


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

    Bound: a decision for n victims looks at n + scan_limit - 1 blocks at most. Sorting beside
    the decisions is paid for block by block (`Debt`). Moving a run of blocks is one splice.
    Only reset, the first decision after it and a fallback are proportional to the pool. Once
    per pool's worth of allocations the model is refitted, a fixed number of operations.
    Memory: 8 bytes a block, 32 for each different word, and the model.

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
        self.off_because = ""  # why an active policy leaves the queue alone for good
        self.pool = ""  # "scheduler" once that is known; a connector's pools have no name
        self._cursor_read: Any = None
        self._warned = False
        self._start()

    @classmethod
    def off(cls) -> "ComputeCachePolicy":
        """The policy of a pool class that does not run BlockPool's own ``__init__``: plain LRU."""
        return cls(Settings(), 0, 1, enable_caching=False)

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
        _serve_metrics(policy)
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
        if not self.enabled:
            return
        try:
            self._start()
        except Exception:
            self.lists.words = []  # what on_evicted asks
            self.counters.fallbacks += 1
            logger.exception("ComputeCache: a reset failed.")
            self._switch_off("a reset failed")

    def _start(self) -> None:
        blocks = self.num_blocks if self.enabled else 0
        self.model = ReuseModel(self.settings, blocks)
        self.lists = FreeLists(self.model, blocks)
        self.order = Ordering(self.settings, self.lists, self.counters, self.hash_block_size)
        self.debt = Debt(blocks, self.settings.scan_limit)
        self._failed = self._failed_at = 0  # failures in a row, decision of the last one
        self._rebuilt = self._rebuilt_from = 0  # rebuilds since the clock was that
        self._clock = 0  # blocks handed out or taken out of the free queue by a hit
        self._taken = REUSED << KIND_SHIFT  # the word of a block that is taken back
        self._fresh = FRESH  # the word of a block handed out by the current decision
        self._random = Random(0).random
        self._hit_since_decision = self._reuse_since_decision = False

    # -- what BlockPool tells ---------------------------------------------------------

    def on_access(self, block: Block) -> None:
        """`block` is about to be touched: before it leaves the free queue, if it is free.

        A free block that is taken back counts as reuse. A block in use counts only if its last
        use is SHARED_UNITS clock units old, so that the samples of one request, which arrive
        together, do not.
        """
        if not self.enabled or block.is_null:
            return
        try:
            lists, model = self.lists, self.model
            word = lists.words[block.block_id]
            in_use = block.ref_cnt
            self._hit_since_decision = True
            idle = model.now - (word >> STAMP_SHIFT)
            if in_use and idle < SHARED_UNITS:
                if not word & KIND_MASK << KIND_SHIFT:
                    lists.words[block.block_id] = lists.intern(word | CONTINUING << KIND_SHIFT)
                return
            if not in_use:
                if word & PLACE_MASK:
                    lists.take_out(block, word & PLACE_MASK)
                self._clock += 1
                self.debt.taken += 1
                self.counters.protected_hits += idle > model.lru_horizon
            self._reuse_since_decision = True
            lists.words[block.block_id] = self._taken
            self._observe_reuse(block, word)
        except Exception as error:
            self._fall_back("on_access", error)

    def _observe_reuse(self, block: Block, word: int) -> None:
        """A block that had this word is reused: news for the model, if it is in the sample."""
        model, block_hash = self.model, block.block_hash
        if word & FRESH:
            model.unobserved -= 1
        if block_hash is None or not block_hash < model.below:
            return
        if word & FRESH:
            kind = word >> KIND_SHIFT & KIND_MASK
            model.observe_computed((block_hash,), kind, word >> STAMP_SHIFT)
        if block.ref_cnt:
            model.observe((block_hash,), REUSED, model.now)
        else:
            model.observe_hits((block_hash,), REUSED, model.now)

    def on_evicted(self, block: Block) -> None:
        """`block` loses its hash: handed out, or invalidated where it stands."""
        words = self.lists.words  # none in lru mode
        if not words or block.ref_cnt:
            return
        try:
            block_id = block.block_id
            word = words[block_id]
            if block.next_free_block is not None:  # it keeps its place in the queue
                words[block_id] = self.lists.intern(word | UNHASHED)
                return
            words[block_id] = self._fresh
            if word & UNUSUAL:
                self._correct(word, block)
            if self.debt.owed:
                self._pay()
        except Exception as error:
            self._fall_back("on_evicted", error)

    def _correct(self, word: int, block: Block) -> None:
        """The decision counted its victims as never reused and observed: this one was not."""
        if block.is_null:  # never handed out
            self.lists.words[block.block_id] = word
            return
        counters = self.counters
        unhashed = bool(word & UNHASHED)
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
        """Sort a freed block for each one that the request took, new or from the cache."""
        done = self.order.sort(self.debt.due())
        self.debt.repay(done)
        self.counters.sorted_blocks += done

    def reorder_free_queue(
        self, queue: Queue, num_blocks: int, protected_block_ids: Container[int]
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
                if self.lists.queue is not queue:
                    self._attach(queue)
                self.lists.protected = protected_block_ids
                self._decide(num_blocks)
            except Exception as error:
                self._fall_back("a decision", error)
        log_every = self.settings.log_every
        if log_every and counters.decisions % log_every == 0:
            logger.info("ComputeCache: %s, guard: %s", counters, self.model.guard.state.value)

    def _forget_lists(self) -> None:
        self.lists.forget()
        self.debt = Debt(self.num_blocks, self.settings.scan_limit)

    def _fall_back(self, where: str, error: Exception) -> None:
        """The queue keeps its own order; the lists are begun anew at the next decision."""
        self._forget_lists()
        if isinstance(error, QueueError):
            self._count_rebuild(error)
            return
        self.counters.fallbacks += 1
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
            self._switch_off(f"{MAX_FALLBACKS} failures in a row")

    def _count_rebuild(self, error: QueueError) -> None:
        """A rebuild is in proportion to the pool: a few in a pool's worth, and it is enough."""
        self.counters.rebuilds += 1
        if self.counters.rebuilds == 1:
            logger.warning(
                "ComputeCache: other code changes the free queue (%s). Its order is left alone"
                " each time this is seen. Serving goes on.",
                error,
            )
        if self._clock - self._rebuilt_from > self.num_blocks:
            self._rebuilt_from, self._rebuilt = self._clock, 0
        self._rebuilt += 1
        if self._rebuilt == MAX_REBUILDS:
            self._switch_off("other code keeps changing the free queue")

    # -- company ----------------------------------------------------------------------

    def bind_scheduler(self, scheduler: Any) -> None:
        """`scheduler` has this pool, and a KV connector perhaps; called once, before it serves.

        Other pools of the process are a connector's own.
        """
        self.pool = "scheduler"
        if not self.enabled:
            return
        try:
            transfer = scheduler.vllm_config.kv_transfer_config
            reader = transfer and lazy_connector(
                transfer.kv_connector, transfer.kv_connector_extra_config
            )
            if reader:
                self._switch_off(f"{reader} stores what is next in LRU order")
        except Exception as error:
            self._fall_back("bind_scheduler", error)

    def _attach(self, queue: Queue) -> None:
        self._forget_lists()
        self.lists.attach(queue)
        read = getattr(queue, "iter_blocks_after", None)
        if read is None or read is self._cursor_read:
            return

        def cursor_read(cursor: Block) -> Any:
            """Who walks the queue behind a cursor misses what is moved in front of it."""
            queue.iter_blocks_after = read
            if self.enabled:
                self._switch_off("a KV connector walks the free queue behind a cursor")
            return read(cursor)

        queue.iter_blocks_after = self._cursor_read = cursor_read

    def _switch_off(self, reason: str) -> None:
        """Plain LRU from now on: the queue keeps the order that it has."""
        self.enabled = False
        self.off_because = reason
        logger.warning("ComputeCache: %s: plain LRU from now on. Serving goes on.", reason)

    # -- a decision -------------------------------------------------------------------

    def _decide(self, num_blocks: int) -> None:
        self._tick(num_blocks)
        lists, counters = self.lists, self.counters
        few = self.settings.scan_limit - 1
        budget = num_blocks + few
        absorbed, complete = lists.absorb(budget)
        if not complete:  # more of them than the decision needs: it takes these
            counters.inspected_blocks += absorbed
            self.debt.save(num_blocks)
            return
        lists.moved = False
        budget -= absorbed
        # Only sort a few where there is no need to touch reused blocks.
        counts = lists.counts
        spare = counts[SPENT] + counts[FIRST_LIST] + counts[FIRST_LIST + CONTINUING] >= num_blocks
        newly_sorted = self.order.sort(few if spare and few < budget else budget)
        walked = self.order.choose(num_blocks, budget - newly_sorted)
        counters.inspected_blocks += absorbed + newly_sorted + walked
        counters.reordered_decisions += lists.moved
        unsorted = lists.ends[PLACES].next_free_block is not lists.queue.fake_free_list_tail
        self.debt.bill(num_blocks, unsorted)

    def _tick(self, num_blocks: int) -> None:
        """The decision's clock unit, the guard's verdict, and the word of the blocks it gives."""
        model, lists = self.model, self.lists
        self._clock += num_blocks
        now = self._clock // model.unit
        if now != model.now:
            model.advance(now)
            lists.begin_unit()
            self._taken = lists.intern(now << STAMP_SHIFT | REUSED << KIND_SHIFT)
        if model.guard.compared_now and model.guard.settle(now):
            self.counters.lru_guard_trips += 1
        if self._reuse_since_decision:
            model.reuse_events += 1
        fresh = now << STAMP_SHIFT | FRESH
        if self._hit_since_decision:
            fresh |= CONTINUING << KIND_SHIFT
        if self._random() < LET_THROUGH_SHARE:
            fresh |= LET_THROUGH
        self._fresh = lists.intern(fresh)
        self._hit_since_decision = self._reuse_since_decision = False
