# SPDX-License-Identifier: Apache-2.0
"""gpu_evidence.py without a GPU: what it sends, what it keeps, and what it does when cut off."""

import asyncio
import json
import math
import sys
import time
from dataclasses import replace
from subprocess import Popen

import pytest

import gpu_evidence
from evidence import bench as bench_module
from evidence import plan
from evidence.parts import cost, ttft
from evidence.parts.trace import trace_slice
from evidence.samples import COLUMNS, Sample, median_ttft_ms, samples
from evidence.store import Store
from servers import fleet as fleet_module
from servers.processes import alive, free_port, reap, stop_group
from serving.metrics import MetricsError
from serving.requests import Request, Result, WorkloadError
from serving.traces import TraceRow

SMALL = {
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "num_attention_heads": 16,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def models(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(SMALL))
    (small / "tokenizer.json").write_text("{}")
    return small, plan.make_large_model(small, tmp_path / "large")


def test_the_large_model_has_qwen3_8bs_size_and_the_small_ones_tokenizer(models):
    config = json.loads((models[1] / "config.json").read_text())
    assert plan.weight_bytes(config) / 2 == pytest.approx(8.19e9, rel=0.01)
    assert plan.weight_bytes(SMALL) / 2 == pytest.approx(0.596e9, rel=0.01)
    assert (models[1] / "tokenizer.json").exists()


def test_a_block_of_the_small_model_holds_28_layers_of_keys_and_values():
    assert plan.block_bytes(SMALL, 16) == 2 * 28 * 8 * 128 * 2 * 16


def test_the_groups_that_run_together_fit_on_the_gpu(models):
    sizes = plan.GPU
    gib = dict.fromkeys(("small", "mid", "large"), 0.0)
    for spec in plan.specs(sizes, *models, rehearse=False):
        gib[spec.group] += spec.gib
    assert gib["small"] + gib["mid"] < sizes.budget_gib
    assert gib["large"] < sizes.budget_gib
    assert sizes.budget_gib < 140


def test_every_prompt_fits_its_server(models):
    sizes = plan.GPU
    assert max(sizes.drill_hot_tokens + sizes.drill_flood_tokens) + 4 <= 1024
    assert max(sizes.hot_tokens) + sizes.question_tokens + 2 <= sizes.large_max_len
    assert sizes.large_blocks * sizes.block_size > sizes.large_max_len
    decoding = sizes.cost_requests * (2 * sizes.block_size + sizes.cost_max_tokens)
    assert decoding < (sizes.mid_blocks - 1) * sizes.block_size  # nothing is preempted


def test_the_hot_set_fits_the_pool_and_lru_must_lose_it():
    sizes = plan.GPU
    pool = sizes.large_blocks * sizes.block_size
    assert pool > sizes.hot_set_tokens + 2 * sizes.flood_tokens
    assert pool < sizes.hot_set_tokens + 0.5 * sizes.floods_per_use * sizes.flood_tokens


def test_modes_are_read_off_the_servers_names():
    assert [plan.modes(n) for n in ("unpatched", "lru", "roomy", "active16")] == [
        (None, 0),
        ("lru", 64),
        ("lru", 64),
        ("active", 16),
    ]


def test_a_prefix_waits_for_so_many_floods_on_average():
    share = ttft.hot_share(prefixes=4, floods_per_use=6)
    assert (1 - share) / (share / 4) == pytest.approx(6)


def test_arrivals_keep_a_server_busy_for_the_share_that_was_asked_for():
    rate = ttft.rate_per_s(flood_ms=100, hot_ms=500, hot_share=0.25, load=0.8)
    assert rate * (0.75 * 0.1 + 0.25 * 0.5) == pytest.approx(0.8)


def test_lru_and_active_take_turns_at_going_first():
    cells = ttft.load_cells(replace(plan.GPU, ttft_repeats=2))
    names = [(name, hot, load, repeat) for name, _, hot, load, _, repeat in cells]
    assert len({key for _, key, *_ in cells}) == len(cells)
    for hot in plan.GPU.hot_tokens:
        for load in plan.GPU.rates:
            order = [
                n for n, h, r, _ in names if (h, r) == (hot, load) and n in ("lru", "active64")
            ]
            assert order in (
                ["lru", "active64", "active64", "lru"],
                ["active64", "lru", "lru", "active64"],
            )


@pytest.mark.parametrize("count", [2, 3])
def test_the_order_of_rounds_puts_each_first_as_often_as_the_others(count):
    names = list("abc"[:count])
    orders = [bench_module.order_of_round(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    assert sorted(order[0] for order in orders) == sorted(2 * names)


def test_a_row_of_samples_has_a_value_for_each_column():
    result = Result(Request("hot", [1] * 40), ttft_ms=7.12345, total_ms=9.0, cached_tokens=16)
    (sample,) = samples([result])
    assert dict(zip(COLUMNS, json.loads(json.dumps(sample)), strict=True)) == {
        "kind": "hot",
        "ttft_ms": 7.123,
        "total_ms": 9.0,
        "prompt_tokens": 40,
        "cached_tokens": 16,
    }


def test_a_request_without_usage_is_no_sample():
    with pytest.raises(WorkloadError, match="a hot request has no times or no cached tokens"):
        samples([Result(Request("hot", [1]), ttft_ms=1.0, total_ms=2.0)])


def test_the_median_of_samples_is_the_upper_one_of_two():
    rows = [Sample("hot", ms, ms, 1, 0) for ms in (3.0, 1.0, 2.0, 4.0)]
    assert median_ttft_ms(rows) == 3.0
    assert median_ttft_ms(rows[:3]) == 2.0
    assert math.isnan(median_ttft_ms([]))


def row(at_ms, ids):
    return TraceRow(at_ms, 512 * ids, 1, list(range(ids)), 512)


def test_a_trace_slice_is_as_long_as_the_time_allows():
    rows = [row(1000 * i, 10) for i in range(100)]
    taken, faster = trace_slice(rows, block_tokens=10, tokens_per_s=500, load=0.5, cell_s=10)
    assert len(taken) == 25  # 100 tokens each, 250 tokens a second, 10 seconds
    assert faster == pytest.approx(2.4)


def test_a_trace_slice_is_never_empty():
    taken, faster = trace_slice([row(0, 99), row(9, 99)], 512, 10, 0.5, 1)
    assert len(taken) == 1
    assert faster > 0


METRICS = """\
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_bucket{{engine="0",le="+Inf"}} {count}
vllm:request_decode_time_seconds_sum{{engine="0"}} {seconds}
vllm:request_decode_time_seconds_count{{engine="0"}} {count}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} 7
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} 0
"""


def test_a_decoding_steps_time_is_the_engines_own():
    before = cost.metric_sums(METRICS.format(seconds=10.0, count=4), cost.DECODE)
    after = cost.metric_sums(METRICS.format(seconds=12.0, count=14), cost.DECODE)
    assert cost.decode_step_ms(before, after, max_tokens=21) == pytest.approx(10.0)


def test_an_absent_series_is_an_error():
    with pytest.raises(MetricsError, match="num_preemptions_total"):
        cost.metric_sums("# TYPE vllm:x counter\nvllm:x_total 1\n", cost.DECODE)


@pytest.fixture
def sleepers(tmp_path, monkeypatch):
    """A fleet whose servers are processes that sleep; three of 4 GiB each and one of 8."""
    made = [
        fleet_module.Spec("g", name, "lru", 64, 1, "m", (), gib, fleet_module.EAGER)
        for name, gib in (("a", 4), ("b", 4), ("c", 4), ("big", 8))
    ]
    folder, paths = tmp_path / "fleet", {"patched": "x"}
    fleet = fleet_module.Fleet(made, folder, paths, {}, 12, first_port=free_port())

    def sleep(command, **more):
        return Popen([sys.executable, "-c", "import time; time.sleep(600)"], **more)

    monkeypatch.setattr(fleet_module.subprocess, "Popen", sleep)
    yield fleet
    fleet.drop(*fleet.running)


def test_servers_that_are_not_needed_make_room(sleepers):
    a, b, c, big = sleepers.specs
    sleepers.start([a, b, c])
    pids = {key: one.pid for key, one in sleepers.running.items()}
    sleepers.start([c, big])
    assert set(sleepers.running) == {"g:c", "g:big"}
    assert sleepers.running["g:c"].pid == pids["g:c"]
    assert not alive(pids["g:a"])
    assert not alive(pids["g:b"])


def test_ports_of_running_servers_differ(sleepers):
    sleepers.start(sleepers.specs[:3])
    ports = [p for one in sleepers.running.values() for p in (one.port, one.port + 1)]
    assert len(set(ports)) == 6


def test_a_later_call_adopts_what_still_runs(sleepers, tmp_path):
    sleepers.start(sleepers.specs[:2])
    gone = sleepers.running["g:a"].pid
    stop_group(gone, 5)
    reap(gone)
    later = fleet_module.Fleet(sleepers.specs, tmp_path / "fleet", {}, {}, 12)
    later.adopt()
    assert set(later.running) == {"g:b"}


def test_a_server_that_dies_while_starting_is_run_in_a_plainer_way_once(
    sleepers, monkeypatch, tmp_path
):
    timed = replace(sleepers.specs[0], execution=0)
    commands = []

    def die(command, **more):
        commands.append(command)
        return Popen([sys.executable, "-c", "print('no such kernel')"], **more)

    monkeypatch.setattr(fleet_module.subprocess, "Popen", die)
    sleepers.start([timed])
    sleepers.wait([timed], time.monotonic() + 60)
    assert "no such kernel" in sleepers.lost["g:a"]
    assert len(commands) == 2
    assert "--compilation-config" not in commands[0]
    assert "--compilation-config" in commands[1]


@pytest.fixture
def bench(tmp_path, sleepers):
    store = Store(tmp_path / "out", tmp_path / "state", {"started": "first"}, ["drill"])
    sleepers.start(sleepers.specs[:1])
    now = time.monotonic()
    return bench_module.Bench(
        sleepers, store, plan.REHEARSAL, now + 60, [], True, "drill", now + 60
    )


def test_a_cell_is_on_disk_as_soon_as_it_ends_and_measured_once(bench, tmp_path):
    calls = []

    async def measure():
        calls.append(1)
        return {"value": 7}

    server = bench.fleet.running["g:a"]
    asyncio.run(bench.cell("k", 1, measure, server))
    for folder in ("out", "state"):
        saved = json.loads((tmp_path / folder / "drill.json").read_text())
        assert saved["cells"]["k"]["value"] == 7
    bench.store = Store(tmp_path / "out2", tmp_path / "state", {"started": "second"}, ["drill"])
    assert asyncio.run(bench.cell("k", 1, measure, server))["value"] == 7
    assert len(calls) == 1
    asyncio.run(bench.cell("other", 1, measure, server))
    saved = json.loads((tmp_path / "out2" / "drill.json").read_text())
    assert [saved["calls"][c["call"]]["started"] for c in saved["cells"].values()] == [
        "first",
        "second",
    ]


def test_a_failing_cell_is_recorded_and_the_next_one_runs(bench):
    async def fail():
        raise KeyError("usage")

    server = bench.fleet.running["g:a"]
    assert asyncio.run(bench.cell("k", 1, fail, server)) is None
    assert "usage" in bench.store.part("drill")["errors"][0]["error"]
    assert bench.store.failed("drill")
    assert bench.store.cell("drill", "k") is None


def test_a_cell_that_would_not_end_in_time_is_not_begun(bench):
    async def never():
        raise AssertionError("begun")

    with pytest.raises(bench_module.Full):
        asyncio.run(bench.cell("k", 100, never, bench.fleet.running["g:a"]))
    assert bench.store.part("drill")["errors"] == []


def test_a_cell_that_hangs_is_cut_off_at_the_deadline(bench):
    bench.deadline = time.monotonic() + 0.3
    with pytest.raises(bench_module.Full):
        asyncio.run(
            bench.cell("k", 0.1, asyncio.Event().wait, bench.fleet.running["g:a"]),
        )
    assert "deadline" in bench.store.part("drill")["errors"][0]["error"]


def test_a_dead_server_is_recorded_once_and_its_cells_are_left_out(bench):
    server = bench.fleet.running["g:a"]
    stop_group(server.pid, 5)

    async def never():
        raise AssertionError("measured")

    for key in ("k", "l"):
        assert asyncio.run(bench.cell(key, 1, never, server)) is None
    assert [e["key"] for e in bench.store.part("drill")["errors"]] == ["g:a"]


def ran(bench, monkeypatch, part):
    monkeypatch.setitem(gpu_evidence.PARTS, "drill", part)
    return asyncio.run(gpu_evidence.run_part(bench, "drill", stretch=1.0))


def test_a_part_that_ends_well_is_complete(bench, monkeypatch):
    async def part(bench):
        bench.store.add("drill", "k", {"value": 1})

    assert ran(bench, monkeypatch, part)
    assert bench.store.part("drill")["complete"]


def test_a_part_that_fails_is_recorded_and_not_raised(bench, monkeypatch):
    async def part(bench):
        raise KeyError("usage")

    assert ran(bench, monkeypatch, part)
    found = bench.store.part("drill")
    assert not found["complete"]
    assert found["errors"][0]["error"] == "KeyError: 'usage'"


def test_a_part_without_time_is_short_and_has_no_error(bench, monkeypatch):
    async def part(bench):
        raise bench_module.Full("k needs 9 s")

    assert not ran(bench, monkeypatch, part)
    found = bench.store.part("drill")
    assert (found["complete"], found["errors"]) == (False, [])
