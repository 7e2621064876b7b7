# SPDX-License-Identifier: Apache-2.0
"""Run a plan: many requests in order, some at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from serving.client import Client
from serving.requests import Request, Result


async def run_plan(
    client: Client,
    plan: list[Request],
    *,
    concurrency: int = 1,
    max_seconds: float = 600,
    max_failures: int = 5,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the requests in order, at most `concurrency` at once; return their results in order.

    After `max_seconds` or `max_failures` failed requests no more are started, so the answer can be
    shorter than the plan. Raises what a request raises, once those in flight have been cancelled.
    """
    slots = asyncio.Semaphore(concurrency)
    deadline = time.monotonic() + max_seconds
    failures = 0
    broken = False
    tasks: list[asyncio.Task[Result | None]] = []
    last_of_lane: dict[int, asyncio.Task[Result | None]] = {}

    def over() -> bool:
        return broken or time.monotonic() >= deadline or failures >= max_failures

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, deadline - time.monotonic())))

    async def one(request: Request, before: asyncio.Task[Result | None] | None) -> Result | None:
        nonlocal failures, broken
        if before is not None:
            await before
            await sleep(request.think_s)
        async with slots:
            if over():
                return None
            try:
                result = await (client.send_alone if request.alone else client.send)(request)
            except BaseException:
                broken = True
                raise
        failures += result.error is not None
        on_result(result)
        return result

    try:
        started = time.monotonic()
        for request in plan:
            if request.alone:
                await asyncio.gather(*tasks)
            if request.gap_s:
                await sleep(started + request.gap_s - time.monotonic())
            elif request.lane is None:
                async with slots:  # a closed loop starts the next when there is room for it
                    pass
            if over():
                break
            started = time.monotonic()
            before = None if request.lane is None else last_of_lane.get(request.lane)
            tasks.append(asyncio.create_task(one(request, before)))
            if request.lane is not None:
                last_of_lane[request.lane] = tasks[-1]
            await asyncio.sleep(0)  # let it take its slot
            if request.alone:
                await tasks[-1]
        results = await asyncio.gather(*tasks)
    except BaseException:
        await _cancel(tasks)
        raise
    return [result for result in results if result is not None]


async def _cancel(tasks: list[asyncio.Task[Result | None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # unasked, each would print a traceback
