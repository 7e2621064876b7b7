# SPDX-License-Identifier: Apache-2.0
import json
import os
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import make_trace
import replay_trace
from lab import pool
from lab.cells import replay
from lab.optimum import optimum_hits
from lab.peers import peer_hits
from lab.pool import Driver, make_pool, policy_environment
from lab.replay_report import chart_of, compare
from lab.traces import read_trace, trace_from_chains

# Hit blocks of each mode on the golden traces.
GOLDEN_LRU = {"flood": 10453, "drift": 7999, "chat": 9636, "agents": 30438, "mix": 3344}
GOLDEN_OPTIMUM = {"flood": 11658, "drift": 10283, "chat": 11816, "agents": 33434, "mix": 4366}
# The policy's own counts. They change when the policy does: paste what the test prints.
GOLDEN_ACTIVE_16 = {"flood": 10589, "drift": 8589, "chat": 10730, "agents": 31845, "mix": 3436}
GOLDEN_ACTIVE_64 = {"flood": 10636, "drift": 8614, "chat": 10759, "agents": 32147, "mix": 3436}
GOLDEN_REQUESTS = 300
GOLDEN_CAPACITY_BLOCKS = 600
GOLDEN_CONCURRENCY = 4


@cache
def golden_trace(kind):
    chains = []
    for row in make_trace.make_trace(kind, 7, GOLDEN_REQUESTS):
        chains.append(row["hash_ids"][: row["input_length"] // row["block_size"]])
    return trace_from_chains(kind, chains)


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("GOLDEN_LRU", "lru", {}),
        ("GOLDEN_OPTIMUM", "optimum", {}),
        ("GOLDEN_ACTIVE_16", "active", {"scan_limit": 16}),
        ("GOLDEN_ACTIVE_64", "active", {"scan_limit": 64}),
    ],
)
def test_golden_traces(name, mode, options):
    counted = {}
    for kind in make_trace.KINDS:
        result = replay(
            golden_trace(kind), GOLDEN_CAPACITY_BLOCKS, mode, options, GOLDEN_CONCURRENCY
        )
        counted[kind] = result.hit_blocks
    assert counted == globals()[name], f"paste-ready:\n{name} = {json.dumps(counted)}"


def chains(*requests):
    return trace_from_chains("hand", [list(request) for request in requests])


def test_lru_worked_by_hand():
    # Four blocks. "ab" is freed tail first, so the queue is b a; c d take the two unused
    # blocks; e takes b, and "ab" then hits a alone. Its b takes d, the older of c's pair.
    trace = chains("ab", "ab", "cd", "e", "ab", "cd")
    result = replay(trace, 4, concurrency=1)
    assert result.hit_blocks == 0 + 2 + 0 + 0 + 1 + 1
    assert result.referenced_blocks == 11
    assert result.decisions == 5
    assert result.allocated_blocks == 7
    assert result.hit_ratio == 4 / 11


def test_blocks_behind_a_gap_are_no_hits():
    pool = make_pool(3, "lru", {})
    driver = Driver(pool, 4, concurrency=1)
    driver.play([0, 1, 2])
    driver.finish_all()
    pool.evict_blocks({driver.cached_prefix([0])[0].block_id})
    assert driver.cached_prefix([0, 1, 2]) == []
    assert driver.play([0, 1, 2]) == 0


def test_requests_in_flight_hold_their_blocks():
    pool = make_pool(5, "lru", {})
    driver = Driver(pool, 9, concurrency=2)
    driver.play([0, 1])
    driver.play([2])
    assert pool.get_num_free_blocks() == 2
    driver.play([3])  # the third request ends the first one
    assert pool.get_num_free_blocks() == 3
    driver.play([4, 5, 6, 7, 8])  # ends the second; needs five, has four: ends the third, too
    assert pool.get_num_free_blocks() == 0
    assert len(driver.running) == 1
    driver.finish_all()
    assert pool.get_num_free_blocks() == 5


def test_a_request_larger_than_the_pool_is_skipped_and_counted():
    trace = chains("abc", "d", "abc", "d")
    for mode in ("lru", "optimum", "LIRS"):
        result = replay(trace, 2, mode, concurrency=1)
        assert (result.skipped_requests, result.requests) == (2, 2)
        assert (result.hit_blocks, result.referenced_blocks) == (1, 2)


def best_by_brute_force(trace, capacity, concurrency):
    """Most prefix hits over every choice of what to keep, in-flight blocks kept."""

    @cache
    def best(index, running, cached):
        if index == len(trace.requests):
            return 0
        request = frozenset(trace.requests[index])
        if len(request) > capacity:
            return best(index + 1, running, cached)
        running = running[-(concurrency - 1) :] if concurrency > 1 else ()
        while len(request.union(*running)) > capacity:
            running = running[1:]
        held = request.union(*running)
        hits = 0
        for block in trace.requests[index]:
            if block not in cached:
                break
            hits += 1
        spare = [()]
        for block in sorted(cached - held):
            spare += [(*kept, block) for kept in spare if len(kept) < capacity - len(held)]
        return hits + max(best(index + 1, (*running, request), held.union(kept)) for kept in spare)

    return best(0, (), frozenset())


tiny_traces = st.lists(
    st.sampled_from(["a", "ab", "abc", "abd", "ae", "f", "fg", "h"]), min_size=1, max_size=9
).map(lambda requests: chains(*requests))


@settings(max_examples=150, deadline=None)
@given(trace=tiny_traces, capacity=st.integers(2, 5), concurrency=st.integers(1, 3))
def test_optimum_is_what_brute_force_finds(trace, capacity, concurrency):
    assert optimum_hits(trace, capacity, concurrency) == best_by_brute_force(
        trace, capacity, concurrency
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    capacity=st.integers(150, 2000),
    concurrency=st.integers(1, 6),
    scan_limit=st.sampled_from([None, 16, 64]),
)
def test_no_policy_beats_the_optimum(seed, capacity, concurrency, scan_limit):
    rows = make_trace.make_trace("mix", seed, 40)
    trace = trace_from_chains("mix", [row["hash_ids"] for row in rows])
    mode, options = ("active", {"scan_limit": scan_limit}) if scan_limit else ("lru", {})
    result = replay(trace, capacity, mode, options, concurrency)
    assert result.hit_blocks <= optimum_hits(trace, capacity, concurrency)


def test_a_peer_fed_tail_first_is_the_pool_when_it_is_lru():
    trace = golden_trace("chat")
    prefix_hits, reference_hits = peer_hits(trace, 600, "LRU")
    ours = replay(trace, 600, "lru", concurrency=1).hit_blocks
    assert prefix_hits == pytest.approx(ours, rel=0.01)
    assert 0 < reference_hits <= prefix_hits


def test_the_environment_chooses_the_policy_and_is_put_back(monkeypatch):
    monkeypatch.setenv("COMPUTECACHE_MODE", "lru")
    monkeypatch.setenv("COMPUTECACHE_AGE_WEIGHT", "3")
    monkeypatch.setenv("COMPUTECACHE_METRICS_PORT", "8001")
    before = dict(os.environ)
    policy = make_pool(8, "active", {"scan_limit": 32}).computecache.settings
    assert (policy.mode, policy.scan_limit, policy.age_weight) == ("active", 32, 3)
    with policy_environment("lru", {"scan_limit": 7}):
        assert os.environ["COMPUTECACHE_SCAN_LIMIT"] == "7"
        assert "COMPUTECACHE_METRICS_PORT" not in os.environ
    assert dict(os.environ) == before


def test_active_without_the_patch_is_refused(monkeypatch):
    import vllm.v1.core.block_pool as block_pool

    monkeypatch.setattr(block_pool, "BlockPool", lambda *_, **__: SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"mode active .*tools/install_computecache\.py"):
        make_pool(8, "active", {})
    make_pool(8, "lru", {})  # an unpatched vLLM is plain LRU


def test_a_policy_file_is_loaded_under_the_installed_name(monkeypatch, tmp_path):
    candidate = tmp_path / "candidate.py"
    candidate.write_text("mark = __name__\n")
    name = "vllm.v1.core.computecache_policy"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.block_pool", object())
    with pytest.raises(RuntimeError, match="before vLLM's BlockPool is imported"):
        pool.try_policy(candidate)
    monkeypatch.delitem(sys.modules, "vllm.v1.core.block_pool")
    pool.try_policy(candidate)
    assert sys.modules[name].mark == name


def test_points_and_gap():
    rows = [
        {"trace": "t", "capacity": 0.1, "mode": mode, "hit_ratio": ratio}
        for mode, ratio in (("lru", 0.2), ("active", 0.3), ("optimum", 0.6))
    ]
    rows.append({"trace": "t", "capacity": 0.2, "mode": "active", "hit_ratio": 0.3})
    compare(rows)
    assert [row["points_over_lru"] for row in rows[:3]] == pytest.approx([0, 10, 40])
    assert [row["gap_closed"] for row in rows[:3]] == pytest.approx([0, 0.25, 1])
    assert (rows[3]["points_over_lru"], rows[3]["gap_closed"]) == (None, None)


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_bytes(make_trace.to_jsonl(make_trace.make_trace("chat", 2, 120)))
    return path


def test_command_writes_cells_and_a_chart(trace_file, tmp_path, capsys):
    cells, chart = tmp_path / "cells.json", tmp_path / "chart.svg"
    arguments = ["--capacity", "0.1,400", "--mode", "lru,active,optimum", "--scan-limit", "16,32"]
    arguments += ["--peer", "s3-fifo", "--json", str(cells), "--plot", str(chart)]
    assert replay_trace.main([str(trace_file), *arguments]) == 0
    rows = json.loads(cells.read_text())
    assert [(row["mode"], row["scan_limit"]) for row in rows] == 2 * [
        ("lru", None),
        ("active", 16),
        ("active", 32),
        ("optimum", None),
        ("S3FIFO", None),
    ]
    trace = read_trace(trace_file)
    assert {row["capacity_blocks"] for row in rows} == {int(0.1 * trace.unique_blocks), 400}
    assert {row["referenced_blocks"] for row in rows if row["capacity"] == 400} == {
        trace.references
    }
    active = [row for row in rows if row["mode"] == "active"]
    assert all(row["inspected_per_decision"] > 0 and row["us_per_decision"] > 0 for row in active)
    assert all(row["counters"]["decisions"] == row["decisions"] for row in active)
    peer = rows[-1]
    assert 0 < peer["reference_hit_ratio"] < 1
    assert "S3FIFO" in capsys.readouterr().out
    assert chart.read_text().count("</svg>") == 1
    assert chart.read_text() == chart_of(rows)


def test_command_names_the_bad_line_and_writes_nothing(trace_file, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(trace_file.read_bytes() + b'{"timestamp_ms": 1}\n')
    out = tmp_path / "cells.json"
    assert replay_trace.main([str(trace_file), str(bad), "--json", str(out)]) == 2
    assert f"{bad}:121: input_length is None" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--capacity", "0"),
        ("--capacity", "0.1,x"),
        ("--mode", "lru,best"),
        ("--scan-limit", "0"),
        ("--peer", "clairvoyant"),
        ("--concurrency", "0"),
        ("--workers", "-1"),
        ("--policy", "absent.py"),
        ("--json", "absent/cells.json"),
        ("--plot", "absent/chart.svg"),
    ],
)
def test_bad_option_names_itself(option, value, trace_file, capsys):
    with pytest.raises(SystemExit) as stopped:
        replay_trace.main([str(trace_file), option, value])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err


def test_a_setting_that_the_policy_refuses_ends_the_run(trace_file, capsys):
    options = ["--mode", "active", "--scan-limit", "5000", "--workers", "1"]
    assert replay_trace.main([str(trace_file), *options]) == 2
    assert "COMPUTECACHE_SCAN_LIMIT is 5000, but the policy takes 4096" in capsys.readouterr().err
