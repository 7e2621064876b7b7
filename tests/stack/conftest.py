# SPDX-License-Identifier: Apache-2.0
"""The engine, the base images and the one stack that the tests of this folder share.

Without an engine the tests are skipped with the reason; where CI is set, that is a failure.
"""

import contextlib
import json
import os
import shlex
import sys
import uuid
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # the stack_*.py beside this file

import stack_engine
import stack_images
from stack_project import Project, make_closed

BUILT = ("computecache-vllm:0.32.0", "computecache-vllm-cpu:0.32.0")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def give_up():
    """give_up(reason): skip, or fail in CI."""
    return skip_or_fail


def skip_or_fail(reason: str):
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (CI is set: these tests must run)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """environ for `docker`."""
    with contextlib.ExitStack() as until_the_end:
        try:
            config = tmp_path_factory.mktemp("docker-config")
            environ = until_the_end.enter_context(stack_engine.for_tests(config))
        except stack_engine.NoEngine as error:
            skip_or_fail(str(error))
        yield environ


@pytest.fixture(scope="session")
def images(engine):
    """The published names, given to images of the tests' own while these run."""
    given = []
    stack_images.take_names(given, engine)  # what a run that was killed has left
    try:
        try:
            standing_in = dict(stack_images.bases(engine, stack_engine.cache_folder()))
            stack_images.give_names(standing_in, BUILT, engine, given)
        except stack_engine.NoEngine as error:
            skip_or_fail(str(error))
        yield standing_in
    finally:
        stack_images.take_names(given, engine)


@pytest.fixture(scope="session")
def new_project(engine, images):
    """new_project(folder, environ=None): a Project that is removed at the end, failed or not."""
    made = []

    def make(folder: Path, environ: dict[str, str] | None = None) -> Project:
        made.append(Project(folder, environ or engine, f"cctest-{uuid.uuid4().hex[:8]}"))
        return made[-1]

    yield make
    for project in made:
        project.remove()


DEAD = "127.0.0.1:9"  # nothing listens on the discard port
PROXIES = {
    "HTTP_PROXY": f"http://{DEAD}",
    "HTTPS_PROXY": f"http://{DEAD}",
    "ALL_PROXY": f"socks5://{DEAD}",
    "NO_PROXY": "fd00::/8,example.org",
}


@pytest.fixture(scope="session")
def behind_proxies(engine, tmp_path_factory):
    """environ for `docker` where the host and every container have proxies that lead nowhere."""
    config = stack_engine.make_config(tmp_path_factory.mktemp("docker-config-proxies"))
    names = {"httpProxy": "HTTP_PROXY", "httpsProxy": "HTTPS_PROXY", "allProxy": "ALL_PROXY"}
    names["noProxy"] = "NO_PROXY"
    proxies = {key: PROXIES[name] for key, name in names.items()}
    (config / "config.json").write_text(json.dumps({"proxies": {"default": proxies}}))
    lower = {name.lower(): value for name, value in PROXIES.items()}
    return engine | PROXIES | lower | {"DOCKER_CONFIG": str(config)}


@pytest.fixture(scope="session")
def stack(new_project, behind_proxies, tmp_path_factory):
    """The stack of compose.cpu.yaml, healthy. Starting vLLM takes a minute: one for all tests."""
    folder = tmp_path_factory.mktemp("Prüfstand mit Leerzeichen") / "Compute Cache"
    project = new_project(folder, behind_proxies)
    # A pool that a test can flood, and the longest request that check_env lets it have.
    project.settings |= {"NUM_GPU_BLOCKS": "64", "BLOCK_SIZE": "32", "MAX_MODEL_LEN": "2016"}
    project.settings |= {"KV_CACHE_METRICS_SAMPLE": "1.0", "COMPUTECACHE_MODE": "active"}
    project.write_env()
    make_closed(folder)
    project.closed_faults = project.check_env()[1]
    for fault in project.closed_faults:
        project.run(*shlex.split(fault.partition("`")[2].partition("`")[0]))
    project.up()
    return project
