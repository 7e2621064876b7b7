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
    never = len(requests)
    # next_uses[i][d]: index of the next request after i that uses block d of i.
    upcoming = [never] * trace.unique_blocks
    next_uses: list[list[int]] = [[]] * len(requests)
    for index in range(len(requests) - 1, -1, -1):
        next_uses[index] = [upcoming[block] for block in requests[index]]
        for block in requests[index]:
            upcoming[block] = index

    resident = bytearray(trace.unique_blocks)
    holders = [0] * trace.unique_blocks
    next_use = [never] * trace.unique_blocks
    # Free blocks by (furthest next use, deepest), each packed in one integer; an
    # entry whose block is held, gone or re-dated is dropped when it surfaces.
    depth_span = max(map(len, requests), default=0) + 1
    block_span = trace.unique_blocks + 1
    heap: list[int] = []
    used = 0  # resident blocks
    held = 0  # resident blocks that a request in flight holds
    running: deque[list[int]] = deque()
    hits = 0

    def finish_oldest() -> None:
        nonlocal held
        for depth, block in enumerate(running.popleft()):
            holders[block] -= 1
            if not holders[block]:
                held -= 1
                order = (next_use[block] + 1) * depth_span + depth
                heappush(heap, -(order * block_span + block))

    for index, request in enumerate(requests):
        while len(running) >= concurrency:
            finish_oldest()
        missing = 0
        for block, use in zip(request, next_uses[index], strict=True):
            next_use[block] = use
            if resident[block]:
                hits += 1
                if not holders[block]:
                    held += 1
            else:
                missing += 1
            holders[block] += 1
        while held + missing > capacity_blocks:
            finish_oldest()
        while used + missing > capacity_blocks:
            order, block = divmod(-heappop(heap), block_span)
            stale = order // depth_span - 1 != next_use[block]
            if resident[block] and not holders[block] and not stale:
                resident[block] = 0
                used -= 1
        for block in request:
            if not resident[block]:
                resident[block] = 1
                used += 1
                held += 1
        running.append(request)
    return hits
