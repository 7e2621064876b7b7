# SPDX-License-Identifier: Apache-2.0
"""Prompts, shapes and the order in which a plan is run."""

import asyncio
import itertools
import statistics
import threading

import pytest

from serving import shapes
from serving.client import Client
from serving.plan import run_plan
from serving.requests import Prompts, Request, WorkloadError, check_plan, reusable_tokens

POOL = range(100, 400)
CLOSED_LOOP = itertools.repeat(0.0)


def run(server, plan, **options):
    async def go():
        async with Client(server.url) as client:
            return await run_plan(client, plan, **options)

    return asyncio.run(go())


def test_prompts_have_exact_sizes_and_depend_on_seed_and_name_only():
    prompts = Prompts(POOL, 7)
    assert [len(prompts.draw("a", size)) for size in (1, 640, 900)] == [1, 640, 900]
    assert prompts.draw("a", 640) == Prompts(POOL, 7).draw("a", 640)
    assert prompts.draw("a", 9) != prompts.draw("b", 9) != Prompts(POOL, 8).draw("b", 9)


def test_a_tokenizer_with_hardly_any_tokens_is_refused():
    with pytest.raises(WorkloadError, match="3 distinct tokens"):
        Prompts([1, 2, 3, 3], 0)


def test_a_plan_whose_prompts_do_not_fit_is_refused_with_the_numbers():
    plan = [Request("flood", list(range(1021)))]
    with pytest.raises(WorkloadError, match=r"1021 tokens and 4 .* max-model-len of 1024"):
        check_plan(plan, 1024)
    check_plan([Request("flood", list(range(1020)))], 1024)


def test_prompts_that_share_a_first_block_by_accident_are_refused():
    plan = [Request("flood", [1] * 9 + [2]), Request("flood", [1] * 9 + [3])]
    with pytest.raises(WorkloadError, match="start alike"):
        check_plan(plan, 1024)
    on_purpose = [Request("hot", r.prompt, tag={"shares": "hot"}) for r in plan]
    check_plan(on_purpose, 1024)


def test_pressure_alternates_floods_and_replays():
    plan = shapes.pressure(
        Prompts(POOL, 0),
        hot_tokens=64,
        flood_tokens=32,
        flood_requests=3,
        replay_every=2,
        warm_requests=2,
        repetitions=2,
        control_requests=1,
        survival_gaps=(1, 2),
        gaps=CLOSED_LOOP,
    )
    check_plan(plan, 1024)
    short = {"flood": "f", "hot_replay": "H", "partial_replay": "h", "warm": "w", "control": "c"}
    short |= {"survival_flood": "s", "survival_replay": "S", "ramp": "r"}
    assert "".join(short[r.kind] for r in plan) == "rrccww" + "ffhfH" * 2 + "sSssS"
    assert {tuple(r.prompt) for r in plan if r.alone} == {tuple(plan[4].prompt)}
    one_use = [tuple(r.prompt) for r in plan if not r.alone]
    assert len(set(one_use)) == len(one_use)
    replays = [r.tag["flood_requests"] for r in plan if r.kind.endswith("replay")]
    assert replays == [2, 1, 2, 1, 1, 2]


def test_zipf_popularity_falls_with_rank_and_questions_are_new():
    plan = shapes.zipf(
        Prompts(POOL, 0),
        "0",
        prefixes=4,
        prefix_tokens=64,
        question_tokens=16,
        flood_tokens=48,
        requests=2000,
        hot_share=0.75,
        gaps=CLOSED_LOOP,
    )
    check_plan(plan, 1024)
    hot = [r for r in plan if r.kind == "hot"]
    assert len(hot) == pytest.approx(1500, abs=80)
    counts = [sum(r.tag["prefix"] == rank for r in hot) for rank in range(4)]
    expected = [1500 * weight / (25 / 12) for weight in (1, 1 / 2, 1 / 3, 1 / 4)]
    assert counts == pytest.approx(expected, rel=0.2)
    assert len({tuple(r.prompt[:64]) for r in hot}) == 4
    assert len({tuple(r.prompt) for r in hot}) == len(hot)


def test_poisson_arrivals_have_the_rate_and_the_spread_that_were_asked_for():
    gaps = list(itertools.islice(shapes.poisson_gaps(5.0, "seed"), 4000))
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert list(itertools.islice(shapes.poisson_gaps(None, "seed"), 3)) == [0.0] * 3


def test_a_session_sends_its_conversation_again_and_more():
    plan = shapes.sessions(
        Prompts(POOL, 0),
        count=3,
        turns=3,
        first_tokens=40,
        turn_tokens=10,
        think_s=1.5,
        gaps=CLOSED_LOOP,
    )
    check_plan(plan, 1024)
    for lane in range(3):
        turns = [r for r in plan if r.lane == lane]
        assert [len(r.prompt) for r in turns] == [40, 50, 60]
        assert turns[2].prompt[:50] == turns[1].prompt
        assert turns[1].think_s == 1.5


def test_results_come_in_the_order_of_the_plan_with_cached_tokens_and_ttft(fake):
    hot = list(range(64))
    plan = [Request("hot", hot, alone=True), Request("flood", hot[::-1]), Request("hot", hot)]
    with fake() as server:
        results = run(server, plan, concurrency=2)
    assert [r.request for r in results] == plan
    assert [r.cached_tokens for r in results] == [0, 0, 48]
    assert all(0 < r.ttft_ms <= r.total_ms for r in results)
    assert results[0].counter_cached_tokens == 0


def test_concurrency_is_reached_and_not_exceeded_and_alone_means_alone(fake, monkeypatch):
    plan = [Request("flood", [n] * 32) for n in range(12)]
    plan.insert(6, Request("hot", [99] * 32, alone=True))
    in_flight, seen, lock = [], [], threading.Lock()
    with fake("--delay-s", 0.02) as server:
        lookup = server.cache.lookup

        def watched(prompt):
            with lock:
                in_flight.append(prompt[0])
                seen.append(sorted(in_flight))
            return lookup(prompt)

        monkeypatch.setattr(server.cache, "lookup", watched)

        def ended(result):
            with lock:
                in_flight.remove(result.request.prompt[0])

        run(server, plan, concurrency=3, on_result=ended)
    assert max(map(len, seen)) == 3
    assert [s for s in seen if 99 in s] == [[99]]


def test_a_lane_waits_for_its_own_answer(fake):
    plan = [Request("turn", [n] * 32, lane=n % 2, think_s=0.01) for n in range(6)]
    ended = []
    with fake("--delay-s", 0.01) as server:
        run(server, plan, concurrency=6, on_result=lambda r: ended.append(r.request.prompt[0]))
    assert [n for n in ended if n % 2] == [1, 3, 5]
    assert [n for n in ended if n % 2 == 0] == [0, 2, 4]


def test_a_broken_server_is_not_asked_for_ever(fake):
    plan = [Request("flood", [n] * 32) for n in range(50)]
    with fake("--fail-at", 3) as server:
        results = run(server, plan, max_failures=4)
    assert len(results) == 6
    assert [r.error for r in results[:3]] == [None, None, 'HTTP 500: {"error": "engine dead"}']


def test_a_server_that_goes_away_is_a_failed_request_not_an_exception(fake):
    with fake() as server:
        pass
    (result,) = run_without_model(server, [Request("hot", [1] * 32, alone=True)])
    assert "Connect" in result.error


def run_without_model(server, plan):
    async def go():
        async with Client(server.url, model="fake") as client:
            return await run_plan(client, plan)

    return asyncio.run(go())


def test_nothing_starts_after_max_seconds(fake):
    plan = [Request("flood", [n] * 32) for n in range(50)]
    with fake("--delay-s", 0.05) as server:
        results = run(server, plan, max_seconds=0.2)
    assert 0 < len(results) < 10


def test_reusable_tokens_are_whole_shared_blocks_and_never_a_whole_prompt():
    prompt = list(range(100, 148))
    assert reusable_tokens([prompt]) == 0
    assert reusable_tokens([prompt, prompt]) == 32  # one token must always be computed
    assert reusable_tokens([prompt, [*prompt, 1]]) == 48
    assert reusable_tokens([prompt, prompt[:20] + [1] * 20, prompt[1:]]) == 16
