# SPDX-License-Identifier: Apache-2.0
"""The canary on a Compose stack, ended early: signals, kill -9, a lost engine, what is left of it.

`docker` on PATH is a stand-in (fake_docker.py) and so is the server.
"""

import os
import signal
import subprocess
import threading
import time

import pytest

from drills.compose import ComposeTarget
from drills.targets import TargetError

KEY = "--api-key secret-of-this-test"


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("baseline", signal.SIGINT),
        ("candidate", signal.SIGINT),
        ("rollback", signal.SIGINT),
        ("candidate", signal.SIGTERM),
        ("candidate", signal.SIGHUP),
    ],
)
def test_interrupted_in_any_phase_lru_is_restored_and_the_record_says_so(stack, phase, number):
    stack.fake_options(f"{KEY} --delay-s 0.02")
    process = stack.start()
    stack.wait_for_phase(process, phase)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert stack.ups()[-1] == "up lru"
    assert stack.env_file.read_bytes() == stack.before
    canary = stack.record()
    assert canary["outcome"] == "INCONCLUSIVE"
    assert f"interrupted by {number.name} in phase {phase}" in " ".join(canary["reasons"])
    assert phase not in [p["phase"] for p in canary["phases"]]
    assert canary["final_mode"] == "lru"
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_the_promotion_it_is_taken_back(stack, number):
    stack.fake_options(KEY)
    process = stack.start("--promote")
    stack.wait_for_phase(process, "promotion")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert stack.ups()[-1] == "up lru"
    assert stack.env_file.read_bytes() == stack.before
    canary = stack.record()
    assert canary["outcome"] == "INCONCLUSIVE"
    assert canary["reasons"] == [f"interrupted by {number.name} in phase promotion"]
    assert canary["final_mode"] == "lru"


def test_after_kill_9_the_next_canary_cleans_up_first(stack):
    kill_9(stack, "candidate", "active")
    assert stack.env_file.read_bytes() == stack.before, "any `up` goes back by itself"
    killed_at = len(stack.ups())
    stack.fake_options(KEY)
    assert stack.run() == 0, stack.output
    assert "the last drill was killed in phase candidate" in stack.output
    assert stack.ups()[killed_at:] == ["up lru"] * 2 + ["up active"] + ["up lru"] * 2
    assert stack.env_file.read_bytes() == stack.before


@pytest.mark.parametrize("written", [False, True], ids=["before .env", "after .env"])
def test_after_kill_9_in_the_promotion_the_next_canary_takes_it_back(stack, written):
    kill_9(stack, "promotion", "active", "--promote")
    if written:  # the moment between the writing of .env and the state's
        stack.env_file.write_bytes(stack.before.replace(b"=lru", b"=active"))
    killed_at = len(stack.ups())
    stack.fake_options(KEY)
    assert stack.run() == 0, stack.output
    assert "the last drill was killed in phase promotion" in stack.output
    assert stack.ups()[killed_at:] == ["up lru"] * 2 + ["up active"] + ["up lru"] * 2
    assert stack.env_file.read_bytes() == stack.before


def kill_9(stack, phase, mode, *arguments):
    """Kill a canary in a phase, once the server of that phase has been started."""
    stack.fake_options(f"{KEY} --delay-s 0.02")
    process = stack.start(*arguments)
    stack.wait_for_phase(process, phase)
    while stack.server_mode() != mode:  # a killed `up` would go on beside the next canary's
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)


STATES = {
    "empty": b"",
    "torn": b'{"target": "compose", "pha',
    "no text": b"\xff\xfe\x00",
    "another program's": b'{"phase": "new moon"}',
    "a list": b"[1, 2]",
}


@pytest.mark.parametrize("content", STATES.values(), ids=STATES)
def test_a_state_that_says_nothing_counts_as_a_drill_that_was_killed(stack, content):
    stack.out.mkdir()
    (stack.out / "canary-state.json").write_bytes(content)
    stack.fake_options("--blocks 4096", "lru")  # nothing to protect: the shortest drill
    assert stack.run() == 2, stack.output
    assert "canary-state.json is no record of a drill" in stack.output
    assert "killed in phase unknown: cleaning up" in stack.output
    assert "Traceback" not in stack.output
    assert stack.ups() == ["up lru"] * 3
    assert stack.env_file.read_bytes() == stack.before


def test_lru_that_cannot_be_restored_is_said_and_tried_again(stack):
    stack.fake_options(f"{KEY} --delay-s 0.005")
    process = stack.start()
    stack.wait_for_phase(process, "rollback")
    while stack.server_mode() != "lru" or len(stack.ups()) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    (stack.folder / "broken").touch()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert stack.record()["final_mode"] == "unknown"
    assert "NOT RESTORED" in stack.record("release.json")["left"]
    assert "promote" not in {check["name"] for check in stack.record()["checks"]}
    assert stack.ups() == ["up lru", "up active", "up lru", "up lru"]
    assert stack.env_file.read_bytes() == stack.before
    (stack.folder / "broken").unlink()
    assert stack.run() == 0, stack.output
    assert "cleaning up after it" in stack.output


def test_an_engine_that_is_restarted_in_the_candidate_is_waited_for(stack):
    stack.fake_options(f"{KEY} --delay-s 0.02", "active")
    process = stack.start()
    stack.wait_for_phase(process, "candidate")
    while len((stack.folder / "visits").read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    (stack.folder / "engine_down").write_text("6")
    os.kill(int((stack.folder / "server.pid").read_text()), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "the Docker engine does not answer: waiting" in errors
    assert not (stack.folder / "engine_down").exists()
    assert stack.ups() == ["up lru", "up active", "up lru", "up lru"]
    assert [phase["mode"] for phase in stack.record()["phases"]][::2] == ["lru", "lru"]
    assert stack.record()["final_mode"] == "lru"


def test_a_container_that_was_being_replaced_when_up_was_ended_is_removed_first(stack):
    process = stack.start()
    stack.wait_for_phase(process, "baseline")
    (stack.folder / "conflict").touch()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert not (stack.folder / "conflict").exists()
    assert stack.ups()[-2:] == ["up lru", "up lru"]
    assert stack.record()["final_mode"] == "lru"


def test_an_engine_that_stays_away_is_named_with_what_to_do(stack, monkeypatch):
    monkeypatch.setenv("PATH", f"{stack.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("drills.compose.ENGINE_S", 0)
    (stack.folder / "engine_down").write_text("99")
    target = ComposeTarget(stack.folder, lambda **values: None, ready_timeout_s=10)
    with pytest.raises(TargetError, match=r"Cannot connect.* start the Docker engine"):
        target.leave_in_lru()


def test_a_signal_while_docker_starts_ends_docker_too(stack, monkeypatch):
    started = []
    (stack.folder / "bin" / "docker").write_text("#!/bin/sh\nexec sleep 600\n")  # ends by a kill

    class Interrupting(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            # Before anybody knows of the process; to this thread, which holds signals back.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    monkeypatch.setenv("PATH", f"{stack.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    target = ComposeTarget(stack.folder, lambda **values: None, ready_timeout_s=10)
    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    # Tests that were started in the background have inherited that Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            target.leave_in_lru()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
