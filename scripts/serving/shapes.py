# SPDX-License-Identifier: Apache-2.0
"""Workload shapes: each function returns a plan, a list of requests.Request, from a seed.

pressure is the drill that the canary judges. The others are nearer to real traffic: popular
prefixes, chat sessions, and a recorded trace in the public Mooncake form.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import accumulate

from serving.requests import Prompts, Request
from serving.traces import TraceRow


def poisson_gaps(rate_per_s: float | None, seed: str) -> Iterable[float]:
    """Yield seconds between arrivals, for ever; zeros (a closed loop) when there is no rate."""
    rng = random.Random(f"{seed}/arrivals")
    while True:
        yield rng.expovariate(rate_per_s) if rate_per_s else 0.0


def pressure(
    prompts: Prompts,
    *,
    hot_tokens: int,
    flood_tokens: int,
    flood_requests: int,
    replay_every: int = 0,
    warm_requests: int = 3,
    repetitions: int = 1,
    control_requests: int = 0,
    survival_gaps: Sequence[int] = (),
    max_tokens: int = 4,
    gaps: Iterable[float],
) -> list[Request]:
    """One hot prefix against floods of one-use prompts.

    ramp: two one-use prompts. control: more of them, before anything is reused. warm: the hot
    prompt, `warm_requests` times.
    A repetition is `flood_requests` one-use prompts and then a replay of the hot prompt (with
    `replay_every` also one after that many). survival: floods of each given length and a replay.
    """
    gaps = iter(gaps)
    hot = prompts.draw("hot", hot_tokens)

    def hot_request(kind: str, **tag: int) -> Request:
        return Request(kind, hot, max_tokens, alone=True, tag={"shares": "hot", **tag})

    def one_use(kind: str, name: str, count: int, **tag: int) -> list[Request]:
        return [
            Request(
                kind,
                prompts.draw(f"{name}/{index}", flood_tokens),
                max_tokens,
                gap_s=next(gaps),
                tag={**tag, "key": f"{name}/{index}"},
            )
            for index in range(count)
        ]

    # Not counted: the first requests of a new server pay for its warming up.
    plan = one_use("ramp", "ramp", 2)
    for repetition in range(repetitions):
        plan += one_use("control", f"control/{repetition}", control_requests, repetition=repetition)
    plan += [hot_request("warm") for _ in range(warm_requests)]
    for repetition in range(repetitions):
        flood = one_use("flood", f"flood/{repetition}", flood_requests, repetition=repetition)
        step = replay_every or flood_requests
        for start in range(0, flood_requests, step):
            part = flood[start : start + step]
            last = start + step >= flood_requests
            replay = hot_request(
                "hot_replay" if last else "partial_replay",
                repetition=repetition,
                flood_requests=len(part),
            )
            plan += [*part, replay]
    for gap in survival_gaps:
        plan += one_use("survival_flood", f"survival/{gap}", gap)
        plan.append(hot_request("survival_replay", flood_requests=gap))
    return plan


def zipf(
    prompts: Prompts,
    seed: str,
    *,
    prefixes: int,
    prefix_tokens: int,
    question_tokens: int,
    flood_tokens: int,
    requests: int,
    exponent: float = 1.0,
    hot_share: float = 0.5,
    max_tokens: int = 4,
    gaps: Iterable[float],
) -> list[Request]:
    """Several hot prefixes, the i-th in proportion to i**-exponent, among one-use prompts.

    Each hot request is a prefix and a question of its own; `hot_share` of requests are hot.
    """
    rng = random.Random(f"{seed}/zipf")
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(prefixes)))
    plan = []
    for index, gap_s in zip(range(requests), gaps, strict=False):
        if rng.random() < hot_share:
            (rank,) = rng.choices(range(prefixes), cum_weights=weights)
            prompt = prompts.draw(f"prefix/{rank}", prefix_tokens)
            prompt = prompt + prompts.draw(f"question/{index}", question_tokens)
            tag = {"shares": f"prefix/{rank}", "prefix": rank}
            plan.append(Request("hot", prompt, max_tokens, gap_s=gap_s, tag=tag))
        else:
            prompt = prompts.draw(f"one-use/{index}", flood_tokens)
            plan.append(Request("flood", prompt, max_tokens, gap_s=gap_s))
    return plan


def sessions(
    prompts: Prompts,
    *,
    count: int,
    turns: int,
    first_tokens: int,
    turn_tokens: int,
    think_s: float = 0.0,
    max_tokens: int = 4,
    gaps: Iterable[float],
) -> list[Request]:
    """Chat sessions side by side: every turn sends the conversation so far and `turn_tokens` more.

    A session's first request arrives after its gap; each later one `think_s` after the answer.
    """
    plan = []
    histories = [prompts.draw(f"session/{index}", first_tokens) for index in range(count)]
    for turn in range(turns):
        for index, gap_s in zip(range(count), gaps, strict=False):
            if turn:
                histories[index] = histories[index] + prompts.draw(
                    f"session/{index}/{turn}", turn_tokens
                )
            plan.append(
                Request(
                    "session_turn" if turn else "session_start",
                    histories[index],
                    max_tokens,
                    gap_s=0.0 if turn else gap_s,
                    lane=index,
                    think_s=think_s,
                    tag={"shares": f"session/{index}", "turn": turn},
                )
            )
    return plan


def trace(
    prompts: Prompts,
    rows: Iterable[TraceRow],
    *,
    block_tokens: int,
    speed: float = 1.0,
    max_model_len: int,
    max_tokens: int = 4,
    max_requests: int | None = None,
) -> tuple[list[Request], int]:
    """Turn a trace's rows into a plan; returns it and how many requests exceed `max_model_len`.

    Every hash id becomes `block_tokens` synthetic tokens, the same wherever the id appears, so
    equal prefixes stay equal. `rows` are in order of time, as the reader leaves them; a request
    without a full block is left out. Arrival times are divided by `speed`; 0 sends in a closed
    loop.
    """
    plan: list[Request] = []
    too_long = 0
    before_ms = None
    for row in rows:
        if max_requests is not None and len(plan) >= max_requests:
            break
        if not row.hash_ids:
            continue
        if len(row.hash_ids) * block_tokens + max_tokens > max_model_len:
            too_long += 1
            continue
        gap_s = 0.0
        if speed and before_ms is not None:
            gap_s = (row.timestamp_ms - before_ms) / 1000 / speed
        before_ms = row.timestamp_ms
        prompt = [token for i in row.hash_ids for token in prompts.draw(f"trace/{i}", block_tokens)]
        tag = {"shares": f"trace/{row.hash_ids[0]}"}
        plan.append(Request("trace", prompt, max_tokens, gap_s=gap_s, tag=tag))
    return plan, too_long
