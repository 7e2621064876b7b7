# SPDX-License-Identifier: Apache-2.0
"""What becomes of a trace's rows: requests, their order in time, and the option that reads them."""

import argparse
import json

import pytest

from serving import shapes
from serving.options import add_workload_options, workload_settings
from serving.requests import Prompts, check_plan
from serving.traces import TraceRow, trace_file

POOL = range(100, 400)


def row(at_ms, tokens, ids):
    return TraceRow(at_ms, tokens, 1, ids, 512)


def test_shared_prefixes_times_and_whole_blocks_are_kept():
    rows = [
        row(1000, 1024, [1, 2]),
        row(3000, 1200, [1, 2]),
        row(3000, 100, []),  # no full block
        row(4000, 4096, list(range(5, 13))),  # too long
        row(5000, 512, [99]),
    ]
    plan, too_long = shapes.trace(
        Prompts(POOL, 0), rows, block_tokens=16, speed=2.0, max_model_len=100
    )
    check_plan(plan, 100)
    assert too_long == 1
    assert [len(r.prompt) for r in plan] == [32, 32, 16]
    assert plan[0].prompt == plan[1].prompt
    assert [r.gap_s for r in plan] == [0.0, 1.0, 1.0]


def test_speed_0_waits_for_nothing_and_the_count_is_bounded():
    rows = [row(1000 * i, 512, [i]) for i in range(9)]
    plan, _ = shapes.trace(
        Prompts(POOL, 0), rows, block_tokens=16, speed=0, max_model_len=100, max_requests=4
    )
    assert [r.gap_s for r in plan] == [0.0] * 4


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    return parser.parse_args([str(a) for a in arguments])


def test_the_option_holds_the_rows_and_settings_name_the_file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 512, "hash_ids": [4]}) + "\n")
    options = parse("--shape", "trace", "--trace", path)
    assert [r.hash_ids for r in options.trace.rows] == [[4]]
    assert workload_settings(options)["trace"] == str(path)
    assert workload_settings(parse())["trace"] is None


def test_a_trace_that_cannot_be_read_is_bad_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--trace", tmp_path / "absent.jsonl")
    assert stopped.value.code == 2
    assert "absent.jsonl: No such file" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError, match="Is a directory"):
        trace_file(str(tmp_path))
