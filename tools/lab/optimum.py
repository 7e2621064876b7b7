# SPDX-License-Identifier: Apache-2.0
"""The offline bound: Belady's choice over blocks that running requests do not hold.

The victim is the free block whose next use is furthest away. A block is used
whenever its children are, so a parent's next use is never later than its child's;
of equal next uses the deeper block goes first, which keeps the cache prefix closed:
every cached block is a hit. Requests in flight hold their blocks exactly as in the
replay on the real pool. For chains of equal-sized blocks that must all be resident
while a request runs, evicting the furthest next use is optimal.
"""

from collections import deque
from heapq import heappop, heappush

from lab.traces import Trace


def optimum_hits(trace: Trace, capacity_blocks: int, concurrency: int) -> int:
    """Most block references that any cache of this size can serve.

    Requests larger than the capacity are skipped.
    """
    requests = [r for r in trace.requests if len(r) <= capacity_blocks]
    cache = _Cache(capacity_blocks, trace.unique_blocks, requests)
    hits = 0
    for request, next_uses in zip(requests, _next_uses(requests, trace.unique_blocks), strict=True):
        while len(cache.running) >= concurrency:
            cache.finish_oldest()
        hits += cache.start(request, next_uses)
    return hits


def _next_uses(requests: list[list[int]], unique_blocks: int) -> list[list[int]]:
    """At [i][d]: index of the next request after i that uses block d of i, or of none."""
    upcoming = [len(requests)] * unique_blocks
    next_uses: list[list[int]] = [[]] * len(requests)
    for index in range(len(requests) - 1, -1, -1):
        next_uses[index] = [upcoming[block] for block in requests[index]]
        for block in requests[index]:
            upcoming[block] = index
    return next_uses


class _Cache:
    """Resident blocks; requests in flight hold theirs, the others go furthest next use first."""

    def __init__(self, capacity: int, unique_blocks: int, requests: list[list[int]]) -> None:
        self.running: deque[list[int]] = deque()
        self._capacity = capacity
        self._resident = bytearray(unique_blocks)
        self._holders = [0] * unique_blocks
        self._next_use = [len(requests)] * unique_blocks
        self._used = 0  # resident blocks
        self._held = 0  # resident blocks that a request in flight holds
        # Free blocks by (furthest next use, deepest), each packed in one integer; an
        # entry whose block is held, gone or re-dated is dropped when it surfaces.
        self._depth_span = max(map(len, requests), default=0) + 1
        self._block_span = unique_blocks + 1
        self._free: list[int] = []

    def start(self, request: list[int], next_uses: list[int]) -> int:
        """Bring in and hold a request's blocks; returns how many were there already."""
        missing = self._hold(request, next_uses)
        while self._held + missing > self._capacity:
            self.finish_oldest()
        while self._used + missing > self._capacity:
            self._evict_first()
        for block in request:
            self._resident[block] = 1
        self._used += missing
        self._held += missing
        self.running.append(request)
        return len(request) - missing

    def finish_oldest(self) -> None:
        """End the request that has been in flight the longest; what no other holds is free."""
        holders, next_use = self._holders, self._next_use
        for depth, block in enumerate(self.running.popleft()):
            holders[block] -= 1
            if not holders[block]:
                self._held -= 1
                order = (next_use[block] + 1) * self._depth_span + depth
                heappush(self._free, -(order * self._block_span + block))

    def _hold(self, request: list[int], next_uses: list[int]) -> int:
        """Hold the blocks of a request, resident or not; returns how many are not."""
        resident, holders, next_use = self._resident, self._holders, self._next_use
        missing = 0
        for block, use in zip(request, next_uses, strict=True):
            next_use[block] = use
            if not resident[block]:
                missing += 1
            elif not holders[block]:
                self._held += 1
            holders[block] += 1
        return missing

    def _evict_first(self) -> None:
        """Take the first entry of the free blocks and evict its block, if it still is free."""
        order, block = divmod(-heappop(self._free), self._block_span)
        stale = order // self._depth_span - 1 != self._next_use[block]
        if self._resident[block] and not self._holders[block] and not stale:
            self._resident[block] = 0
            self._used -= 1
