# SPDX-License-Identifier: Apache-2.0
"""The search for the smallest scan limit, on a simulated policy that protects its window only."""

import json
import signal

import pytest

from tune_scan_limit import choose, hot_tokens_for


@pytest.fixture
def tune(stack):
    def run(*arguments):
        return stack.run(*arguments, script="tune_scan_limit.py")

    return run


def test_the_smallest_limit_that_keeps_the_prefix_is_chosen_and_lru_is_back(stack, tune):
    # 20 blocks of 16: a window of 8 or 16 keeps a part of them, 32 and 64 keep all.
    assert tune("--hot-tokens", "320", "--limits", "8,16,32,64") == 0, stack.output
    record = stack.record("scan_limit.json")
    assert record["chosen_scan_limit"] == 32
    rows = record["limits"]
    assert [(r["scan_limit"], r["keeps_all"]) for r in rows] == [
        (8, False),
        (16, False),
        (32, True),
        (64, True),
    ]
    assert [r["outcome"] for r in rows[2:]] == ["ACCEPT", "ACCEPT"]
    assert rows[0]["post_flood_cached_tokens"] < rows[1]["post_flood_cached_tokens"] < 304
    assert stack.ups() == ["up lru", *["up active"] * 4, "up lru", "up lru"]
    assert stack.env_file.read_bytes() == stack.before
    assert record["final_mode"] == "lru"
    assert "COMPUTECACHE_SCAN_LIMIT=32" in stack.output


def test_no_limit_is_good_enough(stack, tune):
    assert tune("--hot-tokens", "320", "--limits", "4,8") == 1, stack.output
    assert stack.record("scan_limit.json")["chosen_scan_limit"] is None
    assert stack.env_file.read_bytes() == stack.before


def test_the_budget_counts(stack, tune):
    assert tune("--hot-tokens", "320", "--limits", "32", "--ttft-p95-budget-ms", "0.01") == 1
    assert "budget 0.01 ms" in stack.record("scan_limit.json")["limits"][0]["reasons"][0]


def test_a_limit_whose_server_dies_does_not_end_the_search(stack, tune):
    stack.fake_options("--die-at 20 --delay-s 0.001", "active")
    assert tune("--limits", "32,64", "--hot-tokens", "320") == 1, stack.output
    rows = stack.record("scan_limit.json")["limits"]
    assert [r["outcome"] for r in rows] == ["REJECT", "REJECT"]
    assert stack.ups()[-1] == "up lru"


def test_without_pressure_active_is_never_started(stack, tune):
    stack.fake_options("--api-key secret-of-this-test --blocks 4096")
    assert tune("--hot-tokens", "320") == 2, stack.output
    assert "up active" not in stack.ups()
    assert "nothing was tested" in stack.output


def test_an_interrupted_search_restores_lru(stack):
    stack.fake_options("--api-key secret-of-this-test --delay-s 0.02")
    process = stack.start(script="tune_scan_limit.py")
    stack.wait_for_phase(process, "candidate")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert stack.ups()[-1] == "up lru"
    assert stack.env_file.read_bytes() == stack.before
    assert "interrupted by SIGTERM" in json.dumps(stack.record("scan_limit.json")["checks"])


@pytest.mark.parametrize("limits", ["0", "16,5000", "", "x"])
def test_limits_out_of_range_are_refused(script, limits):
    done = script("tune_scan_limit.py", "--target", "compose", f"--limits={limits}")
    assert done.returncode == 2
    assert "--limits" in done.stderr


def test_the_prefix_lies_between_the_two_largest_limits():
    assert hot_tokens_for([64, 16, 32], 16) == 48 * 16
    assert hot_tokens_for([16], 32) == 8 * 32


def test_a_limit_that_was_accepted_but_lost_a_part_is_not_chosen():
    row = {"outcome": "ACCEPT", "keeps_all": True}
    rows = [row | {"scan_limit": 16, "keeps_all": False}, row | {"scan_limit": 32}]
    assert choose(rows) == 32
    assert choose(rows[:1]) is None
