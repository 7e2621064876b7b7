# SPDX-License-Identifier: Apache-2.0
"""Find the smallest scan limit at which active keeps the hot prefix inside the TTFT budget.

    tune_scan_limit.py --target embedded|compose [--limits 16,32,64]

One clean server start each: lru, active at every limit, lru again (the rollback). Every limit is
judged as the canary judges a candidate. Without --hot-tokens the hot prefix is sized between the
two largest limits, so that a policy that protects only what it looks at shows a difference.
Writes scan_limit.json to --out; nothing is promoted.

Exit 0: a limit was found. 1: none is good enough. 2: could not tell. One JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys

from drills.checks import UNKNOWN, never_lost
from drills.options import add_drill_options, block_tokens, limits, refuse_short_prefix
from drills.record import write_record
from drills.session import Session, exit_code_of, open_session
from drills.verdict import ACCEPT, INCONCLUSIVE, judge, judge_lru
from servers.embedded import BLOCK_SIZE
from serving.command import run_command
from serving.console import FEW_NOTE, of_few, say
from serving.options import add_workload_options, numbers, parse_workload, workload_settings
from serving.requests import WorkloadError
from serving.secret import redacted_record
from serving.summary import Report

DEFAULTS = {"repetitions": 6, "flood_requests": 7, "hot_tokens": None}


def hot_tokens_for(scan_limits: list[int], block_size: int) -> int:
    """Return a prefix size in tokens halfway between the two largest limits (in blocks)."""
    *_, smaller, largest = [0, *sorted(scan_limits)]
    return (smaller + largest) // 2 * block_size


def make_visits(tuning: Session, scan_limits: list[int]) -> None:
    """Visit lru, active at each limit, and lru again; end early when lru loses nothing."""
    total = len(scan_limits) + 2
    say(f"[1/{total}] baseline: lru")
    baseline = tuning.visit("baseline", "lru")
    if not (baseline.healthy and baseline.report) or never_lost(baseline.report):
        return
    for number, scan_limit in enumerate(scan_limits, 2):
        say(f"[{number}/{total}] active, scan limit {scan_limit}")
        tuning.visit("candidate", "active", scan_limit=scan_limit)
    say(f"[{total}/{total}] rollback: lru")
    tuning.visit("rollback", "lru")


def judge_limits(tuning: Session, options: argparse.Namespace) -> list[dict]:
    """Return one row a limit that was tried: verdict, tokens kept, TTFT."""
    others = [v for v in tuning.visits if v.role != "candidate"]
    rows = []
    for visit in tuning.visits:
        if visit.role != "candidate":
            continue
        report = visit.report
        verdict = judge([others[0], visit, *others[1:]], limits(options))
        if report and report["scan_limit"] != visit.scan_limit:
            verdict.add("scan_limit", UNKNOWN, f"the server reports {report['scan_limit']}")
        rows.append(
            {
                "scan_limit": visit.scan_limit,
                "outcome": verdict.outcome,
                "keeps_all": bool(report and never_lost(report)),
                "warm_prefix_cached_tokens": report and report["warm_prefix_cached_tokens"],
                "post_flood_cached_tokens": report and report["post_flood_cached_tokens"],
                "hot_replay_ttft_p95_ms": report and ttft_p95_ms(report, "hot_replay"),
                "flood_ttft_p95_ms": report and ttft_p95_ms(report, "flood"),
                "hot_replay_samples": ttft_samples(report, "hot_replay"),
                "flood_samples": ttft_samples(report, "flood"),
                "reasons": verdict.reasons,
            }
        )
    return rows


def ttft_p95_ms(report: Report, kind: str) -> float | None:
    """Return the p95 of a kind's time to first token, None when none of it was answered."""
    return report["ttft_ms"][kind]["p95"] if kind in report["ttft_ms"] else None


def ttft_samples(report: Report | None, kind: str) -> int:
    """Return how many times to first token a kind's p95 rests on."""
    return report["ttft_ms"][kind]["samples"] if report and kind in report["ttft_ms"] else 0


def choose(rows: list[dict]) -> int | None:
    """Return the smallest limit that was accepted and kept the whole prefix, None if none did."""
    good = [r["scan_limit"] for r in rows if r["outcome"] == ACCEPT and r["keeps_all"]]
    return min(good, default=None)


def print_table(rows: list[dict], chosen: int | None) -> None:
    """Print a row a limit on stderr."""
    from rich.console import Console  # after `drills`, which says what is not installed
    from rich.table import Table

    table = Table(title="scan limits")
    for title in ("scan limit", "outcome", "cached", "hot p95 ms", "flood p95 ms", ""):
        table.add_column(title)
    for row in rows:
        table.add_row(
            str(row["scan_limit"]),
            row["outcome"],
            f"{row['warm_prefix_cached_tokens']} -> {row['post_flood_cached_tokens']}",
            f"{row['hot_replay_ttft_p95_ms']}{of_few(row['hot_replay_samples'])}",
            f"{row['flood_ttft_p95_ms']}{of_few(row['flood_samples'])}",
            "chosen" if row["scan_limit"] == chosen else "",
        )
    Console(stderr=True).print(table)
    if any(of_few(row[name]) for row in rows for name in ("hot_replay_samples", "flood_samples")):
        say(FEW_NOTE)


def run(options: argparse.Namespace) -> int:
    """Run the search and write scan_limit.json; returns the exit code."""
    with open_session(options) as tuning:
        tuning.run(lambda: make_visits(tuning, options.limits))
        whole = judge_lru(tuning.visits)
        rows = judge_limits(tuning, options)
        left = tuning.finish(whole)
        chosen = choose(rows) if whole.exit_code == 0 else None
        record = {
            "schema": "computecache/scan_limit",
            "schema_version": 1,
            "chosen_scan_limit": chosen,
            "limits": rows,
            "checks": whole.checks,
            "held_to": vars(limits(options)),
            "settings": workload_settings(options),
            **left,
        }
        write_record(options.out / "scan_limit.json", record)
        tuning.close(left, whole.outcome)
    print_table(rows, chosen)
    print(json.dumps(redacted_record(record), allow_nan=False), flush=True)
    for reason in whole.reasons if whole.exit_code else []:
        say(reason)
    if chosen is not None:
        say(f"COMPUTECACHE_SCAN_LIMIT={chosen}")
        return 0
    return whole.exit_code or (2 if any(r["outcome"] == INCONCLUSIVE for r in rows) else 1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ends the process with 2 when it cannot be understood."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_drill_options(parser, ("embedded", "compose"))
    parser.add_argument("--limits", type=numbers, default=[16, 32, 64], help="limits to try")
    add_workload_options(parser)
    parser.set_defaults(**DEFAULTS, blocks=128, max_model_len=2048)
    options = parse_workload(parser, argv)
    if not options.limits or max(options.limits) > 4096:
        parser.error("--limits: numbers from 1 to 4096, separated by commas")
    try:
        block = block_tokens(options) or BLOCK_SIZE
    except WorkloadError as error:
        parser.error(str(error))
    if options.hot_tokens is None:
        # One block more: the smallest limits alone would give a prefix that holds none.
        options.hot_tokens = max(hot_tokens_for(options.limits, block), block + 1)
    refuse_short_prefix(parser, options)
    return options


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(run, parse(argv))


if __name__ == "__main__":
    sys.exit(run_command(main, result="in --out"))
