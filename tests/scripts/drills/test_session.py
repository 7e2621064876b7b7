# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong in a drill, the target is not left in active."""

import argparse
import json

import pytest

from drills import compose, session
from drills.checks import PASS
from drills.env_file import EnvFileError
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
    options = argparse.Namespace(out=folder / "out", project=folder)

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
    options = argparse.Namespace(out=folder / "out", project=folder)

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


def test_a_second_drill_on_the_stack_is_refused_whatever_its_folder(folder, monkeypatch):
    target = Recording(folder)
    monkeypatch.setattr(session, "make_target", lambda options, save: target)
    first, second = (argparse.Namespace(out=folder / name, project=folder) for name in "ab")

    def drive():
        with session.open_session(first) as drill:
            try:
                with session.open_session(second):
                    raise AssertionError("two drills on one stack")
            finally:
                drill.finish(accepted())

    with pytest.raises(TargetError, match="another drill is running on the stack of"):
        drive()
    with session.open_session(second) as drill:  # the first one's end sets it free
        drill.finish(accepted())


def test_a_key_that_is_none_is_named_before_any_server_is_started(folder, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key of\nthis test")
    monkeypatch.setattr(session, "make_target", lambda options, save: pytest.fail("too late"))
    options = argparse.Namespace(out=folder / "out", project=folder)
    with (
        pytest.raises(session.WorkloadError, match="VLLM_API_KEY in the environment has a control"),
        session.open_session(options),
    ):
        pass


def test_a_bug_in_a_visit_is_a_reason_and_no_verdict(folder):
    state = session.State(folder / "state.json")
    state.values = {"phase": "candidate"}
    drill = session.Session(argparse.Namespace(), Recording(folder), state)

    def steps():
        raise LookupError("surprise")

    drill.run(steps)
    verdict = accepted()
    left = drill.finish(verdict, promote=True)
    assert verdict.outcome == "INCONCLUSIVE"
    assert left["final_mode"] == "lru"
    (reason,) = verdict.reasons
    assert "ended in phase candidate by LookupError: surprise (at test_session.py:" in reason


@pytest.mark.parametrize(
    "changes",
    [
        {"finished": "no"},
        {"phase": ["candidate"]},
        {"target": 7},
        {"finished": None},
    ],
)
def test_a_state_with_values_of_another_kind_counts_as_killed(folder, changes):
    path = folder / "state.json"
    good = {"target": "compose", "phase": "candidate", "finished": True}
    path.write_text(json.dumps(good))
    assert session.State(path).killed("compose") is None
    path.write_text(json.dumps(good | changes))
    assert session.State(path).killed("compose") == {}
    path.write_text("[" * 99999)
    assert session.State(path).killed("compose") == {}


def test_a_foreign_line_of_a_killed_promotion_is_not_written_into_env(folder):
    target = Recording(folder)
    for line in ("COMPUTECACHE_MODE=lru\nLD_PRELOAD=x", "LD_PRELOAD=x", ""):
        with pytest.raises(EnvFileError, match="does more than that"):
            target.recover({compose.ENV_LINE: line})
    assert (folder / ".env").read_text() == ENV
