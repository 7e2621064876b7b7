# SPDX-License-Identifier: Apache-2.0
"""What scraping the policy's metrics costs the engine that serves them.

    .venv/bin/python tools/bench_scrape.py [--rounds 20] [--scrapes-per-s 20]

A real, patched BlockPool under eviction pressure makes decisions in rounds, in the order
ABBA. Another process scrapes all the time: in A an endpoint of its own (so that the
machine is as busy), in B the one in the pool's process. Prometheus scrapes every 5
seconds; the bench does so many times as often, to see anything at all, and divides by the
scrapes made.

One JSON object on stdout: microseconds per allocation (median and quartiles over rounds),
the ratio of paired rounds, time lost per scrape, and its share of a 5 s interval. Exit 0:
that share is at most 0.1 %, 1: it is more, 2: vLLM or the patch is missing.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType

from lab.modules import load_module
from lab.pool import Driver, make_pool, quiet_vllm

CORE = Path(__file__).resolve().parents[1] / "vllm/v1/core"
SCRAPE_INTERVAL_S = 5
MOST_SHARE = 0.001
PORT = 8170
POOL_BLOCKS = 4096
CHAIN_BLOCKS = 64
UNIQUE_BLOCKS = 64 * POOL_BLOCKS


def load(name: str) -> ModuleType:
    """A module of the patch from its file: vLLM itself is not needed for the decoy."""
    return load_module(name, CORE / f"{name}.py")


def endpoint(metrics, policy) -> str:
    """Serve `policy` with the module `metrics`; returns the address."""
    collector = metrics.PolicyCollector("0", "active")
    collector.policies.append(policy)
    server = metrics.start_endpoint(collector, "127.0.0.1", PORT)
    return f"http://127.0.0.1:{server.server_port}/metrics"


def scraper(url: str, interval_s: float, at_pool, scrapes) -> None:
    """Scrape `url` while `at_pool` is set, else an endpoint of this process, until ended."""
    policy = load("computecache_policy")
    settings = policy.Settings(mode="active")
    decoy = endpoint(load("computecache_metrics"), policy.ComputeCachePolicy(settings, 8, 16))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # both are local
    while True:
        pool = at_pool.is_set()
        direct.open(url if pool else decoy, timeout=5).read()
        scrapes[pool] += 1
        time.sleep(interval_s)


def requests():
    """One hot chain of eight in turn, then a chain that is used once: half of each."""
    number = 0
    while True:
        hot = number % 8 * CHAIN_BLOCKS
        yield range(hot, hot + CHAIN_BLOCKS)
        once = CHAIN_BLOCKS * (8 + number % (UNIQUE_BLOCKS // CHAIN_BLOCKS - 8))
        yield range(once, once + CHAIN_BLOCKS)
        number += 1


def us_per_allocation(driver: Driver, stream, seconds: float) -> float:
    """Mean microseconds of get_new_blocks over one round."""
    before_s, before = driver.decision_s, driver.decisions
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        driver.play(next(stream))
    return 1e6 * (driver.decision_s - before_s) / (driver.decisions - before)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 4), "q1": round(low, 4), "q3": round(high, 4)}


def measure(rounds: int, round_s: float, scrapes_per_s: float) -> dict:
    """Run the bench; RuntimeError when vLLM or the patch is missing."""
    pool = make_pool(POOL_BLOCKS, "active", {})
    from vllm.v1.core import computecache_metrics

    url = endpoint(computecache_metrics, pool.computecache)
    context = multiprocessing.get_context("spawn")
    at_pool, scrapes = context.Event(), context.Array("L", [0, 0])
    child = context.Process(
        target=scraper, args=(url, 1 / scrapes_per_s, at_pool, scrapes), daemon=True
    )
    child.start()
    try:
        driver, stream = Driver(pool, UNIQUE_BLOCKS, concurrency=8), requests()
        while not scrapes[0]:  # also fills the pool
            if not child.is_alive():
                raise RuntimeError("the scraping process ended, see above: nothing was measured")
            us_per_allocation(driver, stream, round_s)
        without: list[float] = []
        scraped: list[float] = []
        for number in range(rounds):
            for scrape in (False, True) if number % 2 else (True, False):
                at_pool.set() if scrape else at_pool.clear()
                us = us_per_allocation(driver, stream, round_s)
                (scraped if scrape else without).append(us)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    finally:
        child.terminate()
        child.join()
    ratio = spread([b / a for a, b in zip(without, scraped, strict=True)])
    lost_ms = 1000 * (ratio["median"] - 1) * rounds * round_s / max(scrapes[1], 1)
    return {
        "us_per_allocation": {"elsewhere": spread(without), "scraped": spread(scraped)},
        "ratio": ratio,
        "lost_ms_per_scrape": round(lost_ms, 3),
        "share_of_5_s_interval": round(lost_ms / 1000 / SCRAPE_INTERVAL_S, 6),
        "scrapes": scrapes[1],
        "rounds": rounds,
        "round_s": round_s,
        "blocks_per_request": CHAIN_BLOCKS,
        "decisions": pool.computecache.counters.decisions,
    }


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 free enough, 1 not, 2 could not tell."""
    parser = argparse.ArgumentParser(description="What scraping the policy's metrics costs.")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of rounds (default 20)")
    parser.add_argument("--round-s", type=float, default=0.5, help="seconds a round (default 0.5)")
    parser.add_argument("--scrapes-per-s", type=float, default=20, help="default 20")
    args = parser.parse_args(argv)
    if not (
        2 <= args.rounds <= 10_000
        and all(0 < v <= 1000 for v in (args.round_s, args.scrapes_per_s))
    ):
        parser.error("--rounds: 2 to 10000; --round-s and --scrapes-per-s: above 0, at most 1000")
    quiet_vllm()
    try:
        result = measure(args.rounds, args.round_s, args.scrapes_per_s)
    except (RuntimeError, OSError) as error:
        print(f"bench_scrape: {error}", file=sys.stderr)
        return 2
    accepted = result["share_of_5_s_interval"] <= MOST_SHARE and result["scrapes"] > 0
    print(json.dumps(result | {"accepted": accepted}))
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main())
