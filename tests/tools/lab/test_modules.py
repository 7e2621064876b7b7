# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from lab.modules import load_module


def test_a_file_becomes_the_module_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "some_candidate", None)  # and put back after the test
    (tmp_path / "any.py").write_text("mark = __name__\n")
    module = load_module("some_candidate", tmp_path / "any.py")
    assert module.mark == "some_candidate"
    assert sys.modules["some_candidate"] is module


def test_a_file_that_is_no_module_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"notes\.txt is not a Python file"):
        load_module("notes", tmp_path / "notes.txt")
    with pytest.raises(OSError, match=r"absent\.py"):
        load_module("absent_candidate", tmp_path / "absent.py")
