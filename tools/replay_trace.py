#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replay request traces through the real, patched vLLM BlockPool.

For each request: look up its longest cached prefix, touch those blocks, allocate
the rest in one call, register their hashes. At most ``--concurrency`` requests are
in flight: before the next one starts, the oldest frees its blocks, tail first. Only
full prompt blocks take part; a request larger than the pool is skipped and counted.
The offline optimum and libcachesim's policies can be run on the same requests."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from lab.cells import MODES, Cell, run_cells
from lab.files import replace_file
from lab.options import (
    add_common_arguments,
    check_common_arguments,
    file_to_write,
    list_of,
    names_of,
)
from lab.pool import quiet_vllm, try_policy
from lab.replay_report import chart_of, table_of
from lab.traces import TraceError, half_of, read_trace


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz")
    parser.add_argument(
        "--capacity",
        type=list_of(float, 1e-6),
        default=[0.02, 0.05, 0.1],
        help="list; shares of the trace's unique blocks (<= 1) or blocks (default 0.02,0.05,0.1)",
    )
    parser.add_argument("--mode", type=names_of(MODES), default=["lru", "active"])
    parser.add_argument("--scan-limit", type=list_of(int, 1), help="list for active")
    parser.add_argument("--half", choices=("first", "second", "all"), default="all")
    parser.add_argument(
        "--hash-seed", type=int, default=0, help="of the block hashes: chooses the policy's sample"
    )
    parser.add_argument("--json", type=file_to_write, help="write the cells to this file, too")
    parser.add_argument(
        "--plot", type=file_to_write, help="draw hit ratio over capacity to this .svg"
    )
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
