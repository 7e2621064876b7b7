# SPDX-License-Identifier: Apache-2.0
"""The private engine ends with the tests: after a failure, after Ctrl-C, and when they are killed.

Each case is a pytest of its own with an engine in a network and a folder of its own, so that it
disturbs no other engine.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import stack_engine
from stack_project import wait_for

HERE = Path(__file__).parent
REPO = HERE.parents[1]
LABELS = "test_the_labels_say_what_it_is_and_the_rest_is_as_in_the_base"
SECONDS = f"77{os.getpid()}"  # names the process of the container
INNER = """
import subprocess, time
from pathlib import Path
import pytest, stack_engine

@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    with stack_engine.for_tests(tmp_path_factory.mktemp("config")) as environ:
        yield environ

def test_that_fails(engine):
    subprocess.run(["docker", "info"], env=engine, check=True, capture_output=True)
    assert False

def test_that_takes_long(engine):
    Path("ready").touch()
    time.sleep(600)

def test_with_a_container(engine):
    image = "tar -C / -c bin/busybox | docker import - busybox"
    run = "docker run -d --network none busybox /bin/busybox sleep SECONDS"
    subprocess.run(f"{image} && {run}", shell=True, env=engine, check=True)
    Path("ready").touch()
    time.sleep(600)
"""


@pytest.fixture
def folder(give_up):
    """A short one: a socket lies in it."""
    if reason := stack_engine.why_not_here():
        give_up(reason)
    stack_engine.need(*stack_engine.PACKAGES)
    with tempfile.TemporaryDirectory(prefix="cc-") as made:
        yield Path(made)


@pytest.fixture
def inner(folder):
    """inner(test): start a pytest of one test of INNER, and return its process."""
    (folder / "test_inner.py").write_text(INNER.replace("SECONDS", SECONDS))
    started = []

    def start(test: str) -> subprocess.Popen:
        environ = os.environ | {
            "XDG_CACHE_HOME": str(folder),
            "DOCKER_HOST": f"unix://{folder}/nobody.sock",
            "PYTHONPATH": str(HERE),
            stack_engine.ASK: "1",
        }
        pytest_run = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
        started.append(
            subprocess.Popen(
                ["unshare", "--net", *pytest_run, f"test_inner.py::{test}"],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                # Tests that were started in the background have inherited that Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    stack_engine.PrivateEngine(folder / "computecache-test-engine").end_what_was_left()


def engines(folder: Path) -> list[int]:
    return stack_engine.processes_naming(folder / "computecache-test-engine")


def test_it_ends_after_a_failed_test(inner, folder):
    output = inner("test_that_fails").communicate(timeout=120)[0]
    assert "assert False" in output
    assert "1 failed" in output
    assert engines(folder) == []


def containers() -> list[bytes]:
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [line for line in lines if line.split(b"\0")[1:3] == [b"sleep", SECONDS.encode()]]


def test_what_a_killed_engine_left_is_ended_by_the_next(inner, folder):
    process = inner("test_with_a_container")
    wait_for("the container is up", (folder / "ready").exists, 120)
    assert len(containers()) == 1
    os.kill(int((folder / "computecache-test-engine/docker.pid").read_text()), signal.SIGKILL)
    process.kill()
    process.communicate(timeout=120)
    assert engines(folder), "the container's keeper outlives a killed dockerd"
    assert "1 failed" in inner("test_that_fails").communicate(timeout=120)[0]
    assert (engines(folder), containers()) == ([], [])
    assert stack_engine.mounted_in(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_tests_that_are_stopped(inner, folder, number):
    process = inner("test_with_a_container")
    wait_for("the container is up", (folder / "ready").exists, 120)
    assert (len(containers()), len(engines(folder)) >= 3) == (1, True)
    process.send_signal(number)
    process.communicate(timeout=120)
    wait_for("all is gone", lambda: (engines(folder), containers()) == ([], []), 60)


def test_two_runs_do_not_share_one_engine(inner, folder):
    inner("test_that_takes_long")
    wait_for("the engine is up", (folder / "ready").exists, 120)
    assert "other tests use the engine in" in inner("test_that_fails").communicate(timeout=120)[0]


@pytest.mark.parametrize(
    ("environ", "outcome"),
    [
        ({"CI": ""}, "SKIPPED [1] tests/stack/test_image.py"),
        ({"CI": "1", "XDG_CACHE_HOME": "/tmp/" + "long" * 20}, "ERROR tests/stack/test_image.py"),
    ],
    ids=["on a desk", "in CI"],
)
def test_without_an_engine_the_tests_say_why_and_in_ci_they_fail(tmp_path, environ, outcome):
    environ = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/nobody.sock"} | environ
    environ.pop(stack_engine.ASK, None)
    test = f"{HERE.relative_to(REPO)}/test_image.py::{LABELS}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        cwd=REPO,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if environ["CI"] else 0), done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(outcome)]
    assert ("too long for a socket" if environ["CI"] else "no Docker engine answers, and") in line
