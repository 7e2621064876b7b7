#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replay request traces through the real, patched vLLM BlockPool.

For each request: look up its longest cached prefix, touch those blocks, allocate
the rest in one call, register their hashes. At most ``--concurrency`` requests are
in flight: before the next one starts, the oldest frees its blocks, tail first. Only
full prompt blocks take part; a request larger than the pool is skipped and counted.
The offline optimum and libcachesim's policies can be run on the same requests.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from optimum import optimum_hits
from peers import PEERS, peer_hits
from replay_report import chart_of, compare, table_of
from rich.console import Console
from rich.progress import track
from traces import Trace, TraceError, half_of, read_trace, replace_file

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
    hit_blocks: int
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

    Raises RuntimeError when vLLM or the active policy is not installed, ValueError
    when the policy replaces a setting by another value.
    """
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError as error:
        raise RuntimeError(
            f"vLLM cannot be imported ({error}): run scripts/setup_env.sh"
        ) from error

    with policy_environment(mode, settings):
        pool = BlockPool(capacity_blocks + 1, enable_caching=True, hash_block_size=1)
    enabled = getattr(getattr(pool, "computecache", None), "enabled", False)
    if enabled != (mode == "active"):
        raise RuntimeError(
            f"mode {mode} was asked for, but the BlockPool's policy is "
            f"{'on' if enabled else 'off or missing'}: run tools/install_computecache.py"
        )
    for name, value in settings.items() if enabled else ():
        if (used := getattr(pool.computecache.settings, name)) != value:
            raise ValueError(f"COMPUTECACHE_{name.upper()} is {value}, but the policy takes {used}")
    return pool


class Driver:
    """Plays requests on one pool; the counts cover everything played so far.

    Block hashes are SHA-256 digests, as vLLM's own are; ``hash_seed`` makes others of the
    same blocks. The policy follows a sample of hashes, so it chooses that sample.
    """

    def __init__(self, pool, unique_blocks: int, concurrency: int, hash_seed: int = 0) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self.pool = pool
        self.concurrency = concurrency
        names = (b"%d/%d" % (hash_seed, number) for number in range(unique_blocks))
        self.hashes = [hashlib.sha256(name).digest() for name in names]
        self.keys = [make_block_hash_with_group_id(h, 0) for h in self.hashes]
        self.running: deque[list] = deque()
        self.hit_blocks = self.decisions = self.allocated_blocks = 0
        self.decision_s = 0.0

    def cached_prefix(self, request: Sequence[int]) -> list:
        """The request's longest run of cached blocks, from its first block on."""
        lookup = self.pool.cached_block_hash_to_block.get_one_block
        keys = self.keys
        blocks = []
        for block_id in request:
            block = lookup(keys[block_id])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def finish_oldest(self) -> None:
        """End the request that has been in flight the longest."""
        self.pool.free_blocks(reversed(self.running.popleft()))

    def play(self, request: Sequence[int]) -> int:
        """Start one request, which must fit the pool; returns the blocks it hit."""
        pool = self.pool
        if len(self.running) == self.concurrency:
            self.finish_oldest()
        blocks = self.cached_prefix(request)
        hits = len(blocks)
        self.hit_blocks += hits
        pool.touch(blocks)
        missing = len(request) - hits
        if missing:
            # A full pool makes vLLM wait for running requests to end.
            while missing > pool.get_num_free_blocks():
                self.finish_oldest()
            start = time.perf_counter()
            new_blocks = pool.get_new_blocks(missing)
            self.decision_s += time.perf_counter() - start
            self.decisions += 1
            self.allocated_blocks += missing
            blocks += new_blocks
            hashes = self.hashes
            # All of a vLLM Request that cache_full_blocks reads.
            stub = SimpleNamespace(block_hashes=[hashes[i] for i in request])
            pool.cache_full_blocks(stub, blocks, hits, len(request), 1, 0)
        self.running.append(blocks)
        return hits

    def finish_all(self) -> None:
        """End every request in flight, oldest first."""
        while self.running:
            self.finish_oldest()


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
    common = {
        "trace": trace.name,
        "mode": mode,
        "capacity_blocks": capacity_blocks,
        "requests": len(served),
        "skipped_requests": len(trace.requests) - len(served),
        "referenced_blocks": referenced,
    }
    if mode == "optimum":
        return Replay(**common, hit_blocks=optimum_hits(trace, capacity_blocks, concurrency))
    if mode in PEERS:
        hits, found = peer_hits(trace, capacity_blocks, mode)
        ratio = found / referenced if referenced else 0.0
        return Replay(**common, hit_blocks=hits, reference_hit_ratio=ratio)
    pool = make_pool(capacity_blocks, mode, settings or {})
    driver = Driver(pool, trace.unique_blocks, concurrency, hash_seed)
    for request in served:
        driver.play(request)
    driver.finish_all()
    decisions = driver.decisions
    return Replay(
        **common,
        hit_blocks=driver.hit_blocks,
        decisions=decisions,
        allocated_blocks=driver.allocated_blocks,
        us_per_decision=1e6 * driver.decision_s / decisions if decisions else None,
        counters=asdict(pool.computecache.counters) if mode == "active" else {},
    )


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


def quiet_vllm() -> None:
    """vLLM logs every pool to stdout by default; call before it is imported."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def list_of(kind: Callable[[str], float], least: float) -> Callable[[str], list]:
    """An argparse type: comma separated numbers above or at ``least``."""

    def parse(text: str) -> list:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(math.isfinite(v) and v >= least for v in values):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers >= {least}, like 16,32")
        return values

    return parse


def _names(choices: Sequence[str]) -> Callable[[str], list[str]]:
    spelling = {name.lower(): name for name in choices}

    def parse(text: str) -> list[str]:
        names = text.lower().replace("-", "").split(",")
        if unknown := [name for name in names if name not in spelling]:
            raise argparse.ArgumentTypeError(f"unknown {unknown}: choose from {','.join(choices)}")
        return [spelling[name] for name in names]

    return parse


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every replay of traces takes."""
    parser.add_argument("--concurrency", type=int, default=DEFAULT_CONCURRENCY, help="default 8")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--peer", type=_names(PEERS), default=[], help="list of " + ",".join(PEERS))
    parser.add_argument("--policy", type=Path, help="try this policy file, not the installed one")


def check_common_arguments(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> argparse.Namespace:
    """Ends the program with usage and status 2 where argparse alone cannot see the fault."""
    for name in ("concurrency", "workers"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name} is {value}, expected an integer >= 1")
    if arguments.policy and not arguments.policy.is_file():
        parser.error(f"--policy {arguments.policy}: no such file")
    return arguments


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz")
    parser.add_argument(
        "--capacity",
        type=list_of(float, 1e-6),
        default=[0.02, 0.05, 0.1],
        help="list; shares of the trace's unique blocks (<= 1) or blocks (default 0.02,0.05,0.1)",
    )
    parser.add_argument("--mode", type=_names(MODES), default=["lru", "active"])
    parser.add_argument("--scan-limit", type=list_of(int, 1), help="list for active")
    parser.add_argument("--half", choices=("first", "second", "all"), default="all")
    parser.add_argument(
        "--hash-seed", type=int, default=0, help="of the block hashes: chooses the policy's sample"
    )
    parser.add_argument("--json", type=Path, help="write the cells to this file, too")
    parser.add_argument("--plot", type=Path, help="draw hit ratio over capacity to this .svg")
    add_common_arguments(parser)
    return check_common_arguments(parser, parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    quiet_vllm()
    try:
        traces = [half_of(read_trace(path), arguments.half) for path in arguments.traces]
        if arguments.policy:
            try_policy(arguments.policy)
        cells = [
            Cell(index, capacity, mode, limit, arguments.concurrency, arguments.hash_seed)
            for index in range(len(traces))
            for capacity in arguments.capacity
            for mode in arguments.mode + arguments.peer
            for limit in ((arguments.scan_limit or [None]) if mode == "active" else [None])
        ]
        rows = run_cells(traces, cells, arguments.workers)
    except (TraceError, OSError, RuntimeError, ImportError, ValueError) as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 190).print(table_of(rows))
    if arguments.plot:
        replace_file(arguments.plot, chart_of(rows).encode())
    if arguments.json:
        replace_file(arguments.json, (json.dumps(rows, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
