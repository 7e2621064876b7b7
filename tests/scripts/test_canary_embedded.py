# SPDX-License-Identifier: Apache-2.0
"""The canary end to end on the real, patched vLLM server of this machine's CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servers.embedded import EmbeddedServer
from servers.processes import group_members
from servers.tiny_model import make_model

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.server


class Canary:
    """A canary as a process; its stderr is read line by line, so that a test can act in a phase."""

    def __init__(self, out, *arguments):
        self.out = out
        self.lines = []
        command = [sys.executable, "-u", str(REPO / "scripts" / "canary.py"), "run"]
        self.process = subprocess.Popen(
            [*command, "--target", "embedded", "--out", str(out), *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_until(self, pattern):
        for line in self.process.stderr:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no {pattern!r} in:\n{''.join(self.lines)}")

    def server_group(self):
        """Return the process group of the server of this visit, once it was started."""
        while (group := self.record("canary-state.json").get("server_group")) is None:
            assert self.process.poll() is None
            time.sleep(0.01)
        return group

    def finish(self):
        self.lines += self.process.stderr.readlines()
        code = self.process.wait(timeout=60)
        self.text = "".join(self.lines)
        assert "Traceback" not in self.text
        return code

    def record(self, name="canary.json"):
        return json.loads((self.out / name).read_text())


def test_the_readme_command_ends_with_accept(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/canary.sh", "--out", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "ACCEPT"
    assert json.loads(done.stdout)["outcome"] == "ACCEPT"
    canary = json.loads((tmp_path / "canary.json").read_text())
    lru, active, rollback = canary["phases"]
    assert (lru["mode"], lru["hot_prefix"]) == ("lru", "lost")
    assert lru["post_flood_cached_tokens"] == 0
    assert (active["mode"], active["hot_prefix"]) == ("active", "kept")
    assert active["post_flood_cached_tokens"] == active["warm_prefix_cached_tokens"] == 608
    assert rollback["mode"] == "lru"
    assert rollback["requests_served"] > 0
    assert rollback["requests_failed"] == 0
    assert canary["server_starts"] == 3
    assert canary["one_installation"] is True
    assert canary["final_mode"] == "lru"
    assert canary["versions"]["vllm"] == "0.32.0"
    assert canary["statistics"]["outputs"]["different"] == 0
    policies = [visit["report"]["policy"]["counters"] for visit in canary["visits"]]
    assert [policy["reordered_decisions"] > 0 for policy in policies] == [False, True, False]
    assert [policy["fallbacks"] for policy in policies] == [0, 0, 0]


def test_a_pool_too_large_for_pressure_is_inconclusive_and_never_turns_active_on(tmp_path):
    canary = Canary(tmp_path, "--blocks", 1024)
    assert canary.finish() == 2
    record = canary.record()
    assert record["outcome"] == "INCONCLUSIVE"
    assert "lru kept all 608 tokens" in record["reasons"][0]
    assert [phase["mode"] for phase in record["phases"]] == ["lru"]


def test_a_candidate_in_lru_is_rejected(tmp_path):
    canary = Canary(tmp_path, "--candidate-mode", "lru")
    assert canary.finish() == 1
    record = canary.record()
    assert record["outcome"] == "REJECT"
    assert any("no more than lru" in reason for reason in record["reasons"])
    assert record["statistics"]["kept_tokens"]["candidate_mean"] == 0


def test_kill_9_of_the_candidates_server_is_rejected_and_lru_serves_again(tmp_path):
    canary = Canary(tmp_path)
    canary.read_until(r"\[2/3\] candidate")
    canary.read_until("hot replay")
    group = canary.server_group()
    os.killpg(group, signal.SIGKILL)
    assert canary.finish() == 1
    assert group_members(group) == []
    record = canary.record()
    assert "the server ended by itself with -9" in record["reasons"][0]
    assert [phase["phase"] for phase in record["phases"]] == ["baseline", "candidate", "rollback"]
    assert record["phases"][1]["requests_failed"] > 0
    assert record["phases"][2]["mode"] == "lru"
    assert record["phases"][2]["requests_failed"] == 0
    assert canary.record("release.json")["outcome"] == "REJECT"
    assert record["final_mode"] == "lru"


@pytest.mark.parametrize("phase", ["baseline", "candidate"])
def test_ctrl_c_ends_the_server_and_says_where(tmp_path, phase):
    canary = Canary(tmp_path)
    canary.read_until(phase)
    if phase == "candidate":
        canary.read_until("hot replay")  # in the middle; the baseline's server is still starting
    group = canary.server_group()
    canary.process.send_signal(signal.SIGINT)
    assert canary.finish() == 2
    assert group_members(group) == []
    record = canary.record()
    assert record["outcome"] == "INCONCLUSIVE"
    assert f"interrupted by SIGINT in phase {phase}" in " ".join(record["reasons"])
    assert record["final_mode"] == "lru"


def test_kill_9_of_the_canary_itself_takes_its_server_along(tmp_path):
    canary = Canary(tmp_path)
    canary.read_until("ready")
    group = canary.server_group()
    canary.process.kill()
    canary.process.wait(timeout=60)
    again = Canary(tmp_path, "--blocks", 1024)
    again.read_until("the last drill was killed in phase baseline")
    again.read_until(r"\[1/3\] baseline")
    assert group_members(group) == []
    again.process.send_signal(signal.SIGTERM)
    assert again.finish() == 2


def test_two_running_servers_are_compared_in_turn(tmp_path):
    model = make_model(REPO / "out" / "model")
    lru, active = (
        EmbeddedServer(model, mode, tmp_path / f"{mode}.log") for mode in ("lru", "active")
    )
    try:
        lru.start()
        active.start()
        lru.wait_until_ready()
        active.wait_until_ready()
        done = subprocess.run(
            [
                *(sys.executable, str(REPO / "scripts" / "canary.py"), "run", "--target", "url"),
                *("--baseline-url", lru.base_url, "--candidate-url", active.base_url),
                *("--baseline-policy-url", lru.policy_metrics_url),
                *("--candidate-policy-url", active.policy_metrics_url),
                # One machine serves both and sends, so TTFT is held to what embedded is held to.
                *("--repeats", "2", "--ttft-regression", "100%", "--out", str(tmp_path)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        lru.stop()
        active.stop()
    assert done.returncode == 0, done.stderr
    canary = json.loads((tmp_path / "canary.json").read_text())
    assert [(phase["mode"], phase["hot_prefix"]) for phase in canary["phases"]] == [
        ("lru", "lost"),
        ("active", "kept"),
        ("active", "kept"),
        ("lru", "lost"),
    ]
    assert canary["statistics"]["kept_tokens"]["pairs"] == 12
    assert canary["statistics"]["outputs"]["different"] == 0
