#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold the active policy against its bars: traces, floods and drifts on the real BlockPool.

Writes every cell and the verdict to docs/results/policy.json and the tables between the
markers in docs/policy.md. The lab's block hashes have a seed, which chooses the sampled ones;
the policy is replayed once more under others to show the spread. Exit status 0: all bars
hold; 1: a bar is missed; 2: no verdict.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track

import make_trace
from lab.cells import Cell, run_cells
from lab.files import replace_file, replace_section
from lab.options import add_common_arguments, check_common_arguments
from lab.policy_report import render
from lab.pool import quiet_vllm, try_policy
from lab.replay_report import compare
from lab.scenarios import drift_hit_ratio, flood_kept
from lab.traces import Trace, TraceError, half_of, read_trace

RECORDED = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl", "mix_real16.jsonl.gz")
GENERATED = ("flood", "drift", "chat", "agents")
GENERATED_SEED = 1
CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2)  # of the unique blocks of a trace
SCAN_LIMITS = (16, 32, 64)
PEERS = ["S3FIFO", "Sieve", "ARC", "LIRS", "WTinyLFU"]
SMALL_TRACES = ("mooncake_conversation", "mix_real16")  # bars of their own at 1 and 2 %
POOLS = (256, 4096)  # num_gpu_blocks
HOT_SHARES = (0.125, 0.25, 0.5)  # of the pool
FLOOD_PROMPTS = (10, 20, 40, 60, 90, 120)  # blocks
SET_SHARES = (0.4, 0.7)  # of the pool
ONE_USE_SHARES = (0.0, 0.1, 0.3)  # of the prompts


def trace_paths(directory: Path, scratch: Path) -> list[Path]:
    """The recorded traces in `directory`, and the generated ones, which go to `scratch`."""
    if not directory.is_dir():
        raise TraceError(
            f"--traces-dir {directory}: no such directory; name the one with {RECORDED}"
        )
    paths = [directory / name for name in RECORDED]
    for kind in GENERATED:
        paths.append(scratch / f"{kind}.jsonl")
        rows = make_trace.make_trace(kind, GENERATED_SEED, make_trace.REQUESTS)
        paths[-1].write_bytes(make_trace.to_jsonl(rows))
    return paths


def replay_matrix(
    traces: list[Trace],
    half: str,
    arguments: argparse.Namespace,
    modes: list[str],
    hash_seed: int = 0,
) -> list[dict]:
    """Every trace at every capacity: the policy per scan limit, and the ``modes`` beside it."""
    variants = [(mode, None) for mode in modes] + [("active", limit) for limit in SCAN_LIMITS]
    cells = [
        Cell(index, capacity, mode, limit, arguments.concurrency, hash_seed)
        for index in range(len(traces))
        for capacity in CAPACITIES
        for mode, limit in variants
    ]
    rows = run_cells([half_of(trace, half) for trace in traces], cells, arguments.workers)
    return [{"half": half, **row} for row in rows]


def spread(traces: list[Trace], arguments: argparse.Namespace, rows: list[dict]) -> list[dict]:
    """The bars on whole traces under each hash seed of --spread; other modes are in ``rows``."""
    found = []
    whole = [row for row in rows if row["half"] == "all" and row["mode"] in ("lru", "optimum")]
    for seed in arguments.spread if whole else ():
        rows = whole + replay_matrix(traces, "all", arguments, [], seed)
        compare(rows)
        found.append({"hash_seed": seed, "bars": trace_bars(rows, "all")})
    return found


def flood_matrix() -> list[dict]:
    """Share of the hot prefix kept, for LRU and for each scan limit."""
    cells = []
    cases = list(product(POOLS, HOT_SHARES, FLOOD_PROMPTS))
    for pool, share, prompt in track(cases, "floods", console=Console(stderr=True), transient=True):
        hot = int(share * pool)
        kept = {"lru": flood_kept(pool, hot, prompt, "lru", {})}
        for limit in SCAN_LIMITS:
            kept[str(limit)] = flood_kept(pool, hot, prompt, "active", {"scan_limit": limit})
        cell = {"pool_blocks": pool, "hot_blocks": hot, "prompt_blocks": prompt, "kept": kept}
        cells.append(cell)
    return cells


def drift_matrix() -> list[dict]:
    """Hit ratio of the new hot set under LRU and, relative to it, for each scan limit."""
    cells = []
    cases = list(product(POOLS, SET_SHARES, ONE_USE_SHARES))
    for pool, share, one_use in track(
        cases, "drifts", console=Console(stderr=True), transient=True
    ):
        lru = drift_hit_ratio(pool, share, one_use, "lru", {})
        relative = {}
        for limit in SCAN_LIMITS:
            ratio = drift_hit_ratio(pool, share, one_use, "active", {"scan_limit": limit})
            relative[str(limit)] = ratio / lru
        cell = {"pool_blocks": pool, "set_share": share, "one_use_share": one_use}
        cells.append({**cell, "lru_hit_ratio": lru, "over_lru": relative})
    return cells


def _bar(name: str, required: float, measured: float, where: str) -> dict:
    holds = measured >= required
    return {
        "name": name,
        "required": required,
        "measured": round(measured, 4),
        "holds": holds,
        "where": where,
    }


def _place(row: dict) -> str:
    return f"{row['trace']} {row['capacity']:.0%} scan {row['scan_limit']}"


def trace_bars(rows: list[dict], half: str) -> list[dict]:
    """The bars on hit ratios for one half of the traces (or all of them)."""
    active = [row for row in rows if row["mode"] == "active" and row["half"] == half]
    worst = min(active, key=lambda row: row["points_over_lru"])
    mean = sum(row["points_over_lru"] for row in active) / len(active)

    def small_win(row: dict) -> float:
        return max(row["points_over_lru"] / 2, (row["gap_closed"] or 0) / 0.1)

    small = [r for r in active if r["trace"] in SMALL_TRACES and r["capacity"] <= 0.02]
    weakest = min(small, key=small_win)
    label = {"all": "all requests", "second": "second half", "first": "first half"}[half]
    return [
        _bar(f"worst points over LRU, {label}", -0.3, worst["points_over_lru"], _place(worst)),
        _bar(f"mean points over LRU, {label}", 1.5, mean, f"{len(active)} cells"),
        _bar(
            f"1 and 2 % caches: of +2 points or 10 % of the gap, {label}",
            1.0,
            small_win(weakest),
            _place(weakest),
        ),
    ]


def scenario_bars(floods: list[dict], drifts: list[dict]) -> list[dict]:
    """The bars on floods and drifts: the worst cell of each."""
    bars = []
    for limit in map(str, SCAN_LIMITS):
        worst = min(floods, key=lambda cell: cell["kept"][limit])
        where = f"pool {worst['pool_blocks']} hot {worst['hot_blocks']} n {worst['prompt_blocks']}"
        required = 1.0 if limit == "64" else 0.9
        bars.append(_bar(f"flood, scan {limit}: kept", required, worst["kept"][limit], where))
    for limit in map(str, SCAN_LIMITS):
        worst = min(drifts, key=lambda cell: cell["over_lru"][limit])
        where = (
            f"pool {worst['pool_blocks']} sets {worst['set_share']:g} of it, "
            f"{worst['one_use_share']:.0%} one-use"
        )
        bars.append(_bar(f"drift, scan {limit}: of LRU", 0.98, worst["over_lru"][limit], where))
    return bars


def safety_bars(rows: list[dict]) -> list[dict]:
    """No fallback, and no more blocks inspected than n + scan_limit - 1 per decision."""
    active = [row for row in rows if row["mode"] == "active"]
    fallbacks = sum(row["counters"]["fallbacks"] for row in active)

    def of_bound(row: dict) -> float:
        bound = row["allocated_blocks"] + row["decisions"] * (row["scan_limit"] - 1)
        return row["counters"]["inspected_blocks"] / bound if bound else 0.0

    most = max(active, key=of_bound)
    return [
        _bar("fallbacks, negated", 0, -fallbacks, f"{len(active)} cells"),
        _bar("bound on inspected blocks: share left", 0, 1 - of_bound(most), _place(most)),
    ]


def _slim(row: dict) -> dict:
    """A cell as the committed JSON keeps it."""
    kept = {k: v for k, v in row.items() if v is not None and k not in ("counters", "concurrency")}
    kept.update({k: row["counters"][k] for k in ("fallbacks",) if k in row["counters"]})
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in kept.items()}


def _to_json(report: dict) -> bytes:
    """One line a cell, so that a changed cell is one changed line."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(item) for item in value)
            parts.append(f' "{key}": [\n  {lines}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces-dir", type=Path, default=root.parent / "shared" / "traces")
    parser.add_argument(
        "--half", default="all,second", help="of all,first,second (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=root / "docs" / "results" / "policy.json")
    parser.add_argument("--document", type=Path, default=root / "docs" / "policy.md")
    parser.add_argument(
        "--spread",
        type=int,
        nargs="*",
        default=[1, 2],
        help="other hash seeds, for --half all (default 1 2)",
    )
    parser.add_argument("--dry-run", action="store_true", help="write no file")
    add_common_arguments(parser)
    parser.set_defaults(peer=PEERS)
    arguments = check_common_arguments(parser, parser.parse_args(argv))
    arguments.halves = arguments.half.split(",")
    if unknown := set(arguments.halves) - {"all", "first", "second"}:
        parser.error(f"--half names {sorted(unknown)}: choose from all,first,second")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    quiet_vllm()
    started = time.monotonic()
    try:
        if not arguments.dry_run:
            replace_section(arguments.document.read_text(), "")  # fails now, not after the runs
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
        if arguments.policy:
            try_policy(arguments.policy)
        with tempfile.TemporaryDirectory() as scratch:
            paths = trace_paths(arguments.traces_dir, Path(scratch))
            traces = [read_trace(path) for path in paths]
            floods, drifts = flood_matrix(), drift_matrix()
            modes = ["lru", "optimum", *arguments.peer]
            rows = []
            for half in arguments.halves:
                rows += replay_matrix(traces, half, arguments, modes)
            spreads = spread(traces, arguments, rows)
    except (TraceError, OSError, RuntimeError, ImportError, ValueError) as error:
        print(f"evaluate_policy: {error}", file=sys.stderr)
        return 2
    import vllm

    bars = [bar for half in arguments.halves for bar in trace_bars(rows, half)]
    bars += scenario_bars(floods, drifts) + safety_bars(rows)
    report = {
        "vllm": vllm.__version__,
        "concurrency": arguments.concurrency,
        "bars": bars,
        "spread": spreads,
        "floods": floods,
        "drifts": drifts,
        "cells": [_slim(row) for row in rows],
    }
    if not arguments.dry_run:
        replace_file(arguments.json, _to_json(report))
        tables = render(report, SCAN_LIMITS)
        document = replace_section(arguments.document.read_text(), tables)
        replace_file(arguments.document, document.encode())
    held = all(bar["holds"] for bar in bars)
    seconds = round(time.monotonic() - started)
    print(json.dumps({"accepted": held, "seconds": seconds, "bars": bars}, indent=1))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
