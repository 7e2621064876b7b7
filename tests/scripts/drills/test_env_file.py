# SPDX-License-Identifier: Apache-2.0
"""env_file: one line changes, every other byte stays, and the way back is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills.env_file import EnvFileError, setting_line, with_setting_line

MODE = "COMPUTECACHE_MODE"
ACTIVE = b"COMPUTECACHE_MODE=active"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"COMPUTECACHE_MODE=lru\n", b"COMPUTECACHE_MODE=active\n"),
        (b"A=1\nCOMPUTECACHE_MODE=lru\nB=2\n", b"A=1\nCOMPUTECACHE_MODE=active\nB=2\n"),
        (b'A=1\r\nCOMPUTECACHE_MODE="lru"\r\nB=2', b"A=1\r\nCOMPUTECACHE_MODE=active\r\nB=2"),
        (b"export COMPUTECACHE_MODE=lru", b"COMPUTECACHE_MODE=active"),
        (b"A=1\n", b"A=1\nCOMPUTECACHE_MODE=active\n"),
        (b"", b"COMPUTECACHE_MODE=active\n"),
        (b"#COMPUTECACHE_MODE=lru\n", b"#COMPUTECACHE_MODE=lru\nCOMPUTECACHE_MODE=active\n"),
        (b"XCOMPUTECACHE_MODE=x\n", b"XCOMPUTECACHE_MODE=x\nCOMPUTECACHE_MODE=active\n"),
    ],
)
def test_switching_and_switching_back(before, after):
    line = setting_line(before, MODE)
    assert with_setting_line(before, MODE, ACTIVE) == after
    assert with_setting_line(after, MODE, line) == before


def test_two_mode_lines_are_refused():
    with pytest.raises(EnvFileError, match="set 2 times"):
        setting_line(b"COMPUTECACHE_MODE=lru\nCOMPUTECACHE_MODE=active\n", MODE)


def test_adding_to_an_unfinished_line_is_refused():
    with pytest.raises(EnvFileError, match="line end"):
        with_setting_line(b"A=1", MODE, ACTIVE)


@given(st.lists(st.sampled_from([b"A=1", b"# note", b"", b"COMPUTECACHE_MODE = 'lru' "])))
def test_the_way_back_is_exact(lines):
    before = b"".join(line + b"\n" for line in lines)
    if sum(b"MODE" in line for line in lines) > 1:
        return
    line = setting_line(before, MODE)
    assert with_setting_line(with_setting_line(before, MODE, ACTIVE), MODE, line) == before


def test_two_added_settings_come_out_in_any_order():
    both = with_setting_line(with_setting_line(b"A=1\n", MODE, ACTIVE), "B", b"B=2")
    assert both == b"A=1\nCOMPUTECACHE_MODE=active\nB=2\n"
    assert with_setting_line(with_setting_line(both, MODE, None), "B", None) == b"A=1\n"
