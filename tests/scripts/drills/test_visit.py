# SPDX-License-Identifier: Apache-2.0
"""A visit and its row say in the code what docs/canary.schema.json says of them."""

import json
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from drills.record import Phase, phase_of
from drills.visit import Absent, Visit

REPO = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((REPO / "docs" / "canary.schema.json").read_text())
ITEMS = {Visit: SCHEMA["properties"]["visits"]["items"], Phase: SCHEMA["$defs"]["phase"]}
JSON_TYPES = {str: "string", int: "integer", float: "number", dict: "object", NoneType: "null"}


def json_types(annotation):
    """The JSON types of an annotation, or the values of a Literal; Absent is no type."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) is dict or is_typeddict(annotation):
        return {"object"}
    if annotation in JSON_TYPES:
        return {JSON_TYPES[annotation]}
    return set().union(*(json_types(one) for one in get_args(annotation) if one is not Absent))


def schema_types(described):
    types = described.get("enum") or described["type"]
    found = {types} if isinstance(types, str) else set(types)
    return {"null" if one is None else one for one in found}


@pytest.mark.parametrize("kind", [Visit, Phase])
def test_the_schema_and_the_code_name_the_same_fields(kind):
    hints = get_type_hints(kind)
    assert list(ITEMS[kind]["properties"]) == list(hints)
    optional = {name for name, hint in hints.items() if Absent in get_args(hint)}
    assert set(ITEMS[kind]["required"]) == set(hints) - optional
    for name, hint in hints.items():
        assert schema_types(ITEMS[kind]["properties"][name]) == json_types(hint), name


def test_a_visit_whose_server_never_answered_leaves_out_what_it_never_came_to():
    visit = Visit("candidate", "active", 2, error="no answer")
    assert list(visit.record()) == [
        *("role", "mode_asked", "number", "report", "error", "started_at", "finished_at")
    ]
    assert phase_of(visit) == Phase("candidate", error="no answer")


def test_what_is_known_to_be_nothing_is_null_and_not_left_out():
    visit = Visit("baseline", "lru", 1, ready_s=None, vllm=None, scan_limit=64)
    record = visit.record()
    assert (record["ready_s"], record["vllm"], record["scan_limit"]) == (None, None, 64)
    assert "identity" not in record


@pytest.mark.parametrize(
    ("fault", "healthy"),
    [
        ({}, True),
        ({"report": None}, False),
        ({"error": "it died"}, False),
        ({"report": {"failures": ["one"], "problems": []}}, False),
        ({"report": {"failures": [], "problems": ["other traffic"]}}, False),
    ],
)
def test_only_an_answered_visit_without_a_doubt_is_healthy(fault, healthy):
    fields = {"report": {"failures": [], "problems": []}} | fault
    assert Visit("baseline", "lru", 1, **fields).healthy is healthy
