# SPDX-License-Identifier: Apache-2.0
import json

import pytest

import evaluate_policy
import make_trace
from lab import scenarios
from lab.files import replace_section
from lab.pool import make_pool

BEGIN, END = "<!-- begin generated: policy -->", "<!-- end generated: policy -->"


class Hoarder:
    """A policy that lets no block go that was ever hit, while another is left."""

    enabled = True

    def __init__(self):
        self.hit = set()

    def on_access(self, block):
        self.hit.add(block.block_id)

    def on_evicted(self, block):
        self.hit.discard(block.block_id)

    def reorder_free_queue(self, queue, num_blocks, protected_block_ids):
        hits = [block for block in queue.get_all_free_blocks() if block.block_id in self.hit]
        for block in hits:
            queue.remove(block)
        queue.append_n(hits)


@pytest.fixture
def hoarding(monkeypatch):
    def make_hoarding_pool(capacity_blocks, mode, settings):
        pool = make_pool(capacity_blocks, "lru", {})
        if mode == "active":
            pool.computecache = Hoarder()
        return pool

    monkeypatch.setattr(scenarios, "make_pool", make_hoarding_pool)


def test_a_flood_washes_lru_out_and_spares_what_a_hoarder_holds(hoarding):
    cell = {"pool_blocks": 256, "hot_blocks": 128, "prompt_blocks": 60, "settings": {}}
    assert scenarios.flood_kept(**cell, mode="lru") == 0.0
    assert scenarios.flood_kept(**cell, mode="active") == 1.0


def test_a_drift_tells_a_hoarder_from_lru(hoarding):
    cell = {"pool_blocks": 256, "set_share": 0.7, "one_use_share": 0.1, "settings": {}}
    lru = scenarios.drift_hit_ratio(**cell, mode="lru")
    assert lru == 1.0
    assert scenarios.drift_hit_ratio(**cell, mode="active") < 0.9 * lru


def row(trace, capacity, mode, points, gap=None, scan_limit=None, half="all", inspected=20):
    return {
        "trace": trace,
        "capacity": capacity,
        "mode": mode,
        "scan_limit": scan_limit,
        "half": half,
        "points_over_lru": points,
        "gap_closed": gap,
        "decisions": 2,
        "allocated_blocks": 10,
        "counters": {"fallbacks": 0, "inspected_blocks": inspected},
    }


def test_trace_bars_find_the_worst_cell_and_the_mean():
    rows = [
        row("mix_real16", 0.01, "active", 2.5, 0.05, 16),
        row("mix_real16", 0.02, "active", 1.0, 0.12, 16),
        row("mooncake_conversation", 0.2, "active", -0.5, -0.2, 16),
        row("mooncake_conversation", 0.2, "active", 9.0, 0.9, 16, half="second"),
    ]
    worst, mean, small = evaluate_policy.trace_bars(rows, "all")
    assert (worst["measured"], worst["holds"]) == (-0.5, False)
    assert worst["where"] == "mooncake_conversation 20% scan 16"
    assert (mean["measured"], mean["holds"]) == (1.0, False)
    assert (small["measured"], small["holds"]) == (1.2, True)
    rows[1]["gap_closed"] = 0.06
    small = evaluate_policy.trace_bars(rows, "all")[2]
    assert (small["measured"], small["holds"]) == (0.6, False)
    assert small["where"] == "mix_real16 2% scan 16"


@pytest.mark.parametrize(("inspected", "holds"), [(10 + 2 * 15, True), (10 + 2 * 15 + 1, False)])
def test_bound_on_inspected_blocks(inspected, holds):
    rows = [row("t", 0.01, "active", 0.0, scan_limit=16, inspected=inspected)]
    fallbacks, bound = evaluate_policy.safety_bars(rows)
    assert fallbacks["holds"]
    assert bound["holds"] is holds
    rows[0]["counters"]["fallbacks"] = 1
    assert not evaluate_policy.safety_bars(rows)[0]["holds"]


def test_scenario_bars_ask_for_all_at_64_and_less_below():
    floods = [
        {
            "pool_blocks": 256,
            "hot_blocks": 9,
            "prompt_blocks": 10,
            "kept": {"16": 1, "32": 1, "64": 1},
        },
        {
            "pool_blocks": 256,
            "hot_blocks": 9,
            "prompt_blocks": 20,
            "kept": {"16": 0.9, "32": 0.89, "64": 0.99},
        },
    ]
    drifts = [
        {
            "pool_blocks": 256,
            "set_share": 0.4,
            "one_use_share": 0,
            "over_lru": {"16": 1, "32": 0.98, "64": 0.97},
        }
    ]
    bars = evaluate_policy.scenario_bars(floods, drifts)
    assert [bar["holds"] for bar in bars] == [True, False, False, True, True, False]
    assert bars[2]["where"] == "pool 256 hot 9 n 20"


def test_section_is_replaced_between_its_markers():
    document = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    assert replace_section(document, "new\n") == f"above\n{BEGIN}\nnew\n{END}\nbelow\n"


@pytest.mark.parametrize("document", ["", BEGIN, f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"])
def test_missing_or_doubled_markers_are_refused(document):
    with pytest.raises(ValueError, match="begin generated"):
        replace_section(document, "new")


@pytest.fixture
def small_matrix(monkeypatch, tmp_path):
    """The whole evaluation on traces and pools small enough for a test."""
    rows = make_trace.to_jsonl(make_trace.make_trace("chat", 9, 80))
    (tmp_path / "one.jsonl").write_bytes(rows)
    for name, value in {
        "RECORDED": ("one.jsonl",),
        "SMALL_TRACES": ("one",),
        "GENERATED": ("flood",),
        "CAPACITIES": (0.02, 0.2),
        "POOLS": (256,),
        "FLOOD_PROMPTS": (40,),
        "SET_SHARES": (0.4,),
        "ONE_USE_SHARES": (0.1,),
    }.items():
        monkeypatch.setattr(evaluate_policy, name, value)
    monkeypatch.setattr(make_trace, "REQUESTS", 120)
    document = tmp_path / "policy.md"
    document.write_text(f"# Policy\n{BEGIN}\n{END}\nend\n")
    arguments = ["--traces-dir", str(tmp_path), "--json", str(tmp_path / "results" / "policy.json")]
    return tmp_path, [*arguments, "--document", str(document), "--peer", "arc", "--spread"]


def test_evaluation_writes_verdict_cells_and_tables(small_matrix, capsys):
    directory, arguments = small_matrix
    status = evaluate_policy.main([*arguments, "5"])
    verdict = json.loads(capsys.readouterr().out)
    assert status == (0 if verdict["accepted"] else 1)
    report = json.loads((directory / "results" / "policy.json").read_text())
    assert report["bars"] == verdict["bars"]
    assert verdict["accepted"] == all(bar["holds"] for bar in report["bars"])
    # halves x traces x capacities x (lru, optimum, ARC, three scan limits)
    assert len(report["cells"]) == 2 * 2 * 2 * 6
    assert len(report["floods"]) == 3
    assert [other["hash_seed"] for other in report["spread"]] == [5]
    assert len(report["spread"][0]["bars"]) == 3
    document = (directory / "policy.md").read_text()
    assert document.startswith(f"# Policy\n{BEGIN}\n")
    assert document.endswith(f"{END}\nend\n")
    assert "| one | 2% |" in document
    assert "flood: pool 256, hot 128" in document
    assert "| 5 | mean points over LRU, all requests |" in document


def test_a_dry_run_writes_nothing(small_matrix, capsys):
    directory, arguments = small_matrix
    evaluate_policy.main([*arguments, "--dry-run", "--half", "first"])
    bars = json.loads(capsys.readouterr().out)["bars"]
    assert sum("first half" in bar["name"] for bar in bars) == 3
    assert not (directory / "results").exists()
    assert (directory / "policy.md").read_text() == f"# Policy\n{BEGIN}\n{END}\nend\n"


def test_absent_traces_are_named(small_matrix, capsys):
    _, arguments = small_matrix
    assert evaluate_policy.main([*arguments, "--traces-dir", "/nowhere/traces"]) == 2
    assert "--traces-dir /nowhere/traces: no such directory" in capsys.readouterr().err


def test_a_document_without_markers_stops_before_the_runs(small_matrix, capsys):
    directory, arguments = small_matrix
    (directory / "policy.md").write_text("# Policy\n")
    assert evaluate_policy.main(arguments) == 2
    assert "begin generated" in capsys.readouterr().err
    assert not (directory / "results").exists()
