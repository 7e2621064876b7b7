# SPDX-License-Identifier: Apache-2.0
"""The canary on a Compose stack: what happens to .env and in which order, interrupted or not.

`docker` on PATH is a stand-in (fake_docker.py) and so is the server.
"""

import os
import signal
import subprocess
import time

import pytest

from drills.compose import ComposeTarget


def test_accept_leaves_lru_and_the_very_same_env_file(stack):
    assert stack.run() == 0, stack.output
    assert stack.ups() == ["up lru", "up active", "up lru", "up lru"]
    assert stack.env_file.read_bytes() == stack.before
    assert stack.env_file.stat().st_mode & 0o777 == 0o600
    canary, release = stack.record(), stack.record("release.json")
    assert canary["outcome"] == release["outcome"] == "ACCEPT"
    assert [(p["phase"], p["mode"], p["hot_prefix"]) for p in canary["phases"]] == [
        ("baseline", "lru", "lost"),
        ("candidate", "active", "kept"),
        ("rollback", "lru", "lost"),
    ]
    assert release["final_mode"] == "lru"
    assert release["gpu"] == "Fake GPU, 1.0"
    assert release["image"] == "sha256:feed"
    assert release["rollback"]["requests_served"] > 0
    written = "".join(path.read_text() for path in (stack.folder / "out").iterdir())
    assert "secret-of-this-test" not in written + stack.output


def test_promote_leaves_active_after_accept_only(stack):
    assert stack.run("--promote") == 0, stack.output
    assert stack.ups()[-1] == "up active"
    assert b"COMPUTECACHE_MODE=active\n" in stack.env_file.read_bytes()
    assert stack.record("release.json")["final_mode"] == "active"


def test_a_failed_promotion_goes_back_to_lru(stack):
    (stack.folder / "broken_at").write_text("4")  # after lru, active, lru: the promotion
    assert stack.run("--promote") == 1, stack.output
    record = stack.record()
    assert "the promotion failed" in record["reasons"][0]
    assert record["final_mode"] == "lru"
    assert stack.ups()[-2:] == ["up active", "up lru"]
    assert stack.env_file.read_bytes() == stack.before


def test_promote_after_reject_leaves_lru(stack):
    stack.fake_options("--fail-at 40", "active")
    assert stack.run("--promote") == 1, stack.output
    assert stack.ups()[-1] == "up lru"
    assert stack.env_file.read_bytes() == stack.before
    assert "HTTP 500" in stack.record()["reasons"][0]


def test_a_candidate_whose_server_dies_is_rejected_and_rolled_back(stack):
    stack.fake_options("--die-at 40", "active")
    assert stack.run() == 1, stack.output
    assert stack.ups()[-1] == "up lru"
    canary = stack.record()
    assert [p["phase"] for p in canary["phases"]] == ["baseline", "candidate", "rollback"]
    assert canary["phases"][1]["requests_failed"] > 0
    assert canary["phases"][2]["mode"] == "lru"
    assert canary["phases"][2]["requests_served"] > 0


def test_other_texts_in_the_candidate_are_rejected(stack):
    stack.fake_options("--text-suffix x", "active")
    assert stack.run() == 1, stack.output
    assert "outputs at temperature 0" in stack.record()["reasons"][0]


def test_abba_restarts_the_server_for_every_visit(stack):
    assert stack.run("--repeats", "2") == 0, stack.output
    assert stack.ups() == ["up lru", "up active", "up active", "up lru", "up lru"]
    assert stack.record()["statistics"]["kept_tokens"]["pairs"] == 12


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
    stack.fake_options("--api-key secret-of-this-test --delay-s 0.02")
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


def test_after_kill_9_the_next_canary_cleans_up_first(stack):
    stack.fake_options("--api-key secret-of-this-test --delay-s 0.02")
    process = stack.start()
    stack.wait_for_phase(process, "candidate")
    while stack.server_mode() != "active":  # a killed `up` would go on beside the next canary's
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    assert b"=active" in stack.env_file.read_bytes()
    killed_at = len(stack.ups())
    stack.fake_options("--api-key secret-of-this-test")
    assert stack.run() == 0, stack.output
    assert "the last drill was killed in phase candidate" in stack.output
    assert stack.ups()[killed_at:] == ["up lru"] * 2 + ["up active"] + ["up lru"] * 2
    assert stack.env_file.read_bytes() == stack.before


def test_an_env_file_without_a_mode_gets_its_bytes_back(stack):
    stack.before = stack.before.replace(b"COMPUTECACHE_MODE=lru\n", b"")
    stack.env_file.write_bytes(stack.before)
    assert stack.run() == 0, stack.output
    assert stack.env_file.read_bytes() == stack.before


def test_a_stack_found_in_active_is_left_in_lru(stack):
    stack.env_file.write_bytes(stack.before.replace(b"=lru", b"=active"))
    assert stack.run() == 0, stack.output
    assert stack.env_file.read_bytes() == stack.before


def test_an_exported_mode_does_not_reach_compose(stack):
    assert stack.run(COMPUTECACHE_MODE="lru") == 0, stack.output
    assert "COMPUTECACHE_MODE is exported" in stack.output


def test_lru_that_cannot_be_restored_is_said_and_tried_again(stack):
    process = stack.start()
    stack.wait_for_phase(process, "rollback")
    (stack.folder / "broken").touch()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert stack.record()["final_mode"] == "unknown"
    assert "NOT RESTORED" in stack.record("release.json")["left"]
    assert stack.env_file.read_bytes() == stack.before
    (stack.folder / "broken").unlink()
    assert stack.run() == 0, stack.output
    assert "cleaning up after it" in stack.output


def test_two_canaries_at_once_are_refused(stack):
    process = stack.start()
    stack.wait_for_phase(process, "baseline")
    assert stack.run() == 2
    assert "another drill is running" in stack.output
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_without_an_env_file_nothing_is_touched(stack):
    stack.env_file.unlink()
    assert stack.run() == 2
    assert "copy .env.example" in stack.output
    assert not (stack.folder / "docker.log").exists()


def test_a_signal_while_docker_starts_ends_docker_too(stack, monkeypatch):
    started = []

    class Interrupting(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)  # before anybody knows of the process

    monkeypatch.setenv("PATH", f"{stack.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    target = ComposeTarget(stack.folder, lambda **values: None, ready_timeout_s=10)
    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        target.leave_in_lru()
    assert [process.returncode for process in started] == [-signal.SIGKILL]
