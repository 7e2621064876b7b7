# SPDX-License-Identifier: Apache-2.0
"""One file, one answer: tools/ and scripts/ read a trace alike, or refuse it alike."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.traces import read_trace
from serving.traces import trace_file

REPLAY = Path(__file__).parents[2] / "tools" / "replay_trace.py"
NOWHERE = "http://127.0.0.1:9"  # the port "discard": nothing listens
ROW = {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}


def line(**changes):
    return json.dumps(ROW | changes).encode() + b"\n"


FAULTS = {
    "block_size_zero.jsonl": (line(block_size=0), ":1: block_size is 0, expected an integer >= 1"),
    "nan.jsonl": (line(timestamp=float("nan")), ":1: timestamp_ms is nan, expected a finite"),
    "infinite.jsonl": (line(timestamp=float("inf")), ":1: timestamp_ms is inf, expected a finite"),
    "negative_id.jsonl": (line() + line(hash_ids=[0, -1]), ":2: hash_ids is not a list of"),
    "wrong_count.jsonl": (line(hash_ids=[0]), ":1: 1 hash_ids for 1024 tokens in blocks of 512"),
    "too_many.jsonl": (line(hash_ids=[0, 1, 2]), ":1: 3 hash_ids for 1024 tokens"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", ":1: not a request: nested too deeply"),
    "deep_inside.jsonl": (
        line()[:-2] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        ":1: not a request: nested too deeply",
    ),
    "huge_integer.jsonl": (
        b'{"timestamp": ' + b"9" * 5000 + b', "input_length": 1024, "hash_ids": [0, 1]}\n',
        ":1: not a request: a number in it has too many digits",
    ),
    "large_time.jsonl": (line(timestamp=10**400), ":1: timestamp_ms is 1000"),
    "large_length.jsonl": (line(input_length=10**400), ":1: input_length is 1000"),
    "cut.jsonl.gz": (gzip.compress(line())[:-12], ":1: damaged gzip data"),
    "utf16.jsonl": (line().decode().encode("utf-16"), ":1: not JSON"),
    "empty.jsonl": (b"", ":1: no requests in the file"),
    "blank.jsonl": (b"\n \n", ":1: no requests in the file"),
    "no_object.jsonl": (b"3\n", ":1: expected an object, found int"),
    "no_time.jsonl": (b'{"input_length": 1, "hash_ids": []}\n', ":1: timestamp_ms is None"),
}
CHAINS = {
    "plain.jsonl": (line(), [[0, 1]]),
    "blank_lines.jsonl": (b"\n" + line() + b"\n\n" + line(), [[0, 1], [0, 1]]),
    "byte_order_mark.jsonl": (b"\xef\xbb\xbf" + line(), [[0, 1]]),
    "mark_on_a_blank_line.jsonl": (b"\xef\xbb\xbf\n" + line(), [[0, 1]]),
    "partial_id_left_out.jsonl": (line(input_length=1500), [[0, 1]]),
    "partial_id_given.jsonl": (line(input_length=1500, hash_ids=[0, 1, 7]), [[0, 1]]),
    "gzip.jsonl.gz": (gzip.compress(line()), [[0, 1]]),
    "plain_named.jsonl.gz": (line(), [[0, 1]]),
    "gzip_named_plain.jsonl": (gzip.compress(line()), [[0, 1]]),
    "out_of_order.jsonl": (
        line(timestamp=500, hash_ids=[7, 8]) + line() + line(timestamp=-0.0, hash_ids=[3, 4]),
        [[0, 1], [3, 4], [7, 8]],
    ),
}


@pytest.fixture
def write(tmp_path):
    def written(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return written


@pytest.fixture(params=["tools/replay_trace.py", "scripts/prefix_pressure.py"])
def command(request, script):
    """command(path): the side's command, given a trace and no server."""

    def replay(path):
        arguments = [sys.executable, REPLAY, path, "--mode", "optimum"]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)

    def press(path):
        where = ("--base-url", NOWHERE, "--policy-metrics-url", NOWHERE)
        return script("prefix_pressure.py", *where, "--shape", "trace", "--trace", path)

    return replay if "replay" in request.param else press


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_file_is_named_with_line_and_fault(name, write, command):
    content, fault = FAULTS[name]
    path = write(name, content)
    done = command(path)
    assert done.returncode == 2
    assert f"{path}{fault}" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()[-1]) < 400 + len(str(path))  # not the huge value itself
    assert done.stdout == ""


def test_a_missing_file_is_named(tmp_path, command):
    done = command(tmp_path / "absent.jsonl")
    assert done.returncode == 2
    assert f"{tmp_path / 'absent.jsonl'}: No such file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", CHAINS)
def test_a_usable_file_gives_the_same_chains_to_both(name, write):
    content, chains = CHAINS[name]
    path = write(name, content)
    dense = {}
    for chain in chains:
        for block in chain:
            dense.setdefault(block, len(dense))
    assert [row.hash_ids for row in trace_file(str(path)).rows] == chains
    assert read_trace(path).requests == [[dense[block] for block in c] for c in chains]


@pytest.mark.parametrize("name", CHAINS)
def test_a_usable_file_is_replayed_by_both(name, write, fake, script, tmp_path):
    content, chains = CHAINS[name]
    path, out = write(name, content), tmp_path / "cells.json"
    options = ["--capacity", "64", "--mode", "optimum", "--concurrency", "1", "--json", out]
    subprocess.run([sys.executable, REPLAY, path, *options], check=True, capture_output=True)
    (cell,) = json.loads(out.read_text())
    assert (cell["requests"], cell["referenced_blocks"]) == (len(chains), sum(map(len, chains)))
    with fake() as server:
        where = ("--base-url", server.url, "--policy-metrics-url", server.policy_url)
        more = ("--trace-block-tokens", 64, "--trace-speed", 0)
        done = script("prefix_pressure.py", *where, "--shape", "trace", "--trace", path, *more)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"]["sent"] == len(chains)
    assert report["tokens"]["trace"]["prompt"] == 64 * sum(map(len, chains))


def test_a_bad_file_is_refused_before_a_server_is_asked(write, fake, script):
    path = write("bad.jsonl", line() + line(block_size=0))
    with fake() as server:
        where = ("--base-url", server.url, "--policy-metrics-url", server.policy_url)
        done = script("prefix_pressure.py", *where, "--shape", "trace", "--trace", path)
        assert server.served == 0
    assert done.returncode == 2
    assert f"{path}:2: block_size is 0" in done.stderr
