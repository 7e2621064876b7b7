# SPDX-License-Identifier: Apache-2.0
"""Cells: on disk as soon as they end, bounded in time, recorded when they fail."""

import asyncio
import json
import time

import pytest

from evidence import bench as bench_module
from evidence.store import Store
from servers.processes import stop_group


@pytest.mark.parametrize("count", [2, 3])
def test_the_order_of_rounds_puts_each_first_as_often_as_the_others(count):
    names = list("abc"[:count])
    orders = [bench_module.order_of_round(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    assert sorted(order[0] for order in orders) == sorted(2 * names)


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
