# SPDX-License-Identifier: Apache-2.0
"""files.replace_file: the old content or the new one, never a part; and whose file it stays."""

import os
import stat

import pytest

from serving.files import replace_file


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_keeps_its_permissions_and_a_link_stays_a_link(tmp_path):
    real = tmp_path / "real.env"
    real.write_bytes(b"A=1\n")
    real.chmod(0o640)
    link = tmp_path / ".env"
    link.symlink_to(real)
    replace_file(link, b"A=2\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"A=2\n"
    assert mode_of(real) == 0o640
    assert sorted(os.listdir(tmp_path)) == [".env", "real.env"]


def test_a_new_file_is_as_readable_as_any_other(tmp_path):
    replace_file(tmp_path / "record.json", "{}")
    (tmp_path / "other.json").write_text("{}")
    assert mode_of(tmp_path / "record.json") == mode_of(tmp_path / "other.json")


def test_an_existing_file_stays_its_owners(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(os, "fchown", lambda number, *ids: given.append(ids))
    path = tmp_path / ".env"
    path.write_text("A=1\n")
    replace_file(path, "A=2\n")
    assert given == [(path.stat().st_uid, path.stat().st_gid)]


def test_a_file_that_cannot_be_given_back_to_its_owner_is_replaced_all_the_same(
    tmp_path, monkeypatch
):
    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    path = tmp_path / ".env"
    path.write_text("A=1\n")
    replace_file(path, "A=2\n")
    assert path.read_text() == "A=2\n"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_whatever_ends_it_the_old_content_stays_and_nothing_else(tmp_path, monkeypatch, step):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    path = tmp_path / ".env"
    path.write_text("KEY=secret\n")
    monkeypatch.setattr(os, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "KEY=other\n")
    assert path.read_text() == "KEY=secret\n"
    assert os.listdir(tmp_path) == [".env"]


def test_nobody_else_reads_a_secret_while_it_is_being_written(tmp_path, monkeypatch):
    path = tmp_path / ".env"
    path.write_text("KEY=secret\n")
    path.chmod(0o600)
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(os.fstat(number).st_mode & 0o777))
    before = os.umask(0)
    try:
        replace_file(path, "KEY=other\n")
    finally:
        os.umask(before)
    assert seen == [0o600]
