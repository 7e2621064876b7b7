# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and TERM in every phase of a canary on the real engine and the real Compose.

The server is a stand-in, which starts at once; test_canary.py has signals while vLLM starts.
"""

import signal

import pytest
import stack_canary
from stack_project import wait_for

# PID 1 without a handler does not hear the TERM of `docker stop`.
STAND_IN = """\
services:
  vllm:
    entrypoint: [python3, /stand_in/stand_in.py]
    command: !override []
    stop_signal: SIGKILL
    volumes:
      - ./tests/stack/stand_in.py:/stand_in/stand_in.py:ro
      - ./tests/scripts/fake_vllm.py:/stand_in/fake_vllm.py:ro
    healthcheck: {interval: 1s}
"""
SWITCHED_S = 60
# While the service is being recreated, or while the flood runs.
STARTING, PRESSED = False, True


@pytest.fixture(scope="module")
def site(new_project, tmp_path_factory):
    project = new_project(tmp_path_factory.mktemp("signals") / "checkout")
    site = stack_canary.CanaryProject(project, tmp_path_factory.mktemp("beside"), STAND_IN)
    project.run("docker", "compose", "build", "vllm")
    yield site
    project.remove()


@pytest.mark.parametrize(
    ("phase", "pressed", "number"),
    [
        ("baseline", STARTING, signal.SIGINT),
        ("baseline", PRESSED, signal.SIGTERM),
        ("candidate", STARTING, signal.SIGTERM),
        ("candidate", PRESSED, signal.SIGINT),
        ("rollback", STARTING, signal.SIGINT),
        ("rollback", PRESSED, signal.SIGTERM),
    ],
)
def test_a_signal_in_a_visit(site, phase, pressed, number):
    with site.canary("--repetitions", "20") as canary:
        canary.wait_for_phase(phase, pressed)
        assert canary.end(number) == 2, canary.text()
    is_interrupted(site, canary, phase, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_promotion(site, number):
    with site.canary("--promote") as canary:
        canary.wait_for_phase("promotion")
        if number == signal.SIGTERM:
            wait_for("a container in active", lambda: site.asked() == "active", SWITCHED_S, 0.1)
        assert canary.end(number) == 2, canary.text()
    is_interrupted(site, canary, "promotion", number)


def is_interrupted(site, canary, phase, number):
    record = canary.record()
    assert record["outcome"] == "INCONCLUSIVE"
    assert f"interrupted by {number.name} in phase {phase}" in record["reasons"]
    assert record["final_mode"] == "lru"
    assert site.is_left_in_lru()
    assert site.asked() == "lru"
