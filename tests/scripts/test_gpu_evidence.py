# SPDX-License-Identifier: Apache-2.0
"""gpu_evidence.py without a GPU: what it sends, what it keeps, and what it does when cut off."""

import asyncio

import gpu_evidence
from evidence import bench as bench_module


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
