# SPDX-License-Identifier: Apache-2.0
"""Published cache policies (libcachesim) on the block stream of a trace.

They know no prefixes and no requests in flight. A request's blocks are looked up
head first without a trace left behind (that gives the contiguous-prefix hits), then
referenced tail first, the order in which vLLM frees them: fed that way, libcachesim's
LRU equals the BlockPool with one request in flight, duplicates of blocks aside.
"""

from lab.traces import Trace

PEERS = ("ARC", "Cacheus", "LeCaR", "LIRS", "S3FIFO", "Sieve", "TwoQ", "WTinyLFU")
_HASH_POWER = 18  # buckets to start with, as a power of two; the tables grow


def peer_hits(trace: Trace, capacity_blocks: int, peer: str) -> tuple[int, int]:
    """(blocks in hit prefixes, block references found) for one libcachesim class, such as PEERS.

    Requests larger than the capacity are skipped. Raises ImportError when
    libcachesim is not installed.
    """
    import libcachesim

    cache = getattr(libcachesim, peer)(capacity_blocks, hashpower=_HASH_POWER)._cache
    reference = libcachesim.Request()
    reference.obj_size = 1
    prefix_hits = reference_hits = 0
    for request in trace.requests:
        if len(request) > capacity_blocks:
            continue
        for block in request:
            reference.obj_id = block
            if cache.find(reference, False) is None:
                break
            prefix_hits += 1
        for block in reversed(request):
            reference.obj_id = block
            reference.clock_time += 1
            reference_hits += cache.get(reference)
    return prefix_hits, reference_hits
