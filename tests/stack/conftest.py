# SPDX-License-Identifier: Apache-2.0
"""The engine, the base images and the one stack that the tests of this folder share.

Without an engine the tests are skipped with the reason; where CI is set, that is a failure.
"""

import os
import sys
import uuid
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # the stack_*.py beside this file

import stack_engine
import stack_images
from stack_project import Project

BUILT = ("computecache-vllm:0.32.0", "computecache-vllm-cpu:0.32.0")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.timeout(1200))


def give_up(reason: str):
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (CI is set: these tests must run)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """environ for `docker`: an engine that answers, with Compose and no setting of the caller's."""
    private = None
    try:
        config = stack_engine.make_config(tmp_path_factory.mktemp("docker-config"))
        if stack_engine.reachable(os.environ):
            environ = stack_engine.client_environ(config, None, os.environ)
        elif reason := stack_engine.why_no_private_engine():
            raise stack_engine.NoEngine(reason)
        else:
            stack_engine.install_packages()
            private = stack_engine.PrivateEngine(stack_engine.cache_folder())
            private.start()
            environ = stack_engine.client_environ(config, private.host, os.environ)
    except stack_engine.NoEngine as error:
        give_up(str(error))
    try:
        yield environ
    finally:
        if private:
            private.stop()


@pytest.fixture(scope="session")
def images(engine):
    """The published names, given to images of the tests' own while these run."""
    given = []
    try:
        try:
            standing_in = dict(stack_images.bases(engine, stack_engine.cache_folder()))
            stack_images.give_names(standing_in, BUILT, engine, given)
        except stack_engine.NoEngine as error:
            give_up(str(error))
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
