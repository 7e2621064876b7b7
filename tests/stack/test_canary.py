# SPDX-License-Identifier: Apache-2.0
"""The canary on a real stack: verdicts, kills, signals, and an engine that goes away meanwhile.

The plain ACCEPT is test_guide.py's. A start of vLLM takes most of a minute, so each test leaves
what the next begins with: they run in this order, on one project.
"""

import signal

import pytest
import stack_canary
from stack_project import wait_for

MANY = ("--repetitions", "40")  # so that a visit is under way when something is killed
ENDED_S = 120


@pytest.fixture(scope="module")
def site(new_project, tmp_path_factory):
    project = new_project(tmp_path_factory.mktemp("canary") / "checkout")
    site = stack_canary.CanaryProject(project, tmp_path_factory.mktemp("elsewhere"))
    project.run("docker", "compose", "build", "vllm")
    yield site
    project.remove()  # test_guide.py removes the image


def checks(record):
    return {check["name"]: check["status"] for check in record["checks"]}


def test_kill_9_in_the_baseline(site):
    with site.canary() as canary:
        canary.wait_for_phase("baseline")
        canary.kill_9()
    assert site.project.env_file.read_bytes() == site.env


def test_a_server_killed_in_the_baseline_is_inconclusive_and_lru_was_restored_first(site):
    with site.canary(*MANY) as canary:
        canary.wait_for_phase("baseline", pressed=True)
        site.docker("kill", site.container())
        assert canary.end() == 2, canary.text()
    assert "killed in phase baseline: cleaning up" in canary.text()
    record = canary.record()
    assert record["outcome"] == "INCONCLUSIVE"
    assert checks(record) | {"requests": "unknown", "candidate": "unknown"} == checks(record)
    assert [phase["phase"] for phase in record["phases"]] == ["baseline"]
    assert site.is_left_in_lru()


def test_kill_9_in_the_candidate_leaves_env_in_lru_so_that_any_up_goes_back(site):
    with site.canary(*MANY) as canary:
        canary.wait_for_phase("candidate", pressed=True)
        canary.kill_9()
    assert site.mode() == "active"
    assert site.project.env_file.read_bytes() == site.env
    site.project.run("docker", "compose", "up", "-d", "vllm")
    assert site.asked() == "lru"


def test_a_server_killed_in_the_candidate_is_rejected_and_lru_was_restored_first(site):
    with site.canary(*MANY) as canary:
        canary.wait_for_phase("candidate", pressed=True)
        site.docker("kill", site.container())
        assert canary.end() == 1, canary.text()
    assert "killed in phase candidate: cleaning up" in canary.text()
    record = canary.record()
    assert checks(record) | {"requests": "fail", "rollback": "pass"} == checks(record)
    assert [phase["mode"] for phase in record["phases"]] == ["lru", "active", "lru"]
    assert site.is_left_in_lru()


def test_the_engine_restarted_in_the_candidate(site):
    with site.canary(*MANY) as canary:
        canary.wait_for_phase("candidate", pressed=True)
        site.restart_engine()
        assert canary.end() == 1, canary.text()
    assert checks(canary.record())["requests"] == "fail", canary.text()
    assert canary.record()["final_mode"] == "lru"
    assert site.is_left_in_lru()


def test_sigterm_while_the_baseline_starts(site):
    with site.canary() as canary:
        canary.wait_for_phase("baseline")
        assert canary.end(signal.SIGTERM) == 2, canary.text()
    assert "interrupted by SIGTERM in phase baseline" in canary.record()["reasons"]
    assert site.is_left_in_lru()


def test_ctrl_c_while_the_candidate_starts(site):
    with site.canary() as canary:
        canary.wait_for_phase("candidate")
        wait_for("a container in active", lambda: site.asked() == "active", ENDED_S, 0.2)
        assert canary.end(signal.SIGINT) == 2, canary.text()
    assert "interrupted by SIGINT in phase candidate" in canary.record()["reasons"]
    assert site.is_left_in_lru()


def test_kill_9_in_the_promotion(site):
    with site.canary("--promote") as canary:
        canary.wait_for_phase("promotion")
        wait_for("a container in active", lambda: site.asked() == "active", ENDED_S, 0.2)
        canary.kill_9()
    assert site.project.env_file.read_bytes() == site.env


def test_promote_leaves_active_and_says_so_in_env_after_lru_was_restored_first(site):
    with site.canary("--promote") as canary:
        assert canary.end() == 0, canary.text()
    assert "killed in phase promotion: cleaning up" in canary.text()
    assert canary.record()["final_mode"] == "active"
    active = site.env.replace(b"COMPUTECACHE_MODE=lru", b"COMPUTECACHE_MODE=active")
    assert site.project.env_file.read_bytes() == active != site.env
    assert site.mode() == "active"


def test_a_promoted_stack_is_not_touched_by_a_canary_until_env_says_lru(site):
    before = site.container()
    with site.canary() as canary:
        assert canary.end() == 2
    assert "COMPUTECACHE_MODE=active in" in canary.text()
    assert "Write COMPUTECACHE_MODE=lru" in canary.text()
    assert site.container() == before
    site.project.env_file.write_bytes(site.env)
