# SPDX-License-Identifier: Apache-2.0
"""What every part of gpu_evidence.py works with: cells, clients of the live servers, samples."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from evidence.plan import Sizes
from evidence.store import Store
from servers.fleet import Fleet, Running
from servers.processes import alive
from serving import http
from serving.client import Client
from serving.console import progress
from serving.options import add_workload_options
from serving.plan import run_plan
from serving.press import read_policy
from serving.requests import Prompts, Request, Result, WorkloadError
from serving.summary import Report
from serving.traces import TraceRow

KEPT_KEYS = (
    "mode",
    "scan_limit",
    "policy",
    "warm_prefix_cached_tokens",
    "post_flood_cached_tokens",
    "hot_prefix_preserved",
    "replays",
    "requests",
    "failures",
    "ttft_ms",
    "tokens",
    "counters",
    "problems",
)
T = TypeVar("T")
OPEN_LOOP = 100_000  # requests in flight at most, where arrivals decide


class Full(Exception):
    """The time for this part or this call is over."""


@dataclass
class Bench:
    """What a part works with. deadline: a time.monotonic() at which everything must be over.

    trace_rows: the recorded requests, for the part of that name.
    """

    fleet: Fleet
    store: Store
    sizes: Sizes
    deadline: float
    trace_rows: list[TraceRow]
    rehearse: bool
    part: str = ""
    part_deadline: float = 0.0

    def left_s(self) -> float:
        return min(self.deadline, self.part_deadline) - time.monotonic()

    def up(self, group: str, names: tuple[str, ...] | None = None) -> list[Running]:
        """Start these servers of a group, wait for them and return those that answer."""
        specs = [s for s in self.fleet.of(group) if names is None or s.name in names]
        began = time.monotonic()
        self.fleet.start(specs)
        self.fleet.wait(specs, self.deadline)
        self.part_deadline += time.monotonic() - began
        for spec in specs:
            if spec.key in self.fleet.lost:
                self.store.error(self.part, spec.key, self.fleet.lost[spec.key][-3000:])
        return [self.fleet.running[s.key] for s in specs if s.key in self.fleet.running]

    async def cell(
        self, key: str, need_s: float, measure: Callable[[], Awaitable[dict]], server: Running
    ) -> dict | None:
        """Measure one cell unless the part has it; a failure is recorded and nothing is raised."""
        if (found := self.store.cell(self.part, key)) is not None:
            return found
        if self.left_s() < need_s:
            raise Full(f"{key} needs {need_s:.0f} s, {self.left_s():.0f} s are left")
        if server.key in self.fleet.lost or not alive(server.pid):
            if server.key not in self.fleet.lost:
                self.fleet.lost[server.key] = "\n".join(server.log_lines()[-40:])
                self.store.error(self.part, server.key, self.fleet.lost[server.key][-3000:])
            return None
        try:
            data = await asyncio.wait_for(measure(), self.left_s())
        except TimeoutError:
            self.store.error(self.part, key, "cut off by the deadline")
            raise Full(f"{key} was cut off") from None
        except Exception as error:  # whatever it is, the other cells are worth having
            self.store.error(self.part, key, f"{type(error).__name__}: {error}")
            progress(f"{self.part} {key} FAILED: {error}")
            return None
        self.store.add(self.part, key, {"server": server.key, **data})
        return data


class Live:
    """A client of one server, with its prompts drawn from that server's own tokenizer."""

    def __init__(self, server: Running, client: Client, pool: list[int], max_len: int) -> None:
        self.server, self.client, self.pool, self.max_len = server, client, pool, max_len
        self.name = server.key.split(":")[1]

    def policy(self) -> dict:
        if self.server.policy_url is None:
            return read_policy([], expect_unpatched=True)
        return read_policy([self.server.policy_url])

    async def reset(self) -> None:
        """Empty the prefix cache; what the policy learned goes with it."""
        async with http.async_client(self.client.base_url, timeout_s=30) as client:
            for _ in range(100):  # blocks of the last request are freed a moment after its end
                answer = await client.post("/reset_prefix_cache")
                answer.raise_for_status()
                if answer.json()["success"]:
                    return
                await asyncio.sleep(0.05)
        raise WorkloadError(f"{self.server.key}: the prefix cache cannot be reset, blocks are held")

    async def run(self, plan: list[Request], concurrency: int = 1) -> list[Result]:
        """Run a plan; raises WorkloadError when a request failed."""
        results = await run_plan(self.client, plan, concurrency=concurrency, max_failures=1)
        if bad := [r.error for r in results if r.error]:
            raise WorkloadError(f"{self.server.key}: {bad[0]}")
        return results


@asynccontextmanager
async def connected(servers: Iterable[Running]) -> AsyncIterator[list[Live]]:
    """The servers that answer, as Live, until the block ends; the others are named on stderr."""
    async with AsyncExitStack() as stack:
        lives = []
        for server in servers:
            client = await stack.enter_async_context(Client(server.base_url, timeout_s=60))
            try:
                lives.append(Live(server, client, *await client.token_pool()))
            except WorkloadError as error:
                progress(f"{server.key}: {error}")
        yield lives


def kept(report: Report) -> dict:
    """What a cell keeps of what `press` returned."""
    return {name: value for name, value in report.items() if name in KEPT_KEYS}


def options(**settings: object) -> argparse.Namespace:
    """The workload options of prefix_pressure.py: its defaults, then `settings`."""
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    found = parser.parse_args([])
    vars(found).update(settings)
    return found


def one_use(live: Live, name: str, count: int, tokens: int, max_tokens: int = 2) -> list[Request]:
    prompts = Prompts(live.pool, "one-use")
    return [Request("flood", prompts.draw(f"{name}/{i}", tokens), max_tokens) for i in range(count)]


def order_of_round(members: list[T], number: int) -> list[T]:
    """The order in which round `number` takes the members.

    Over twice as many rounds as there are members each goes first twice. Two members take turns
    as A B, B A, then B A, A B.
    """
    shift = (number // 2) % len(members)
    order = members[shift:] + members[:shift]
    return order[::-1] if number % 2 else order


async def fill(live: Live, sizes: Sizes) -> None:
    """Empty the cache, then leave no block of the pool without a cached one-use prefix."""
    count = 1 + sizes.mid_blocks * sizes.block_size // sizes.fill_tokens
    await live.reset()
    await live.run(one_use(live, "fill", count, sizes.fill_tokens), 8)
