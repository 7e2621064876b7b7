# SPDX-License-Identifier: Apache-2.0
import gzip
import json

import pytest

from lab.files import replace_file
from lab.traces import TraceError, TraceRow, half_of, read_rows, read_trace, trace_from_chains

GOOD = {
    "timestamp_ms": 5,
    "input_length": 40,
    "output_length": 3,
    "hash_ids": [7, 8, 9],
    "block_size": 16,
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_last_partial_block_is_dropped(tmp_path):
    full = GOOD | {"input_length": 48, "hash_ids": [7, 8, 10]}
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD, full))
    assert trace.requests == [[0, 1], [0, 1, 2]]
    assert (trace.references, trace.unique_blocks) == (5, 3)


def test_partial_block_may_be_left_out_of_the_line(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD | {"hash_ids": [7, 8]}))
    assert trace.requests == [[0, 1]]


def test_published_files_name_the_time_differently_and_no_block_size(tmp_path):
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [4, 5]}
    assert read_trace(write(tmp_path / "t.jsonl", row)).requests == [[0, 1]]


def test_gzip_and_blank_lines(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" + json.dumps(GOOD).encode() + b"\n\n"))
    assert read_trace(path).name == "t"
    assert read_trace(path).requests == [[0, 1]]


def test_requests_are_ordered_by_time_and_ties_keep_their_place(tmp_path):
    early = GOOD | {"timestamp_ms": 1, "input_length": 16, "hash_ids": [1]}
    late = GOOD | {"timestamp_ms": 9, "input_length": 16, "hash_ids": [2]}
    tie = late | {"hash_ids": [3]}
    trace = read_trace(write(tmp_path / "t.jsonl", late, tie, early))
    assert trace.requests == [[0], [1], [2]]
    assert trace.unique_blocks == 3


def test_rows_are_typed_and_in_order_of_time(tmp_path):
    late = {"timestamp": 9.5, "input_length": 1024, "hash_ids": [1, 2]}
    assert read_rows(write(tmp_path / "t.jsonl", late, GOOD)) == [
        TraceRow(5, 40, 3, [7, 8], 16),
        TraceRow(9.5, 1024, 0, [1, 2], 512),
    ]


def test_blocks_may_differ_in_size_from_line_to_line(tmp_path):
    other = GOOD | {"block_size": 20, "hash_ids": [1, 2]}
    assert [r.hash_ids for r in read_rows(write(tmp_path / "t.jsonl", GOOD, other))] == [
        [7, 8],
        [1, 2],
    ]


def test_a_prompt_shorter_than_a_block_has_no_full_one(tmp_path):
    short = GOOD | {"input_length": 15, "hash_ids": [1]}
    assert read_rows(write(tmp_path / "t.jsonl", short))[0].hash_ids == []
    assert read_trace(tmp_path / "t.jsonl").requests == [[]]


def test_same_content_after_another_prefix_is_another_block():
    trace = trace_from_chains("t", [[1, 5], [2, 5], [1, 5]])
    assert trace.requests == [[0, 1], [2, 3], [0, 1]]


def test_halves_in_time_are_traces_of_their_own():
    trace = trace_from_chains("t", [[1], [2], [3, 4]])
    assert half_of(trace, "first").requests == [[0]]
    assert half_of(trace, "second").requests == [[0], [1, 2]]
    assert half_of(trace, "second").unique_blocks == 3
    assert half_of(trace, "all") is trace


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([1], "expected an object, found list"),
        (GOOD | {"timestamp_ms": "5"}, "timestamp_ms is '5', expected a number of milliseconds"),
        (GOOD | {"timestamp_ms": True}, "timestamp_ms is True"),
        (GOOD | {"timestamp_ms": -1}, "timestamp_ms is -1, expected a finite number >= 0"),
        (GOOD | {"timestamp_ms": float("nan")}, "timestamp_ms is nan"),
        (GOOD | {"timestamp_ms": 2**53 + 1}, "timestamp_ms is 9007199254740993"),
        (GOOD | {"timestamp_ms": None}, "timestamp_ms is None, expected a number"),
        (GOOD | {"block_size": None}, "block_size is None, expected an integer >= 1"),
        (GOOD | {"input_length": 2**53 + 1}, "input_length is 9007199254740993, expected an"),
        (GOOD | {"hash_ids": None}, "hash_ids is not a list of integers >= 0"),
        (GOOD | {"block_size": 0}, "block_size is 0, expected an integer >= 1"),
        (GOOD | {"block_size": 16.0}, "block_size is 16.0"),
        (GOOD | {"input_length": None}, "input_length is None, expected an integer >= 0"),
        (GOOD | {"input_length": -1}, "input_length is -1"),
        (GOOD | {"output_length": -3}, "output_length is -3"),
        (GOOD | {"hash_ids": "789"}, "hash_ids is not a list of integers >= 0"),
        (GOOD | {"hash_ids": [7, -8, 9]}, "hash_ids is not a list of integers >= 0"),
        (GOOD | {"hash_ids": [7, True, 9]}, "hash_ids is not a list of integers >= 0"),
        (GOOD | {"hash_ids": [7]}, "1 hash_ids for 40 tokens in blocks of 16, expected 3"),
        (GOOD | {"hash_ids": [7, 8, 9, 10]}, "4 hash_ids for 40 tokens in blocks of 16"),
    ],
)
def test_bad_line_is_named_with_its_fault(row, fault, tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, row)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:2: {fault}")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b'{"timestamp_ms": 5', ":1: not JSON"),
        (json.dumps(GOOD).encode() + b"\n\xff\xfe\n", ":2: not JSON"),
        (b"", ":1: no requests in the file"),
    ],
)
def test_what_is_no_trace(content, where, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=where):
        read_trace(path)


def test_cut_gzip(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:-12])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz:\d+: damaged gzip data"):
        read_trace(path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    replace_file(path, b"old")
    with pytest.raises(TypeError):
        replace_file(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
