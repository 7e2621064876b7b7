# SPDX-License-Identifier: Apache-2.0
"""docs/canary.md names every reason that the code can give, under its outcome, and no other."""

import ast
import re
from pathlib import Path

import pytest

from drills.checks import JUDGED_KINDS

REPO = Path(__file__).resolve().parents[3]
SOURCES = [*sorted((REPO / "scripts/drills").glob("*.py")), REPO / "scripts/canary.py"]
OUTCOMES = {"FAIL": "REJECT", "UNKNOWN": "INCONCLUSIVE"}


def names_of(node, function):
    """The check names that an expression may be; a name stands for what it is set to."""
    if isinstance(node, ast.Constant):
        return {node.value}
    if isinstance(node, ast.JoinedStr):
        prefix, value = node.values
        assert (prefix.value, value.value.id) == ("ttft_", "kind"), ast.dump(node)
        return {f"ttft_{kind}" for kind in JUDGED_KINDS}
    assert isinstance(node, ast.Name), ast.dump(node)
    return set().union(*(names_of(value, function) for value in set_to(node.id, function)))


def set_to(name, function):
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and name in [getattr(t, "id", None) for t in node.targets]
    ]


def statuses_of(node, function):
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for name in found - {"PASS", *OUTCOMES}:
        for value in set_to(name, function):
            found |= {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    return found & OUTCOMES.keys()


def reasons_in_code():
    """{outcome: names of the checks that can lead to it}."""
    found = {outcome: set() for outcome in OUTCOMES.values()}
    for source in SOURCES:
        for function in ast.walk(ast.parse(source.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in ("add", "make_check"):
                continue
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or len(call.args) != 3:
                    continue
                called = getattr(call.func, "id", getattr(call.func, "attr", None))
                if called not in ("make_check", "add"):
                    continue
                for status in statuses_of(call.args[1], function):
                    found[OUTCOMES[status]] |= names_of(call.args[0], function)
    return found


def reasons_in_page(outcome):
    page = (REPO / "docs" / "canary.md").read_text()
    table = page.partition(f"**{outcome} (")[2].partition("\n| check |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    names = {name for cell in cells for name in re.split(r"[,\s]+", cell.strip())}
    if "ttft_*" in names:
        names = (names - {"ttft_*"}) | {f"ttft_{kind}" for kind in JUDGED_KINDS}
    return names


@pytest.mark.parametrize("outcome", OUTCOMES.values())
def test_the_page_has_the_reasons_of_the_code(outcome):
    in_code = reasons_in_code()[outcome]
    assert len(in_code) > 5, "the code is not understood here any more"
    assert reasons_in_page(outcome) == in_code
