# SPDX-License-Identifier: Apache-2.0
"""The rule of the folders: scripts/ talk to a running server, tools/ never do.

Files directly in a folder are commands; a folder below it (a wing) is a library.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = ("tools", "scripts")
# The unpatched module of the lab is, by definition, what the installer reverts to.
COMMANDS_FOR_LIBRARIES = {("tools/lab/pool.py", "install_computecache")}
# Both sides have to read a trace alike.
ARROWS_TO_TOOLS = {("scripts/serving/traces.py", "lab")}
CLIENTS = {"httpx", "requests", "aiohttp", "websockets"}


def name(path):
    return path.relative_to(REPO).as_posix()


def imports(path):
    """First names of what a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: a relative import"
            found.add(node.module.partition(".")[0])
    return found


def wings(folder):
    return {path.parent.name for path in (REPO / folder).glob("*/__init__.py")}


def commands(folder):
    return {path.stem for path in (REPO / folder).glob("*.py")}


def test_the_folders_are_seen():
    assert wings("tools") >= {"lab", "page"}
    assert wings("scripts") >= {"serving", "evidence"}
    assert {"replay_trace", "gpu_report"} <= commands("tools")


def test_tools_import_no_client_and_nothing_of_scripts():
    forbidden = CLIENTS | wings("scripts") | commands("scripts")
    found = {(name(path), x) for path in (REPO / "tools").rglob("*.py") for x in imports(path)}
    assert [pair for pair in sorted(found) if pair[1] in forbidden] == []


def test_scripts_import_tools_in_one_place():
    theirs = wings("tools") | commands("tools")
    found = {(name(path), x) for path in (REPO / "scripts").rglob("*.py") for x in imports(path)}
    assert {pair for pair in found if pair[1] in theirs} == ARROWS_TO_TOOLS


@pytest.mark.parametrize("folder", FOLDERS)
def test_libraries_import_no_command(folder):
    libraries = [path for wing in wings(folder) for path in (REPO / folder / wing).rglob("*.py")]
    found = {(name(path), x) for path in libraries for x in imports(path)}
    assert {pair for pair in found if pair[1] in commands(folder)} <= COMMANDS_FOR_LIBRARIES


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_circle_between_wings(folder):
    arrows = {
        wing: {x for path in (REPO / folder / wing).rglob("*.py") for x in imports(path)} - {wing}
        for wing in wings(folder)
    }
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


def test_names_are_unique_on_the_shared_path():
    names = [*wings("tools"), *commands("tools"), *wings("scripts"), *commands("scripts")]
    assert len(names) == len(set(names))
