# SPDX-License-Identifier: Apache-2.0
"""Options: what cannot be meant is refused by name; nothing else than that comes of any."""

import argparse
import contextlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import canary
import prefix_pressure
import tune_scan_limit
from serving.options import add_workload_options, make_plan
from serving.requests import WorkloadError

POOL = list(range(100, 400))
CANARY = ["run", "--target", "embedded"]


def workload(*arguments):
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    return parser.parse_args(list(arguments))


REFUSED = [
    ("--trace-speed", "-1", "is below 0"),
    ("--hot-share", "7", "is not from 0 to 1"),
    ("--hot-share", "-0.1", "is not from 0 to 1"),
    ("--zipf-exponent", "nan", "is not a number"),
    ("--zipf-exponent", "-1e308", "is not from 0 to 100"),
    ("--think-s", "-1", "is below 0"),
    ("--arrivals", "-3", "is below 0"),
    ("--max-seconds", "0", "is not above 0"),
    ("--request-timeout", "-1", "is not above 0"),
    ("--prefixes", "99999999999", "is above 10,000,000"),
    ("--control-requests", "-1", "is not at least 0"),
    ("--survival", "1,0", "is not at least 1"),
    ("--survival", "1;2", "invalid numbers value"),
]


@pytest.mark.parametrize(("option", "value", "said"), REFUSED)
def test_a_number_without_a_meaning_is_refused_by_name(capsys, option, value, said):
    with pytest.raises(SystemExit) as ended:
        prefix_pressure.main([f"{option}={value}"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert option in last
    assert said in last


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (canary.parse, [*CANARY, "--hot-tokens", "32"], "give at least 33"),
        (canary.parse, [*CANARY, "--shape", "zipf", "--hot-tokens", "31"], "give at least 32"),
        (tune_scan_limit.parse, ["--target", "embedded", "--hot-tokens", "8"], "at least 33"),
        (canary.parse, [*CANARY, "--ttft-p95-budget-ms", "-1"], "is not above 0"),
        (canary.parse, [*CANARY, "--ttft-regression", "a%"], "is not a share"),
        (canary.parse, [*CANARY, "--ttft-regression", "nan"], "is not a share"),
        (tune_scan_limit.parse, ["--target", "embedded", "--limits", ","], "numbers from 1"),
    ],
)
def test_a_drill_that_could_not_tell_is_refused(capsys, main, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("size", ["sixteen", "0", "-16", "9" * 5000, "\u0661\u0666"])
def test_a_block_size_that_is_none_is_named(capsys, tmp_path, size):
    (tmp_path / ".env").write_text(f"BLOCK_SIZE={size}\n")
    for main, first in ((canary.parse, ["run"]), (tune_scan_limit.parse, [])):
        with pytest.raises(SystemExit) as ended:
            main([*first, "--target", "compose", "--project", str(tmp_path)])
        assert ended.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"BLOCK_SIZE={size[:20]} in {tmp_path / '.env'}" in last


def test_the_block_size_of_env_bounds_the_hot_prefix(capsys, tmp_path):
    (tmp_path / ".env").write_text("BLOCK_SIZE=64\n")
    where = ["run", "--target", "compose", "--project", str(tmp_path), "--hot-tokens"]
    assert canary.parse([*where, "65"]).hot_tokens == 65
    with pytest.raises(SystemExit):
        canary.parse([*where, "64"])
    assert "give at least 65" in capsys.readouterr().err


def test_the_smallest_limit_alone_still_gives_a_prefix_that_can_hit():
    assert tune_scan_limit.parse(["--target", "embedded", "--limits", "1"]).hot_tokens == 33


@pytest.mark.parametrize("option", ["--hot-tokens", "--flood-tokens"])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_drawn(option):
    options = workload(option, "9000000")
    with pytest.raises(WorkloadError, match=f"{option} 9000000 .*max-model-len of 1024"):
        make_plan(options, POOL, 1024)


def test_a_plan_that_no_memory_holds_is_refused(monkeypatch):
    monkeypatch.setattr("serving.options.MOST_PLAN_TOKENS", 10_000)
    options = workload("--repetitions", "10", "--flood-tokens", "900")
    with pytest.raises(WorkloadError, match="more than 10,000 tokens of prompts"):
        make_plan(options, POOL, 1024)


TYPED = argparse.ArgumentParser()
add_workload_options(TYPED)
NAMES = [
    action.option_strings[0]
    for action in TYPED._actions
    if action.option_strings and action.dest not in ("help", "trace")
]
VALUES = st.one_of(
    st.integers(-3, 300).map(str),
    st.floats().map(str),
    st.sampled_from(["", "-", "0x10", "1e400", "9" * 5000, "\u0663", "1,2", "%s", "pressure"]),
    st.sampled_from(["zipf", "sessions", "pressure"]),
    st.text(max_size=6).filter(lambda text: "\0" not in text),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_any_options_give_a_plan_or_a_refusal(given_options):
    arguments = [f"{name}={value}" for name, value in given_options.items()]
    said = io.StringIO()
    plan, refused = [], None
    with contextlib.redirect_stderr(said):
        try:
            plan, _ = make_plan(workload(*arguments), POOL, 1024)
        except (SystemExit, WorkloadError) as error:
            refused = error
    if isinstance(refused, SystemExit):
        assert refused.code == 2
        assert "error: " in said.getvalue()
    assert plan or str(refused)
    assert all(request.gap_s >= 0 for request in plan)
    assert all(len(request.prompt) + request.max_tokens <= 1024 for request in plan)
