# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile and .dockerignore, as far as this can be told without a Docker engine."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths

import install_computecache as installer

REPO = Path(__file__).parents[2]
DOCKERFILE = REPO / "docker/Dockerfile"
DOCKERFILE_CPU = REPO / "docker/Dockerfile.cpu"


def instructions(dockerfile: Path = DOCKERFILE) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^#.*\n", "", dockerfile.read_text()).replace("\\\n", "")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def copies(dockerfile: Path = DOCKERFILE) -> list[tuple[str, str]]:
    pairs = []
    for name, rest in instructions(dockerfile):
        if name == "COPY":
            *sources, target = rest.split()
            pairs += [(source, target) for source in sources]
    return pairs


def context(folder: Path) -> set[str]:
    """Files that would be sent to the engine, by the patterns of .dockerignore."""
    lines = (REPO / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    paths = exclude_paths(str(folder), patterns, dockerfile="docker/Dockerfile")
    return {path for path in paths if (folder / path).is_file()}


def test_base_image_is_the_release_the_installer_accepts():
    base = "vllm/vllm-openai:v${VLLM_VERSION}"
    first = [("ARG", f"VLLM_VERSION={installer.VERSION}"), ("FROM", base)]
    assert instructions()[:2] == first
    labels = dict(rest.split("=", 1) for rest in shlex.split(dict(instructions())["LABEL"]))
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.version"] == "${VLLM_VERSION}"
    assert labels["org.opencontainers.image.revision"] == "${SOURCE_REVISION}"


def test_the_image_for_cpus_has_the_pins_of_pyproject_and_the_same_installation():
    groups = tomllib.loads((REPO / "pyproject.toml").read_text())["dependency-groups"]
    mine = instructions(DOCKERFILE_CPU)
    pins = [re.match(r"python3 -m pip install (.*?) +&&", rest) for _, rest in mine]
    assert [pin[1].split() for pin in pins if pin] == [groups["serve"]]
    assert [
        step for step in instructions() if step[0] in {"COPY", "RUN"} and step not in mine
    ] == []


def test_context_holds_what_is_copied_and_nothing_else(tmp_path):
    wanted = set()
    for source, _ in copies() + copies(DOCKERFILE_CPU):
        path = REPO / source
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        assert files, source
        wanted |= {str(file.relative_to(REPO)) for file in files}
    private = [".env", ".venv/bin/python", "out/canary.json", ".git/config", "scripts/.env"]
    other = ["README.md", "vllm/v1/core/__pycache__/computecache_policy.cpython-311.pyc"]
    for name in [*wanted, *private, *other, "docker/Dockerfile", ".dockerignore"]:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    # The client always adds these two.
    assert context(tmp_path) - {"docker/Dockerfile", ".dockerignore"} == wanted


@pytest.fixture
def image(tmp_path):
    """The files that COPY puts into the image, laid out under a folder instead of /."""
    for source, target in copies():
        path, to = REPO / source, tmp_path / target.lstrip("/")
        to.mkdir(parents=True, exist_ok=True)
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            shutil.copy(file, to)
    return tmp_path


@pytest.fixture
def site(tmp_path) -> Path:
    """A site-packages folder with the released file of vLLM, as the base image has it."""
    site = tmp_path / "site"
    core = site / installer.CORE
    (core / "sched").mkdir(parents=True)
    (site / "vllm/__init__.py").touch()
    package = Path(importlib.util.find_spec("vllm").origin).parent.parent
    for path, hooks in installer.EDITS.items():
        (site / path).write_bytes(installer.undo((package / path).read_bytes(), hooks))
    metadata = site / f"vllm-{installer.VERSION}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installer.VERSION}\n")
    return site


def run_steps(image: Path, site: Path) -> subprocess.CompletedProcess:
    """The RUN instruction, with a Python that would import vllm from `site`."""
    command = dict(instructions())["RUN"].replace("/opt/", f"{image}/opt/")
    python = image / "bin/python3"
    python.parent.mkdir(exist_ok=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return subprocess.run(
        ["sh", "-c", command],
        cwd=image,
        env={"PATH": f"{python.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_build_step_patches_and_checks_a_vllm_like_the_images(image, site):
    result = run_steps(image, site)
    assert result.returncode == 0, result.stdout + result.stderr
    core = site / "vllm/v1/core"
    assert (core / "computecache_metrics.py").is_file()
    assert "self.computecache = ComputeCachePolicy" in (core / "block_pool.py").read_text()


def test_build_fails_when_a_hook_does_not_apply(image, site):
    pool = site / "vllm/v1/core/block_pool.py"
    pool.write_text(pool.read_text().replace("popleft_n(num_blocks)", "popleft_n(n)"))
    before = pool.read_bytes()
    result = run_steps(image, site)
    assert result.returncode == 1
    assert pool.read_bytes() == before
