# SPDX-License-Identifier: Apache-2.0
"""The policy on newer vLLM releases' own v1/core, laid over the installed release.

There is no build for CPUs of these releases, so their server is not started here: what runs are
their BlockPool, free queue, cache manager and scheduler modules, from the published wheel.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from remotezip import RemoteZip

import install_computecache as installer

pytestmark = pytest.mark.server  # takes as long as one

REPO = Path(__file__).parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "computecache-vllm"
NEWER = [version for version in installer.RELEASES if version != installer.VERSION]
# What BlockPool's KV events are made of changed with it.
TAKEN = ("vllm/v1/core/", "vllm/distributed/kv_events.py")
SUITES = ("tests/v1/core/test_computecache_block_pool.py", "tests/tools/test_replay_trace.py")


def wheel_of(version: str, folder: Path) -> str:
    """Where pip would take the release's wheel from; the wheel itself is not downloaded."""
    report = folder / "report.json"
    ask = ["--dry-run", "--no-deps", "--ignore-installed", "--report", report, f"vllm=={version}"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *ask], check=True)
    return json.loads(report.read_text())["install"][0]["download_info"]["url"]


def released_files(version: str, scratch: Path) -> Path:
    """A folder with the release's files that are laid over, kept for later runs."""
    folder = CACHE / version
    if not folder.is_dir():
        with RemoteZip(wheel_of(version, scratch)) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(TAKEN)]
            wheel.extractall(scratch / "files", names)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(scratch / "files", folder)
    for path, digest in installer.RELEASES[version].items():
        assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == digest
    return folder


@pytest.fixture(scope="module", params=NEWER)
def site(request, tmp_path_factory) -> Path:
    """The installed vllm package as links, with the newer release's files in their place."""
    root = tmp_path_factory.mktemp("site")
    files = released_files(request.param, tmp_path_factory.mktemp("wheel"))
    installed = Path(importlib.util.find_spec("vllm").origin).parent
    shutil.copytree(installed, root / "vllm", copy_function=os.symlink)
    shutil.rmtree(root / installer.CORE)
    shutil.copytree(files, root, dirs_exist_ok=True, copy_function=replace)
    assert installer.main(["--root", str(root)]) == 0
    return root


def replace(source: str, path: str) -> None:
    Path(path).unlink(missing_ok=True)
    shutil.copy(source, path)


@pytest.mark.parametrize("suite", SUITES)
def test_the_suites_of_the_real_pool_pass(site, suite):
    """The random machines are left out: they tell nothing more about another release."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite]
    done = subprocess.run(
        [*command, "-k", "not Machine"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_it_is_the_newer_release_that_ran(site):
    script = "import vllm.v1.core.block_pool as b; print(b.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(f"{site}/vllm/v1/core/block_pool.py")
