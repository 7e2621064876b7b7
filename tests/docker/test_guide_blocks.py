# SPDX-License-Identifier: Apache-2.0
"""Every fenced block of docs/operations.md is run by tests/stack/test_guide.py, or named there."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "stack/stack_guide.py"
_spec = importlib.util.spec_from_file_location("stack_guide_of_docker", PATH)
stack_guide = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = stack_guide  # dataclasses look there
_spec.loader.exec_module(stack_guide)
PAGE = stack_guide.PAGE.read_text()


def test_every_block_of_the_guide_is_run_or_left_out_for_a_reason():
    assert stack_guide.faults(PAGE) == []


@pytest.mark.parametrize("heading", [line for line in PAGE.splitlines() if line.startswith("#")])
def test_a_new_block_in_any_section_is_noticed(heading):
    changed = PAGE.replace(f"{heading}\n", f"{heading}\n\n```\ndocker compose top\n```\n", 1)
    assert stack_guide.faults(changed) != []


def test_a_command_that_joins_a_block_that_is_left_out_is_noticed():
    changed = PAGE.replace("docker run --rm --gpus all", "docker info\ndocker run --rm --gpus all")
    (fault,) = stack_guide.faults(changed)
    assert fault.endswith("`docker info` could be run")


def test_a_block_that_is_gone_is_noticed():
    changed = PAGE.replace("```\ndocker compose stop\n```\n", "")
    assert stack_guide.faults(changed) == ["there is no block 'Pause and delete 5' any more"]
