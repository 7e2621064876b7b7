# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import os

import pytest

import make_trace
from lab.traces import read_trace

REQUESTS = 700  # past the first change of the drifting set


@pytest.fixture(params=make_trace.KINDS)
def kind(request):
    return request.param


def full_blocks(row):
    return row["hash_ids"][: row["input_length"] // row["block_size"]]


def test_same_seed_same_bytes_and_other_seed_other_bytes(kind):
    first, again, other = (
        make_trace.to_jsonl(make_trace.make_trace(kind, seed, 100)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_an_id_stands_for_one_prefix(kind):
    prefix_of = {}
    partials = []
    for row in make_trace.make_trace(kind, 1, REQUESTS):
        blocks = full_blocks(row)
        for depth, block in enumerate(blocks):
            parent = blocks[depth - 1] if depth else None
            assert prefix_of.setdefault(block, (depth, parent)) == (depth, parent)
        partials += row["hash_ids"][len(blocks) :]
    assert len(partials) == len(set(partials))
    assert not prefix_of.keys() & set(partials)


def test_the_reader_takes_every_kind_and_times_do_not_go_back(kind, tmp_path, capsys):
    out = tmp_path / "made.jsonl.gz"
    assert make_trace.main([kind, "--requests", "200", "--seed", "5", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 200
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    stamps = [row["timestamp_ms"] for row in rows]
    assert stamps == sorted(stamps)
    assert read_trace(out).references == sum(len(full_blocks(row)) for row in rows)


def test_flood_prompts_are_used_once_and_system_prompts_often():
    rows = make_trace.make_trace("flood", 1, REQUESTS)
    uses = {}
    for row in rows:
        uses[row["hash_ids"][0]] = uses.get(row["hash_ids"][0], 0) + 1
    once = sum(count == 1 for count in uses.values())
    often = [count for count in uses.values() if count > 1]
    assert len(often) == 8
    assert once + sum(often) == REQUESTS
    assert once > 300


def test_a_retired_set_never_comes_back():
    rows = make_trace.make_trace("drift", 1, REQUESTS)
    old = {block for row in rows[:600] for block in full_blocks(row)}
    new = {block for row in rows[600:] for block in full_blocks(row)}
    assert not old & new


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_a_later_turn_extends_an_earlier_prompt(kind):
    rows = make_trace.make_trace(kind, 1, REQUESTS)
    shared = {full_blocks(row)[0] for row in rows}
    assert len(shared) == {"chat": 5, "agents": 3}[kind]
    seen = set()
    extended = 0
    for row in rows:
        blocks = tuple(full_blocks(row))
        extended += any(blocks[:end] in seen for end in range(len(blocks), 0, -1))
        seen.add(blocks)
    assert extended > REQUESTS / 2


def test_mix_holds_all_four_kinds():
    rows = make_trace.make_trace("mix", 1, REQUESTS)
    outputs = {row["output_length"] for row in rows}
    assert {20, 80, 100} < outputs  # flood bursts, drift, flood's system prompts; then the rest


@pytest.mark.parametrize(
    ("option", "value"), [("--requests", "0"), ("--block-size", "-16"), ("--requests", "many")]
)
def test_bad_option_names_itself_and_writes_nothing(option, value, tmp_path, capsys):
    out = tmp_path / "made.jsonl"
    with pytest.raises(SystemExit) as stopped:
        make_trace.main(["chat", option, value, "--out", str(out)])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert option in message
    assert value in message
    assert not out.exists()


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("absent/made.jsonl", "there is no folder"),
        (".", "is a folder"),
        ("closed/made.jsonl", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_work(
    place, fault, tmp_path, capsys, monkeypatch
):
    (tmp_path / "closed").mkdir()
    may = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "closed" and may(path, mode))
    monkeypatch.setattr(make_trace, "make_trace", None)
    with pytest.raises(SystemExit) as stopped:
        make_trace.main(["chat", "--out", str(tmp_path / place)])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert f"--out: {tmp_path / place}" in message
    assert fault in message
