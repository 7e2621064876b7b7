#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a decision costs: microseconds per get_new_blocks on vLLM's real BlockPool.

Unpatched, lru and active at several scan limits run in one process, on pools filled with
the same cached blocks. Each sample times one pass of calls; the variants take turns, in
an order shuffled anew for each round, so that a drift of the machine meets all of them.
With --beside FILE another version of the policy takes its turns, too.
Between calls, outside the clock, the blocks are cached under new hashes and freed, as
one-use requests do: every call evicts as many cached blocks as it takes.

JSON on stdout: median and quartiles of microseconds per call, and the ratio to unpatched
of the same round. --write also puts it into docs/results/overhead.json and its table into
docs/policy.md. Exit status 0: all goals hold; 1: one is missed; 2: it could not run.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from lab.files import replace_file, replace_section
from lab.pool import block_pool_with, unpatched_block_pool

POOLS = (1024, 20480)  # blocks
VICTIMS = (1, 16, 60)  # blocks per call
SCAN_LIMITS = (16, 32, 64)
LRU_RATIO = 1.1  # goal: lru, times unpatched
ACTIVE_RATIO_60 = 2.0  # goal: active at scan limit 64 and 60 victims, times unpatched
ACTIVE_US_1 = 15.0  # goal: active at scan limit 64 and one victim, microseconds
BESIDE_RATIO = 1.05  # goal with --beside: active at scan limit 64, times the other policy
BESIDE = "beside 64"  # the other policy's variant


def make_pool(module, num_blocks: int, mode: str, scan_limit: int):
    before = dict(os.environ)
    os.environ["COMPUTECACHE_MODE"] = mode
    os.environ["COMPUTECACHE_SCAN_LIMIT"] = str(scan_limit)
    os.environ["COMPUTECACHE_LOG_EVERY"] = "0"
    os.environ.pop("COMPUTECACHE_METRICS_PORT", None)
    try:
        return module.BlockPool(num_blocks, enable_caching=True, hash_block_size=16)
    finally:
        os.environ.clear()
        os.environ.update(before)


class Load:
    """One-use requests of `victims` blocks on one pool, a few of them in flight."""

    def __init__(self, pool, victims: int, in_flight: int = 4) -> None:
        self.pool, self.victims, self.in_flight = pool, victims, in_flight
        self.running: list[list] = []
        self.serial = 0

    def step(self) -> int:
        """Start one request; nanoseconds of its get_new_blocks."""
        pool, victims = self.pool, self.victims
        if len(self.running) == self.in_flight:
            pool.free_blocks(reversed(self.running.pop(0)))
        start = time.perf_counter_ns()
        blocks = pool.get_new_blocks(victims)
        spent = time.perf_counter_ns() - start
        self.serial += 1
        hashes = [
            hashlib.sha256(b"%d/%d" % (self.serial, number)).digest() for number in range(victims)
        ]
        request = SimpleNamespace(block_hashes=hashes)
        pool.cache_full_blocks(request, blocks, 0, victims, 16, 0)
        self.running.append(blocks)
        return spent


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high}


def pools(num_blocks: int, beside: Path | None) -> dict:
    """A pool of every variant, by its name."""
    import vllm.v1.core.block_pool as patched

    variants = {"unpatched": make_pool(unpatched_block_pool(), num_blocks, "lru", 64)}
    variants["lru"] = make_pool(patched, num_blocks, "lru", 64)
    for scan_limit in SCAN_LIMITS:
        variants[f"active {scan_limit}"] = make_pool(patched, num_blocks, "active", scan_limit)
    if beside:
        variants[BESIDE] = make_pool(block_pool_with(beside), num_blocks, "active", 64)
    return variants


def measure(
    variants: dict, num_blocks: int, victims: int, rounds: int, calls: int, seed: int
) -> list[dict]:
    loads = {name: Load(pool, victims) for name, pool in variants.items()}
    for load in loads.values():
        for _ in range(2 * num_blocks // victims):  # until every block is cached
            load.step()
    samples: dict[str, list[float]] = {name: [] for name in loads}
    order = list(loads)
    shuffled = random.Random(seed)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            step = loads[name].step
            samples[name].append(statistics.median(step() for _ in range(calls)) / 1000)
    rows = []
    for name, values in samples.items():
        ratios = [a / b for a, b in zip(values, samples["unpatched"], strict=True)]
        fallbacks = variants[name].computecache.fallbacks if name != "unpatched" else 0
        rows.append(
            {
                "pool_blocks": num_blocks,
                "victims": victims,
                "variant": name,
                "us_per_call": quartiles(values),
                "ratio_to_unpatched": quartiles(ratios),
                "fallbacks": fallbacks,
            }
        )
    return rows


def goals_of(rows: list[dict]) -> list[dict]:
    """Each goal with what was measured; medians are compared."""
    goals = []
    median = {
        (row["variant"], row["victims"], row["pool_blocks"]): row["us_per_call"]["median"]
        for row in rows
    }
    for row in rows:
        ratio, spent = row["ratio_to_unpatched"]["median"], row["us_per_call"]["median"]
        plural = "" if row["victims"] == 1 else "s"
        where = f"{row['variant']}, {row['victims']} victim{plural}, pool {row['pool_blocks']}"
        if row["variant"] == "lru":
            goals.append((f"{where}: at most {LRU_RATIO} x unpatched", ratio, LRU_RATIO))
        elif row["variant"] == "active 64" and row["victims"] == 1:
            goals.append((f"{where}: at most {ACTIVE_US_1} us", spent, ACTIVE_US_1))
        elif row["variant"] == "active 64" and row["victims"] == 60:
            goals.append(
                (f"{where}: at most {ACTIVE_RATIO_60} x unpatched", ratio, ACTIVE_RATIO_60)
            )
        elif row["variant"] == BESIDE:
            ratio = median["active 64", row["victims"], row["pool_blocks"]] / spent
            where = where.replace(BESIDE, "active 64")
            goals.append((f"{where}: at most {BESIDE_RATIO} x beside", ratio, BESIDE_RATIO))
    return [{"goal": g, "measured": m, "holds": m <= bound} for g, m, bound in goals]


def table(rows: list[dict], goals: list[dict]) -> str:
    lines = [
        "Generated by `tools/bench_overhead.py --write` from `docs/results/overhead.json`:",
        "microseconds per `get_new_blocks` on a machine without a GPU, every call evicting cached",
        "one-use blocks; medians, and the ratio to unpatched vLLM with quartiles.",
        "",
        "| pool | victims | variant | us | ratio | quartiles |",
        "| ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        spent, ratio = row["us_per_call"]["median"], row["ratio_to_unpatched"]
        lines.append(
            f"| {row['pool_blocks']} | {row['victims']} | {row['variant']} | {spent:.1f}"
            f" | {ratio['median']:.2f} | {ratio['q1']:.2f} to {ratio['q3']:.2f} |"
        )
    lines += ["", "| goal | measured | holds |", "| --- | ---: | --- |"]
    for goal in goals:
        holds = "yes" if goal["holds"] else "**no**"
        lines.append(f"| {goal['goal']} | {goal['measured']:.2f} | {holds} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="samples of each variant")
    parser.add_argument("--calls", type=int, default=200, help="calls in a sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="update the docs as well")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="measure this policy file in the same run"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2 or arguments.calls < 1:
        parser.error("--rounds must be at least 2 and --calls at least 1")
    if arguments.beside and not arguments.beside.is_file():
        parser.error(f"--beside {arguments.beside}: no such file")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.v1.core.block_pool  # noqa: F401
    except ImportError as error:
        print(f"vLLM cannot be imported ({error}): run scripts/setup_env.sh", file=sys.stderr)
        return 2
    rows = []
    for num_blocks in POOLS:
        for victims in VICTIMS:
            print(f"pool {num_blocks}, {victims} victims", file=sys.stderr)
            variants = pools(num_blocks, arguments.beside)
            rows += measure(
                variants, num_blocks, victims, arguments.rounds, arguments.calls, arguments.seed
            )
    goals = goals_of(rows)
    text = json.dumps({"rows": rows, "goals": goals}, indent=1)
    print(text)
    if arguments.write:
        docs = Path(__file__).resolve().parents[1] / "docs"
        page = docs / "policy.md"
        section = replace_section(page.read_text(), table(rows, goals), "overhead")
        replace_file(docs / "results/overhead.json", text.encode() + b"\n")
        replace_file(page, section.encode())
    return 0 if all(goal["holds"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
