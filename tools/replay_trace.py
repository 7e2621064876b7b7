#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replay request traces through the real, patched vLLM BlockPool.

For each request: look up its longest cached prefix, touch those blocks, allocate
the rest in one call, register their hashes, and free everything tail first once
``--concurrency`` requests are in flight and the next one starts. Only full prompt
blocks take part; a request larger than the pool is skipped and counted.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from optimum import optimum_hits
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import Trace, TraceError, half_of, read_trace

MODES = ("lru", "active", "optimum")
DEFAULT_CONCURRENCY = 8  # requests in flight
COUNTERS = ("decisions", "reordered_decisions", "inspected_blocks", "fallbacks")


@dataclass(frozen=True)
class Replay:
    """What one replay counted. Blocks unless the name says otherwise."""

    trace: str
    mode: str
    capacity_blocks: int
    concurrency: int
    requests: int
    skipped_requests: int
    referenced_blocks: int
    hit_blocks: int
    allocations: int
    allocate_us: float
    decisions: int = 0
    reordered_decisions: int = 0
    inspected_blocks: int = 0
    fallbacks: int = 0

    @property
    def hit_ratio(self) -> float:
        """Blocks in hit prefixes per block reference."""
        return self.hit_blocks / self.referenced_blocks if self.referenced_blocks else 0.0


@contextlib.contextmanager
def policy_environment(mode: str, settings: Mapping[str, object]) -> Iterator[None]:
    """Set COMPUTECACHE_MODE and ``settings`` (names without the prefix) for a pool's birth.

    The caller's own COMPUTECACHE_* weights stay; no metrics endpoint is started.
    """
    before = {k: v for k, v in os.environ.items() if k.startswith("COMPUTECACHE_")}
    os.environ.pop("COMPUTECACHE_METRICS_PORT", None)
    os.environ["COMPUTECACHE_MODE"] = mode
    for name, value in settings.items():
        os.environ[f"COMPUTECACHE_{name.upper()}"] = str(value)
    try:
        yield
    finally:
        for name in [k for k in os.environ if k.startswith("COMPUTECACHE_")]:
            del os.environ[name]
        os.environ.update(before)


def make_pool(capacity_blocks: int, mode: str, settings: Mapping[str, object]):
    """A real BlockPool with that many usable blocks (block 0 is vLLM's null block).

    Raises RuntimeError when the active policy is asked for and vLLM is not patched.
    """
    from vllm.v1.core.block_pool import BlockPool

    with policy_environment(mode, settings):
        pool = BlockPool(capacity_blocks + 1, enable_caching=True, hash_block_size=1)
    enabled = getattr(getattr(pool, "computecache", None), "enabled", False)
    if enabled != (mode == "active"):
        raise RuntimeError(
            f"the pool's policy is {'on' if enabled else 'absent or off'} in mode {mode!r}: "
            "install it with tools/install_computecache.py install"
        )
    return pool


def replay(
    trace: Trace,
    capacity_blocks: int,
    mode: str = "lru",
    settings: Mapping[str, object] | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
) -> Replay:
    """Replay ``trace`` at one capacity. ``mode`` is "lru", "active" or "optimum".

    ``settings`` are COMPUTECACHE_* values without the prefix, e.g. {"scan_limit": 32}.
    """
    served = [r for r in trace.requests if len(r) <= capacity_blocks]
    common = {
        "trace": trace.name,
        "mode": mode,
        "capacity_blocks": capacity_blocks,
        "concurrency": concurrency,
        "requests": len(served),
        "skipped_requests": len(trace.requests) - len(served),
        "referenced_blocks": sum(map(len, served)),
    }
    if mode == "optimum":
        hits = optimum_hits(trace, capacity_blocks, concurrency)
        return Replay(**common, hit_blocks=hits, allocations=0, allocate_us=0.0)
    pool = make_pool(capacity_blocks, mode, settings or {})
    hits, allocations, allocate_s = _drive(pool, served, trace.unique_blocks, concurrency)
    counters = getattr(getattr(pool, "computecache", None), "counters", None)
    return Replay(
        **common,
        hit_blocks=hits,
        allocations=allocations,
        allocate_us=1e6 * allocate_s / allocations if allocations else 0.0,
        **{name: getattr(counters, name, 0) for name in COUNTERS},
    )


def _drive(
    pool, requests: list[list[int]], unique_blocks: int, concurrency: int
) -> tuple[int, int, float]:
    """Run the requests; returns (hit blocks, allocations, seconds in get_new_blocks)."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    hashes = [i.to_bytes(8, "big") for i in range(unique_blocks)]
    keys = [make_block_hash_with_group_id(h, 0) for h in hashes]
    lookup = pool.cached_block_hash_to_block.get_one_block
    clock = time.perf_counter
    running: deque[list] = deque()
    stub = SimpleNamespace(block_hashes=[])  # all of Request that cache_full_blocks reads
    hit_blocks = allocations = 0
    allocate_s = 0.0
    for request in requests:
        if len(running) == concurrency:
            pool.free_blocks(reversed(running.popleft()))
        blocks = []
        for block_id in request:
            block = lookup(keys[block_id])
            if block is None:
                break
            blocks.append(block)
        hits = len(blocks)
        hit_blocks += hits
        pool.touch(blocks)
        missing = len(request) - hits
        if missing:
            # A full pool makes vLLM wait for running requests to end.
            while missing > pool.get_num_free_blocks():
                pool.free_blocks(reversed(running.popleft()))
            start = clock()
            new_blocks = pool.get_new_blocks(missing)
            allocate_s += clock() - start
            allocations += 1
            blocks += new_blocks
            stub.block_hashes = [hashes[i] for i in request]
            pool.cache_full_blocks(stub, blocks, hits, len(request), 1, 0)
        running.append(blocks)
    while running:
        pool.free_blocks(reversed(running.popleft()))
    return hit_blocks, allocations, allocate_s


def try_policy(path: Path) -> None:
    """Use a policy file in place of the installed one, in this process only."""
    name = "vllm.v1.core.computecache_policy"
    if "vllm.v1.core.block_pool" in sys.modules:
        raise RuntimeError("a policy file has to be named before vLLM's BlockPool is imported")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def capacity_in_blocks(trace: Trace, capacity: float) -> int:
    """A share of the trace's unique blocks (<= 1) or a number of blocks (> 1)."""
    return max(1, int(capacity * trace.unique_blocks if capacity <= 1 else capacity))


def _numbers(kind):
    def parse(text: str) -> list:
        values = [kind(part) for part in text.split(",")]
        if not all(math.isfinite(v) and v > 0 for v in values):
            raise ValueError
        return values

    return parse


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := set(modes) - set(MODES):
        raise argparse.ArgumentTypeError(f"unknown {sorted(unknown)}: choose from {MODES}")
    return modes


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz")
    parser.add_argument(
        "--capacity",
        type=_numbers(float),
        default=[0.02, 0.05, 0.1],
        help="list; a share of the trace's unique blocks (<= 1) or blocks (default 0.02,0.05,0.1)",
    )
    parser.add_argument(
        "--mode", type=_modes, default=["lru", "active"], help="list of " + str(MODES)
    )
    parser.add_argument(
        "--scan-limit", type=_numbers(int), help="list for active (default: the environment's)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        help="requests in flight (default 8)",
    )
    parser.add_argument("--half", choices=("first", "second", "all"), default="all")
    parser.add_argument("--policy", type=Path, help="try this policy file, not the installed one")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, help="write the cells here, too")
    arguments = parser.parse_args(argv)
    for name in ("concurrency", "workers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, expected an integer >= 1")
    return arguments


@dataclass(frozen=True)
class Cell:
    """One replay to run: a trace by its place in the list, a capacity and a mode."""

    trace: int
    capacity: float
    mode: str
    scan_limit: int | None
    concurrency: int


_traces: list[Trace] = []  # what forked workers read


def _run_cell(cell: Cell) -> dict:
    trace = _traces[cell.trace]
    settings = {"scan_limit": cell.scan_limit} if cell.scan_limit else {}
    blocks = capacity_in_blocks(trace, cell.capacity)
    result = replay(trace, blocks, cell.mode, settings, cell.concurrency)
    return {
        **asdict(result),
        "capacity": cell.capacity,
        "scan_limit": cell.scan_limit,
        "hit_ratio": result.hit_ratio,
    }


def run_cells(traces: Sequence[Trace], cells: Sequence[Cell], workers: int) -> list[dict]:
    """Replay all cells, in forked workers that share the traces; progress on stderr."""
    _traces[:] = traces
    if any(cell.mode != "optimum" for cell in cells):
        import vllm.v1.core.block_pool  # noqa: F401  once, before the fork
    gc.collect()
    gc.freeze()  # the traces hold millions of numbers that no collection can free
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=fork) as pool:
        done = pool.map(_run_cell, cells)
        console = Console(stderr=True)
        rows = list(track(done, "replaying", len(cells), console=console))
    gc.unfreeze()
    return compare(rows)


def compare(rows: list[dict]) -> list[dict]:
    """Add points over LRU and the share of the gap to the optimum where both are known."""
    ratio = {(r["trace"], r["capacity"], r["mode"]): r["hit_ratio"] for r in rows}
    for row in rows:
        lru = ratio.get((row["trace"], row["capacity"], "lru"))
        best = ratio.get((row["trace"], row["capacity"], "optimum"))
        row["points_over_lru"] = None if lru is None else 100 * (row["hit_ratio"] - lru)
        known = lru is not None and best is not None and best > lru
        row["gap_closed"] = (row["hit_ratio"] - lru) / (best - lru) if known else None
        decisions = row["decisions"]
        row["inspected_per_decision"] = row["inspected_blocks"] / decisions if decisions else None
    return rows


def table_of(rows: list[dict]) -> Table:
    """The rows as a table for people."""
    table = Table()
    for name in ("trace", "capacity", "blocks", "mode", "hit %", "points over LRU", "gap closed %"):
        table.add_column(name, justify="left" if name in ("trace", "mode") else "right")
    for name in ("inspected / decision", "us / allocation", "fallbacks", "skipped"):
        table.add_column(name, justify="right")

    def shown(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    for row in rows:
        gap = row["gap_closed"]
        table.add_row(
            row["trace"],
            f"{row['capacity']:g}",
            str(row["capacity_blocks"]),
            f"{row['mode']} {row['scan_limit'] or ''}".strip(),
            f"{100 * row['hit_ratio']:.2f}",
            shown(row["points_over_lru"], 2),
            shown(None if gap is None else 100 * gap, 1),
            shown(row["inspected_per_decision"], 1),
            shown(row["allocate_us"], 1),
            str(row["fallbacks"]),
            str(row["skipped_requests"]),
        )
    return table


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    # vLLM logs to stdout by default.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        traces = [half_of(read_trace(path), arguments.half) for path in arguments.traces]
        if arguments.policy:
            try_policy(arguments.policy)
        cells = [
            Cell(index, capacity, mode, limit, arguments.concurrency)
            for index in range(len(traces))
            for capacity in arguments.capacity
            for mode in arguments.mode
            for limit in ((arguments.scan_limit or [None]) if mode == "active" else [None])
        ]
        rows = run_cells(traces, cells, arguments.workers)
    except (TraceError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    Console(stderr=True, width=200).print(table_of(rows))
    if arguments.json:
        temporary = arguments.json.with_name(arguments.json.name + ".tmp")
        temporary.write_text(json.dumps(rows, indent=1) + "\n")
        os.replace(temporary, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
