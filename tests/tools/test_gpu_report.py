# SPDX-License-Identifier: Apache-2.0
"""docs/results.md from raw JSON: the numbers, the goals, and what is said about what is missing."""

import json
import math

import pytest

import gpu_report
from page import stats

SIZES = {
    "block_size": 16,
    "small_blocks": 128,
    "mid_blocks": 4096,
    "large_blocks": 2625,
    "roomy_blocks": 9000,
    "drill_step": 5,
    "drill_floods": 20,
    "drill_seeds": 2,
    "long_hot_tokens": 8000,
    "long_step": 10,
    "long_floods": 20,
    "long_survival": [20, 40],
    "long_seeds": 1,
    "hot_set_tokens": 32768,
    "hot_tokens": [32768],
    "question_tokens": 64,
    "flood_tokens": 4096,
    "floods_per_use": 6.0,
}
CALL = {
    "started": "2026-11-30T08:00:00+00:00",
    "commit": "abc1234",
    "policy_sha256": "f" * 64,
    "rehearsal": False,
    "gpus": ["NVIDIA H200, 580.1, 143771 MiB"],
    "cpus": 16,
    "versions": {"torch": "2.11.0", "vllm": "0.32.0"},
    "sizes": SIZES,
}


def part(name, cells, errors=(), complete=True):
    cells = {key: {"at": "x", "call": 0, **cell} for key, cell in cells.items()}
    return {
        "part": name,
        "complete": complete,
        "calls": [CALL],
        "servers": [{"facts": ["INFO [cuda.py:1] Using FLASH_ATTN attention backend"]}],
        "cells": cells,
        "errors": [{"at": "x", "call": 0, **error} for error in errors],
    }


def pressed(server, hot, flood, warm, replays, **more):
    rows = [{"kind": "hot_replay", "cached_tokens": tokens} for tokens in replays]
    return {
        "server": f"g:{server}",
        "hot_tokens": hot,
        "flood_tokens": flood,
        "warm_prefix_cached_tokens": warm,
        "replays": rows,
        **more,
    }


def alone(server, limit_ms, after_ms, cached):
    return {
        "server": f"large:{server}",
        "hot_tokens": 32768,
        "limit": [["hot", limit_ms, 0, 32832, 32768]] * 3,
        "replays": [["hot", after_ms, 0, 32832, cached]] * 3,
    }


def loaded(server, hot_ms, flood_ms, cached, elapsed_s, repeat):
    return {
        "server": f"large:{server}",
        "hot_tokens": 32768,
        "load": 0.8,
        "repeat": repeat,
        "elapsed_s": elapsed_s,
        "samples": [["hot", hot_ms, 0, 30000, cached], ["flood", flood_ms, 0, 4000, 0]],
    }


@pytest.fixture
def page(tmp_path):
    """page(*parts): the text that main writes for these parts."""

    def write(*parts):
        folder = tmp_path / "results" / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(parts):
            (folder / f"{number}.json").write_text(json.dumps(one))
        arguments = ["--results", str(folder), "--page", str(tmp_path / "results.md")]
        assert gpu_report.main(arguments) == 0
        assert gpu_report.main([*arguments, "--check"]) == 0
        return (tmp_path / "results.md").read_text()

    return write


def test_the_drill_shows_the_least_that_any_seed_kept(page):
    text = page(
        part(
            "drill",
            {
                "a": pressed("lru", 900, 320, 896, [336, 0]),
                "b": pressed("lru", 900, 320, 896, [320, 16]),
                "c": pressed("active64", 900, 320, 896, [896, 896]),
                "d": pressed("active64", 900, 320, 896, [880, 896]),
            },
        )
    )
    assert "| 900 | 320 | 896 | 320 0 | 880 896 |" in text
    assert "active 64 in 1 of 2 cases" in text
    assert "NVIDIA H200, 580.1" in text
    assert "abc1234" in text
    assert "FLASH_ATTN attention backend" in text


@pytest.mark.parametrize(("kept", "verdict"), [(7984, "met"), (7968, "**missed**")])
def test_the_long_prefix_is_held_to_all_that_can_hit(page, kept, verdict):
    cells = {"a": pressed("active64", 8000, 6000, 7984, [7984, kept])}
    text = page(part("long", cells))
    assert f"It kept {kept:,}: {verdict}." in text
    assert "2 times, each after 10 one-use prompts, then once after 20 and once after 40. " in text
    assert "There was one seed." in text


@pytest.mark.parametrize(
    ("active_ms", "lru_ms", "verdict"),
    [(46, 160, "met"), (60, 160, "**missed**"), (46, 100, "**missed**")],
)
def test_part_2_is_held_to_both_of_its_goals(page, active_ms, lru_ms, verdict):
    text = page(
        part(
            "ttft",
            {
                "alone hot=32768 lru": alone("lru", 40, lru_ms, 0),
                "alone hot=32768 active64": alone("active64", 40, active_ms, 32768),
            },
        )
    )
    assert f"lru {lru_ms / 40:.2f} times. Goal" in text
    assert f"at least 3 times: {verdict}." in text


def test_load_shows_goodput_prefill_and_the_ratio_of_equal_requests(page, tmp_path):
    cells = {
        f"load=0.8 {name} {repeat}": loaded(name, hot, flood, cached, elapsed, repeat)
        for repeat in range(2)
        for name, hot, flood, cached, elapsed in (
            ("lru", 800, 400, 10000, 4.0),
            ("active64", 80, 200, 30000, 2.0),
        )
    }
    text = page(part("ttft", cells))
    line = next(x for x in text.splitlines() if x.startswith("| 32,768 | 0.8 | lru"))
    assert "| 0.50 | 2 | 800 / 800 / 800 |" in line
    assert line.endswith("| 50.0 % | 0.25 | 0.05 | 0.02 |")
    assert "| 32,768 | 0.8 | 2.000 (2.000 to 2.000, n=2) | 0.500 (" in text
    svg = (tmp_path / "results" / "gpu" / "ttft_under_load.svg").read_text()
    assert "32,768 hot tokens" in svg


def decode(server, number, step_ms, decisions=16):
    return {
        "server": f"mid:{server}",
        "round": number,
        "requests": 256,
        "max_tokens": 11,
        "step_ms": step_ms,
        "wall_s": 1.0,
        "output_tokens": 2560,
        "decisions": 10 * decisions,
    }


def test_scheduler_cost_is_paired_by_round_without_the_first(page):
    cells = {}
    for number, lru in enumerate([99.0, 10.0, 20.0]):
        cells[f"decode {number} lru"] = decode("lru", number, lru, decisions=0)
        cells[f"decode {number} active64"] = decode("active64", number, 1.01 * lru + (not number))
    text = page(part("cost", cells))
    assert "| active 64 | 15.150 (12.625 to 17.675) | 1.010 (1.010 to 1.010, n=2) |" in text
    assert "| 16.0 |" in text


def test_what_is_missing_and_what_failed_is_said(page):
    error = {"key": "mid:lru", "error": "Traceback\nCUDA out of memory"}
    text = page(part("drill", {"a": pressed("lru", 1, 1, 1, [0])}, [error], complete=False))
    missing = text.partition("## What these runs did not show")[2]
    assert "* 1. Fixed pressure drill: not all of its cells were measured." in missing
    assert "* 1. Fixed pressure drill, mid:lru: `CUDA out of memory`" in missing
    assert "* 4. Scheduler cost: not measured." in missing


def test_fallbacks_are_counted(page):
    cell = pressed("active64", 1, 1, 1, [1], policy={"counters": {"fallbacks": 3}})
    assert "in vLLM's own order: 3." in page(part("drill", {"a": cell}))


def test_two_files_of_one_part_are_put_together(page):
    first = part("drill", {"a": pressed("lru", 300, 160, 288, [288])})
    second = part("drill", {"b": pressed("lru", 600, 160, 592, [592])})
    second["calls"] = [CALL | {"commit": "later99"}]
    text = page(first, second)
    assert "| 300 | 160 |" in text
    assert "| 600 | 160 |" in text
    assert "abc1234" in text
    assert "later99" in text


def test_a_rehearsal_says_that_it_proves_nothing(page):
    found = part("drill", {"a": pressed("lru", 1, 1, 1, [0])})
    found["calls"] = [CALL | {"rehearsal": True}]
    assert "prove nothing" in page(found)


def test_an_edited_page_fails_the_check(page, tmp_path, capsys):
    page(part("drill", {"a": pressed("lru", 1, 1, 1, [0])}))
    (tmp_path / "results.md").write_text("better numbers")
    folder = str(tmp_path / "results" / "gpu")
    arguments = ["--results", folder, "--page", str(tmp_path / "results.md"), "--check"]
    assert gpu_report.main(arguments) == 1
    assert "not what the JSON gives" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "[]", '{"cells": {}}'])
def test_nothing_to_report_on_exits_2(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    page = tmp_path / "results.md"
    assert gpu_report.main(["--results", str(tmp_path), "--page", str(page)]) == 2
    assert "gpu_evidence.py" in capsys.readouterr().err
    assert not page.exists()


def test_readmes_headline_is_the_median_after_floods_at_the_shortest_prefix():
    ours = gpu_report.load([gpu_report.REPO / "docs/results/gpu/ttft.json"])
    text = gpu_report.headline(ours)
    middles = [
        stats.median(stats.ttfts_ms(stats.samples(cell, "replays")))
        for name in ("lru", "active64")
        for key, cell in ours["ttft"]["cells"].items()
        if key == f"alone hot=8192 {name}"
    ]
    assert len(middles) == 2
    assert "{:.0f} ms to the first token under vLLM's LRU, {:.0f} ms with".format(*middles) in text


def test_a_headline_needs_both_servers_and_a_page_its_markers(tmp_path, capsys):
    results = tmp_path / "gpu"
    results.mkdir()
    (results / "drill.json").write_text(json.dumps(part("drill", {})))
    readme = tmp_path / "README.md"
    readme.write_text("nothing generated here\n")
    options = ["--results", str(results), "--page", str(tmp_path / "results.md")]
    assert gpu_report.main([*options, "--readme", str(readme)]) == 2
    assert "`ttft` was not measured" in capsys.readouterr().err
    assert readme.read_text() == "nothing generated here\n"
    assert not (tmp_path / "results.md").exists()


NAMES = ["kind", "ttft_ms", "total_ms", "prompt_tokens", "cached_tokens"]


@pytest.mark.parametrize(
    "cell",
    [
        {"columns": NAMES, "samples": [["hot", 7.5, 9.0, 100, 60]]},
        {"columns": NAMES[::-1], "samples": [[60, 100, 9.0, 7.5, "hot"]]},
        {"samples": [["hot", 7.5, 9.0, 100, 60]]},  # before cells named their columns
        {"samples": [[7.5, 9.0, 100, 60]]},  # and what the part `trace` kept of them
    ],
)
def test_samples_are_read_by_the_names_of_their_columns(cell):
    (row,) = stats.samples(cell)
    assert (row["ttft_ms"], row["prompt_tokens"], row["cached_tokens"]) == (7.5, 100, 60)
    assert stats.ttfts_ms([row]) == [7.5]
    assert stats.prefill([cell]) == (40, 60)
    assert row.get("kind", "hot") == "hot"


def test_a_cell_without_requests_has_no_samples():
    assert stats.samples({"samples": []}) == []


def replayed(name, times_ms):
    return {
        "server": f"mid:{name}",
        "requests": len(times_ms),
        "speed": 2.0,
        "block_tokens": 64,
        "elapsed_s": 2.0,
        "prompt_tokens": 400,
        "cached_tokens": 100,
        "columns": NAMES,
        "samples": [["trace", ms, ms + 1, 100, 25] for ms in times_ms],
    }


def test_a_recorded_hour_is_compared_request_by_request(page):
    cells = {
        "run=0 lru": replayed("lru", [10.0, 20.0]),
        "run=1 active64": replayed("active64", [5.0, 10.0]),
    }
    text = page(part("trace", cells))
    assert "The first 2 requests of mooncake_conversation that fit" in text
    assert "| lru | 2 | 25.00 | 15.0 / 19.5 / 19.9 | 1.0 |" in text
    assert "0.500 (0.500 to 0.500, n=2)" in text


def test_the_page_names_the_trace_that_was_sent(page):
    found = part("trace", {"run=0 lru": replayed("lru", [10.0])})
    found["calls"] = [CALL | {"trace": "ours.jsonl"}]
    assert "requests of ours.jsonl that fit" in page(found)


def test_agents_are_compared_by_percentiles_with_intervals_over_requests(page):
    def run(name, *times_ms):
        found = replayed(name, times_ms)
        return found | {"server": f"agents:{name}", "pool_blocks": 700, "rate": 3.5}

    order = [("lru", 20.0, 40.0), ("active64", 10.0, 20.0)]
    cells = {f"run={i} {one[0]}": run(*one) for i, one in enumerate([*order, *order[::-1]])}
    sizes = {"agents_tokens": 400, "agents_share": 0.08, "agents_load": 0.8, "block_size": 16}
    found = part("agents", {"closed lru": run("lru", 1.0)} | cells)
    found["calls"] = [CALL | {"trace": "ours.jsonl", "sizes": sizes | {"agents_in_flight": 8}}]
    text = page(found)
    assert "700 blocks of 16 tokens (8 % of the trace's)" in text
    assert "3.5 requests a second, 0.8 of what lru served in a closed loop of 8" in text
    assert text.count("| lru | 2 | 25.00 | 30.0 / 39.0 / 39.8 | 1.0 |") == 2
    assert "0.50 (0.50 to 0.50) / 0.50 (0.50 to 0.50) / 0.50 (0.50 to 0.50)." in text


def test_an_interval_over_requests_covers_what_single_requests_move():
    slow, same = [[10.0, 10.0, 10.0, 90.0]], [[10.0, 10.0, 10.0, 10.0]]
    (p50, _, p99) = stats.percentile_ratios(slow, same)
    assert p50[0] == 1.0
    assert p99[0] > 8
    assert (p99[1], p99[2]) == (1.0, 9.0)


def test_paired_ratio_is_of_equal_keys_only():
    found = stats.paired_ratio({1: 2.0, 2: 8.0, 3: 99.0}, {1: 1.0, 2: 4.0, 4: 1.0})
    assert found == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0), 2)
    assert stats.paired_ratio({1: 1.0}, {2: 1.0}) is None
    assert math.isnan(stats.paired_ratio({1: 3.0}, {1: 2.0})[1])


def test_the_interval_covers_the_spread_between_rounds():
    ratio, low, high, _ = stats.paired_ratio(
        {i: 0.9 if i % 2 else 1.1 for i in range(20)}, dict.fromkeys(range(20), 1.0)
    )
    assert low < 0.97 < ratio < 1.02 < high


@pytest.mark.skipif(
    not (gpu_report.REPO / "docs" / "results.md").exists(), reason="no GPU results are committed"
)
def test_the_committed_page_is_what_the_committed_json_gives(tmp_path):
    files = sorted((gpu_report.REPO / "docs" / "results" / "gpu").glob("*.json"))
    files += (gpu_report.REPO / "docs" / "results").glob("cpu_dp2.json")
    (tmp_path / "gpu").mkdir()
    page = gpu_report.render(files, tmp_path / "gpu", 500.0)
    assert page == (gpu_report.REPO / "docs" / "results.md").read_text()
    assert (
        gpu_report.headline(gpu_report.load(files)) in (gpu_report.REPO / "README.md").read_text()
    )
