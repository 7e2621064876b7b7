# SPDX-License-Identifier: Apache-2.0
"""The canary on a disk that is full: the stack ends in lru, and a message says what to do.

The disks are small tmpfs file systems, which only root may mount.
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

KEY = "--api-key secret-of-this-test"


@pytest.fixture
def disk():
    """disk(folder): put a file system of 256 KiB there; taken away at the end."""
    mounted = []

    def mount(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "computecache-test", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = f"no tmpfs can be mounted here: {done.stderr.strip()}: run as root"
            if os.environ.get("CI"):
                pytest.fail(f"{reason} (CI is set: this must run)", pytrace=False)
            pytest.skip(reason)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    assert shutil.disk_usage(folder).free == 0


def fill_in(stack, folder, phase, *arguments):
    """Run a canary whose disk is full from a phase on; return its exit code and messages."""
    stack.fake_options(f"{KEY} --delay-s 0.02")
    process = stack.start(*arguments)
    stack.wait_for_phase(process, phase)
    fill(folder)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("phase", ["baseline", "candidate", "rollback"])
def test_out_gets_full_and_the_stack_is_left_in_lru(stack, disk, phase):
    out = disk(stack.out)
    code, errors = fill_in(stack, out, phase)
    assert code == 2, errors
    assert stack.ups()[-1] == "up lru"
    assert "the vllm service runs with COMPUTECACHE_MODE=lru" in errors
    assert "No space left on device: make room and write access there, or give" in errors
    assert "Traceback" not in errors
    assert stack.env_file.read_bytes() == stack.before
    (out / "filler").unlink()
    stack.fake_options(f"{KEY} --blocks 4096")  # nothing to protect: the shortest drill
    before = len(stack.ups())
    assert stack.run() == 2, stack.output
    assert f"killed in phase {phase}" in stack.output
    assert stack.ups()[before:] == ["up lru"] * 3


def test_a_full_out_is_not_begun_with(stack, disk):
    out = disk(stack.out)
    fill(out)
    assert stack.run() == 2, stack.output
    assert f"{out / 'canary-state.json'}: No space left on device: make room" in stack.output
    assert "Traceback" not in stack.output
    assert not (stack.folder / "docker.log").exists()


def on_a_disk_of_its_own(stack, disk):
    """Put the project, which is .env here, on a disk of its own."""
    stack.project = disk(stack.folder / "project")
    stack.env_file = shutil.copy2(stack.env_file, stack.project / ".env")


def test_the_project_gets_full_and_a_canary_does_not_mind(stack, disk):
    on_a_disk_of_its_own(stack, disk)
    code, errors = fill_in(stack, stack.project, "candidate")
    assert code == 0, errors
    assert stack.ups() == ["up lru", "up active", "up lru", "up lru"]
    assert stack.env_file.read_bytes() == stack.before


def test_the_project_gets_full_and_a_promotion_is_taken_back(stack, disk):
    on_a_disk_of_its_own(stack, disk)
    code, errors = fill_in(stack, stack.project, "candidate", "--promote")
    assert code == 1, errors
    assert stack.ups()[-2:] == ["up active", "up lru"]
    (reason,) = stack.record()["reasons"]
    assert "cannot be written with COMPUTECACHE_MODE=active (No space left on device)" in reason
    assert stack.record()["final_mode"] == "lru"
    assert stack.env_file.read_bytes() == stack.before
    assert "Traceback" not in errors
