# SPDX-License-Identifier: Apache-2.0
"""Replays: a trace at one capacity in one mode, and many of them side by side."""

import gc
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console
from rich.progress import track

from lab.optimum import optimum_hits
from lab.peers import PEERS, peer_hits
from lab.pool import Driver, make_pool
from lab.replay_report import compare
from lab.traces import Trace

MODES = ("lru", "active", "optimum")
DEFAULT_CONCURRENCY = 8  # requests in flight


@dataclass(frozen=True)
class Replay:
    """What one replay counted; a decision is one call of get_new_blocks."""

    trace: str
    mode: str
    capacity_blocks: int
    requests: int
    skipped_requests: int
    referenced_blocks: int
    hit_blocks: int = 0
    decisions: int = 0
    allocated_blocks: int = 0
    us_per_decision: float | None = None
    reference_hit_ratio: float | None = None
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Blocks in hit prefixes per block reference."""
        return self.hit_blocks / self.referenced_blocks if self.referenced_blocks else 0.0

    @property
    def inspected_per_decision(self) -> float | None:
        """Queue blocks that the policy looked at, per decision it made."""
        decisions = self.counters.get("decisions")
        return self.counters["inspected_blocks"] / decisions if decisions else None


def replay(
    trace: Trace,
    capacity_blocks: int,
    mode: str = "lru",
    settings: Mapping[str, object] | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
    hash_seed: int = 0,
) -> Replay:
    """Replay ``trace`` at one capacity; ``mode`` is one of MODES or of PEERS.

    ``settings`` are COMPUTECACHE_* values without the prefix, e.g. {"scan_limit": 32}.
    """
    served = [r for r in trace.requests if len(r) <= capacity_blocks]
    referenced = sum(map(len, served))
    asked = Replay(
        trace=trace.name,
        mode=mode,
        capacity_blocks=capacity_blocks,
        requests=len(served),
        skipped_requests=len(trace.requests) - len(served),
        referenced_blocks=referenced,
    )
    if mode == "optimum":
        return replace(asked, hit_blocks=optimum_hits(trace, capacity_blocks, concurrency))
    if mode in PEERS:
        hits, found = peer_hits(trace, capacity_blocks, mode)
        ratio = found / referenced if referenced else 0.0
        return replace(asked, hit_blocks=hits, reference_hit_ratio=ratio)
    pool = make_pool(capacity_blocks, mode, settings or {})
    driver = Driver(pool, trace.unique_blocks, concurrency, hash_seed)
    for request in served:
        driver.play(request)
    driver.finish_all()
    decisions = driver.decisions
    return replace(
        asked,
        hit_blocks=driver.hit_blocks,
        decisions=decisions,
        allocated_blocks=driver.allocated_blocks,
        us_per_decision=1e6 * driver.decision_s / decisions if decisions else None,
        counters=asdict(pool.computecache.counters) if mode == "active" else {},
    )


def capacity_in_blocks(trace: Trace, capacity: float) -> int:
    """A share of the trace's unique blocks (<= 1) or a number of blocks (> 1)."""
    return max(1, int(capacity * trace.unique_blocks if capacity <= 1 else capacity))


@dataclass(frozen=True)
class Cell:
    """One replay to run: a trace by its place in the list, a capacity and a mode."""

    trace: int
    capacity: float
    mode: str
    scan_limit: int | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    hash_seed: int = 0


_traces: list[Trace] = []  # what forked workers read


def _run_cell(cell: Cell) -> dict:
    trace = _traces[cell.trace]
    settings = {} if cell.scan_limit is None else {"scan_limit": cell.scan_limit}
    blocks = capacity_in_blocks(trace, cell.capacity)
    result = replay(trace, blocks, cell.mode, settings, cell.concurrency, cell.hash_seed)
    return {
        **asdict(result),
        "capacity": cell.capacity,
        "scan_limit": cell.scan_limit,
        "concurrency": cell.concurrency,
        "hit_ratio": result.hit_ratio,
        "inspected_per_decision": result.inspected_per_decision,
    }


def run_cells(traces: Sequence[Trace], cells: Sequence[Cell], workers: int) -> list[dict]:
    """Replay all cells, in forked workers that share the traces; progress on stderr."""
    _traces[:] = traces
    if any(cell.mode in ("lru", "active") for cell in cells):
        make_pool(1, "lru", {})  # imports vLLM once, before the fork
    gc.collect()
    gc.freeze()  # the traces hold millions of numbers that no collection can free
    fork = multiprocessing.get_context("fork")
    console = Console(stderr=True)
    try:
        with ProcessPoolExecutor(workers, mp_context=fork) as pool:
            done = pool.map(_run_cell, cells)
            rows = list(track(done, "replaying", len(cells), console=console, transient=True))
    finally:
        gc.unfreeze()
    compare(rows)
    return rows
