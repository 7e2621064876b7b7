# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong in a drill, the target is not left in active."""

import argparse

import pytest

from drills import compose, session
from drills.checks import PASS
from drills.targets import TargetError
from drills.verdict import Verdict

ENV = "COMPUTECACHE_MODE=lru\n"


class Recording(compose.ComposeTarget):
    """A Compose target whose `up` is only noted; in `spoils` mode it takes .env away."""

    def __init__(self, folder, spoils=None):
        super().__init__(folder, lambda **values: None, ready_timeout_s=1)
        self.ups, self.spoils = [], spoils

    def _up(self, settings):
        self.ups.append(settings[compose.MODE])
        if self.ups[-1] == self.spoils:
            self._env_file.unlink()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text(ENV)
    monkeypatch.setattr(compose.shutil, "which", lambda name: name)
    return tmp_path


def accepted():
    verdict = Verdict()
    verdict.add("kept", PASS, "it kept more")
    return verdict


def test_an_env_file_that_is_gone_after_the_switch_fails_the_promotion(folder):
    target = Recording(folder, spoils="active")
    drill = session.Session(argparse.Namespace(), target, session.State(folder / "state.json"))
    verdict = accepted()
    left = drill.finish(verdict, promote=True)
    assert target.ups == ["active", "lru"]
    assert verdict.outcome == "REJECT"
    assert left["final_mode"] == "unknown", ".env could not be looked at"
    assert "cannot be read" in left["left"]


def test_a_bug_between_the_visits_and_the_end_leaves_lru(folder, monkeypatch):
    target = Recording(folder)
    monkeypatch.setattr(session, "make_target", lambda options, save: target)
    options = argparse.Namespace(out=folder / "out")

    def drive():
        with session.open_session(options) as drill:
            drill.run(lambda: target._up({compose.MODE: "active"}))
            raise ZeroDivisionError  # in the verdict, for instance

    with pytest.raises(ZeroDivisionError):
        drive()
    assert target.ups == ["active", "lru"]


def test_after_the_end_nothing_is_switched_again(folder, monkeypatch):
    target = Recording(folder)
    monkeypatch.setattr(session, "make_target", lambda options, save: target)
    options = argparse.Namespace(out=folder / "out")

    def drive():
        with session.open_session(options) as drill:
            drill.finish(accepted(), promote=True)
            raise ZeroDivisionError  # in the report

    with pytest.raises(ZeroDivisionError):
        drive()
    assert target.ups == ["active"]
    assert (folder / ".env").read_text() == "COMPUTECACHE_MODE=active\n"


@pytest.mark.parametrize(
    ("content", "fault"), [(b"# M\xfcnchen\n", "is not UTF-8"), (None, "cannot be read")]
)
def test_an_env_file_that_cannot_be_read_is_named_before_anything_is_switched(
    folder, content, fault
):
    target = Recording(folder)
    if content is None:
        (folder / ".env").unlink()
    else:
        (folder / ".env").write_bytes(content)
    with pytest.raises(TargetError, match=fault):
        target.begin()
    assert target.ups == []


def test_an_engine_that_hangs_does_not_answer(folder, monkeypatch):
    target = Recording(folder)
    monkeypatch.setattr(compose, "ANSWER_S", 0.2)
    docker = folder / "docker"
    docker.write_text("#!/bin/sh\nexec sleep 60\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    assert not target._engine_answers()
