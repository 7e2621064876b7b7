# SPDX-License-Identifier: Apache-2.0
"""verdict.judge on made-up visits: what leads to each outcome."""

import copy

import pytest

from drills.bootstrap import pair_repetitions
from drills.checks import Limits
from drills.verdict import ACCEPT, INCONCLUSIVE, REJECT, judge, judge_lru
from drills.visit import Visit

WARM = 608
LRU_TTFT_MS = [30, 31, 32, 33, 34, 35]


def make_visit(role, mode, kept=0, hot_ms=60, flood_ms=60, repetitions=6, text="same"):
    """A visit with one hot replay and one flood prompt a repetition, TTFT spread by 5 ms."""
    results = []
    for repetition in range(repetitions):
        for kind, ms, cached in (("flood", flood_ms, 0), ("hot_replay", hot_ms, kept)):
            key = "hot" if kind == "hot_replay" else f"flood/{repetition}"
            results.append(
                {
                    "kind": kind,
                    "key": key,
                    "repetition": repetition,
                    "ttft_ms": ms + repetition,
                    "cached_tokens": cached,
                    "text": text,
                    "error": None,
                }
            )
    report = {
        "mode": mode,
        "seed": 0,
        "settings": {"shape": "pressure", "concurrency": 1},
        "warm_prefix_cached_tokens": WARM,
        "post_flood_cached_tokens": kept,
        "requests": {"sent": len(results), "failed": 0},
        "failures": [],
        "problems": [],
        "ttft_ms": {
            "flood": dict.fromkeys(("p50", "p95", "p99"), flood_ms + 5),
            "hot_replay": dict.fromkeys(("p50", "p95", "p99"), hot_ms + 5),
        },
        "results": results,
    }
    return Visit(role, mode, 1, report=report)


def good_canary(**candidate):
    return [
        make_visit("baseline", "lru"),
        make_visit("candidate", "active", **({"kept": WARM, "hot_ms": 20} | candidate)),
        make_visit("rollback", "lru"),
    ]


def outcome(visits, **limits):
    verdict = judge(visits, Limits(**limits))
    by_status = {
        status: [c["name"] for c in verdict.checks if c["status"] == status]
        for status in ("fail", "unknown")
    }
    return verdict.outcome, by_status["fail"] + by_status["unknown"]


def test_keeping_what_lru_loses_is_accepted_with_its_numbers():
    verdict = judge(good_canary(), Limits())
    assert (verdict.outcome, verdict.exit_code) == (ACCEPT, 0)
    assert verdict.statistics["kept_tokens"] == {
        "baseline_mean": 0,
        "candidate_mean": WARM,
        "difference_mean": WARM,
        "difference_interval": [WARM, WARM],
        "pairs": 6,
    }
    hot = verdict.statistics["ttft"]["hot_replay"]
    assert hot["samples"] == {"baseline": 12, "candidate": 6}
    assert hot["p95"]["ratio"] < 0.5
    assert any("+608" in reason for reason in verdict.reasons)
    few = "hot replay TTFT p95 (of 6 requests: near the slowest): candidate"
    assert any(reason.startswith(few) for reason in verdict.reasons)


def test_a_rollback_with_prompts_of_its_own_is_not_paired():
    visits = good_canary(kept=100)
    visits[2] = make_visit("rollback", "lru", kept=90)
    visits[2].report["seed"] = 1
    kept = judge(visits, Limits()).statistics["kept_tokens"]
    assert (kept["baseline_mean"], kept["candidate_mean"], kept["pairs"]) == (0, 100, 6)


def test_keeping_no_more_than_lru_is_rejected():
    assert outcome(good_canary(kept=0)) == (REJECT, ["kept"])


def test_keeping_more_in_one_repetition_only_is_not_enough():
    visits = good_canary(kept=0)
    visits[1].report["results"][1]["cached_tokens"] = WARM
    assert outcome(visits) == (INCONCLUSIVE, ["kept"])


def test_a_failed_candidate_request_is_rejected_and_the_error_is_quoted():
    visits = good_canary()
    visits[1].report["failures"] = [{"kind": "flood", "index": 3, "error": "HTTP 500: boom"}]
    visits[1].error = "the server ended by itself with -9"
    verdict = judge(visits, Limits())
    assert verdict.outcome == REJECT
    assert "HTTP 500: boom" in verdict.reasons[0]
    assert "ended by itself with -9" in verdict.reasons[0]


def test_a_candidate_that_never_started_is_rejected():
    visits = good_canary()
    visits[1].report, visits[1].error = None, "the server ended with 1"
    assert outcome(visits) == (REJECT, ["requests"])


def test_a_failed_baseline_says_nothing_about_the_candidate():
    visits = [good_canary()[0]]
    visits[0].report, visits[0].error = None, "the server ended with 1"
    assert outcome(visits) == (INCONCLUSIVE, ["requests", "candidate"])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_mode_that_was_not_asked_for_decides_nothing_but_a_failed_rollback_does(number):
    visits = good_canary()
    visits[number].report["mode"] = "lru" if number == 1 else "active"
    expected = REJECT if number == 2 else INCONCLUSIVE
    assert outcome(visits)[0] == expected
    assert "mode" in outcome(visits)[1]


def test_lru_that_lost_nothing_tested_nothing():
    visits = [make_visit("baseline", "lru", kept=WARM)]
    assert outcome(visits) == (INCONCLUSIVE, ["pressure", "candidate"])


def test_a_prefix_that_was_never_cached_tested_nothing():
    visits = good_canary()
    visits[0].report["warm_prefix_cached_tokens"] = 0
    assert outcome(visits) == (INCONCLUSIVE, ["pressure"])


def test_a_hot_prompt_that_was_never_sent_after_a_flood_tested_nothing():
    visits = good_canary()
    for visit in visits:
        visit.report["post_flood_cached_tokens"] = None
    verdict = judge(visits, Limits())
    assert verdict.outcome == INCONCLUSIVE
    assert "--max-requests" in verdict.reasons[0]


def test_counters_that_disagree_decide_nothing():
    visits = good_canary()
    visits[0].report["problems"] = ["the server's counters went backwards"]
    assert outcome(visits) == (INCONCLUSIVE, ["counters"])


def test_files_installed_between_the_visits_decide_nothing():
    visits = good_canary()
    for visit in visits:
        visit.identity = {"installation": {"computecache_policy.py": "one"}}
    assert outcome(visits) == (ACCEPT, [])
    visits[2].identity = {"installation": {"computecache_policy.py": "another"}}
    assert outcome(visits) == (INCONCLUSIVE, ["installation"])


def test_too_few_repetitions_decide_nothing():
    assert outcome(good_canary(), min_samples=7) == (INCONCLUSIVE, ["samples"])


def test_a_clearly_slower_flood_is_rejected():
    verdict = judge(good_canary(flood_ms=90), Limits())
    assert verdict.outcome == REJECT
    assert "ratio 1.4" in verdict.reasons[0]


def test_a_flood_slower_than_one_lru_visit_but_not_than_the_other_is_noise():
    visits = good_canary(flood_ms=90)
    visits[2] = make_visit("rollback", "lru", flood_ms=95)
    assert outcome(visits) == (ACCEPT, [])


def test_the_allowance_is_the_operators():
    assert outcome(good_canary(flood_ms=90), ttft_regression=0.6) == (ACCEPT, [])


def test_a_budget_replaces_the_comparison():
    assert outcome(good_canary(flood_ms=90), ttft_p95_budget_ms=100) == (ACCEPT, [])
    assert outcome(good_canary(), ttft_p95_budget_ms=50) == (REJECT, ["ttft_flood"])


def test_another_text_at_temperature_0_is_rejected_and_named():
    visits = good_canary()
    visits[1].report["results"][2]["text"] = "other"
    verdict = judge(visits, Limits())
    assert verdict.outcome == REJECT
    assert "flood/1" in verdict.reasons[0]


def test_lru_answers_from_the_cache_and_without_it_both_count_as_equal():
    visits = good_canary()
    for result in visits[1].report["results"]:
        result["text"] = "from the cache" if result["key"] == "hot" else "same"
    visits[0].report["results"][1]["text"] = "from the cache"
    assert outcome(visits) == (ACCEPT, [])


def test_without_a_rollback_there_is_no_accept():
    assert outcome(good_canary()[:2]) == (INCONCLUSIVE, ["rollback"])


def test_a_rollback_that_does_not_serve_is_rejected():
    visits = good_canary()
    visits[2].report, visits[2].error = None, "no answer"
    found, names = outcome(visits)
    assert found == REJECT
    assert "rollback" in names


def test_pairs_follow_the_order_of_visits():
    visits = good_canary()
    second = copy.deepcopy(visits)
    baselines = [visit.report for visit in (visits[0], second[0], second[2])]
    pairs = pair_repetitions(baselines, [visits[1].report, second[1].report])
    assert [len(pair["baseline"]) for pair in pairs] == [2] * 6 + [4] * 6
    assert all(len(pair["candidate"]) == 2 for pair in pairs)


def test_the_lru_visits_alone_can_be_judged():
    baseline, _, rollback = good_canary()
    assert judge_lru([baseline, rollback]).outcome == ACCEPT
    assert judge_lru([baseline]).outcome == INCONCLUSIVE
    assert judge_lru([make_visit("baseline", "lru", kept=WARM)]).outcome == INCONCLUSIVE
    rollback.report["mode"] = "active"
    assert judge_lru([baseline, rollback]).outcome == REJECT


def streams(candidate_cached, reusable=30_000, lru_cached=0, text="same"):
    """A canary of another shape: no warmed prefix, every request counts."""
    visits = good_canary(kept=candidate_cached, text=text)
    for visit in visits:
        report = visit.report
        report["settings"] = {"shape": "trace", "concurrency": 1}
        report["warm_prefix_cached_tokens"] = report["post_flood_cached_tokens"] = None
        report["reusable_tokens"] = reusable
        cached = candidate_cached if visit.role == "candidate" else lru_cached
        report["ttft_ms"] = {"trace": report["ttft_ms"]["flood"]}
        for number, result in enumerate(report["results"]):
            result |= {"kind": "trace", "key": f"trace/{number}", "cached_tokens": cached}
        report["tokens"] = {"trace": {"prompt": 60_000, "cached": cached * len(report["results"])}}
    return visits


def test_a_stream_is_judged_by_what_all_its_requests_find_in_the_cache():
    verdict = judge(streams(300, lru_cached=100), Limits())
    assert verdict.outcome == ACCEPT
    assert verdict.statistics["kept_tokens"]["difference_mean"] == 200
    assert outcome(streams(100, lru_cached=100)) == (REJECT, ["kept"])
    assert outcome(streams(50, lru_cached=100)) == (REJECT, ["kept"])


def test_a_stream_from_which_lru_loses_nothing_tests_nothing():
    found, names = outcome(streams(300, lru_cached=100, reusable=1250))
    assert (found, names) == (INCONCLUSIVE, ["pressure"])


def test_texts_of_a_stream_are_reported_but_rounding_may_move_them():
    verdict = judge(streams(300, text="other"), Limits())
    assert verdict.outcome == ACCEPT
    assert "0 of 12 outputs" in " ".join(verdict.reasons)


def cut_off(visits, hot_replays):
    """The same visits, without the hot replays from a repetition on."""
    for visit in visits:
        visit.report["results"] = [
            result
            for result in visit.report["results"]
            if result["kind"] != "hot_replay" or result["repetition"] < hot_replays
        ]
    return visits


@pytest.mark.parametrize("hot_replays", [1, 4])
def test_repetitions_without_a_hot_replay_are_not_compared(hot_replays):
    visits = cut_off(good_canary(), hot_replays)
    verdict = judge(visits, Limits())
    assert outcome(visits) == (INCONCLUSIVE, ["kept", "ttft_hot_replay"])
    kept = verdict.statistics["kept_tokens"]
    assert (kept["pairs"], kept["difference_interval"]) == (hot_replays, [WARM, WARM])
    assert f"{hot_replays} pairs of repetitions have a hot replay" in verdict.reasons[0]
    assert outcome(visits, min_samples=hot_replays) == (ACCEPT, [])


def test_a_candidate_without_any_hot_replay_leaves_nothing_to_compare():
    visits = good_canary()
    cut_off(visits[1:2], 0)
    kept = judge(visits, Limits()).statistics["kept_tokens"]
    assert (kept["pairs"], kept["difference_interval"]) == (0, None)
    assert outcome(visits) == (INCONCLUSIVE, ["kept"])


def test_a_kind_that_a_stream_has_in_its_first_parts_only_is_no_fault():
    visits = good_canary()
    for visit in visits:
        visit.report["settings"]["shape"] = "sessions"
        visit.report |= {"reusable_tokens": 5000, "tokens": {}}
        visit.report["tokens"] = {"hot_replay": {"cached": 0}}
    verdict = judge(cut_off(visits, 2), Limits())
    (check,) = [check for check in verdict.checks if check["name"] == "ttft_hot_replay"]
    assert check["status"] == "pass"
    assert "not judged: 2 pairs" in check["detail"]


def with_tier(visits, unassigned):
    for visit, tokens in zip(visits, unassigned, strict=True):
        visit.report["tier"] = {
            "external_tokens": 1000 + tokens,
            "unassigned_tokens": tokens,
            "unassigned_prompt_tokens": 6000,
        }
    return visits


@pytest.mark.parametrize("unassigned", [(0, 0, 0), (5900, 6000, 5950)])
def test_a_tier_that_serves_one_use_prompts_alike_is_told_beside_the_verdict(unassigned):
    verdict = judge(with_tier(good_canary(), unassigned), Limits())
    assert verdict.outcome == ACCEPT
    (told,) = [c["detail"] for c in verdict.checks if c["name"] == "tier"]
    candidate = 1000 + unassigned[1]
    assert f"served {2000 + unassigned[0] + unassigned[2]} tokens in lru and {candidate}" in told


def test_one_use_prompts_that_only_later_visits_load_leave_it_open():
    visits = with_tier(good_canary(), (0, 6000, 6000))
    assert outcome(visits) == (INCONCLUSIVE, ["tier"])
    (told,) = judge(visits, Limits()).reasons
    assert "0% to 100%" in told
    assert "empty the tier before each visit" in told


def test_without_a_tier_it_is_no_question():
    assert "tier" not in [c["name"] for c in judge(good_canary(), Limits()).checks]
