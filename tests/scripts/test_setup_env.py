# SPDX-License-Identifier: Apache-2.0
"""setup_env.sh in a copy of the repository whose .venv holds a Python that notes its calls."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


class Copy:
    def __init__(self, folder):
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(REPO / "scripts" / "setup_env.sh", folder / "scripts")
        shutil.copy(REPO / "pyproject.toml", folder)
        self.python = self.recorder(folder / "base_python")

    def recorder(self, path):
        """Write a stand-in for Python: it notes its arguments and makes a .venv of its like."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'#!/bin/sh\necho "$*" >>{self.folder}/calls\n'
            'case "$*" in\n'
            "*fail-here*) exit 1;;\n"
            f'"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python'
            " && touch .venv/bin/pip && chmod +x .venv/bin/pip;;\n"
            "esac\n"
        )
        path.chmod(0o755)
        return path

    def setup(self, *groups, **env):
        (self.folder / "calls").write_text("")
        done = subprocess.run(
            ["bash", "scripts/setup_env.sh", *groups],
            cwd=self.folder,
            env=os.environ | {"PYTHON": str(self.python)} | env,
            capture_output=True,
            text=True,
            check=False,
        )
        self.calls = (self.folder / "calls").read_text().splitlines()
        return done


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_the_first_run_installs_and_removes_what_breaks_the_cpu_build(copy):
    assert copy.setup("serve", "tools").returncode == 0
    text = "\n".join(copy.calls)
    steps = [
        "-m venv .venv",
        "pip install --quiet pip==25.3",
        "pip install --quiet --group serve --group tools",
        "pip uninstall --quiet --yes torchvision torchaudio torchcodec",
        "-m compileall",
        "tools/install_computecache.py --root",
    ]
    assert [text.index(step) for step in steps] == sorted(text.index(step) for step in steps)


def test_the_second_run_only_checks_the_installation(copy):
    copy.setup("serve", "tools")
    assert copy.setup("serve", "tools").returncode == 0
    assert [call.split()[0] for call in copy.calls] == ["tools/install_computecache.py"]


def test_a_new_group_installs_that_group_only(copy):
    copy.setup("tools")
    copy.setup("tools", "test")
    assert [c for c in copy.calls if "--group" in c] == ["-m pip install --quiet --group test"]


def test_changed_pins_install_again(copy):
    copy.setup("tools")
    with (copy.folder / "pyproject.toml").open("a") as pins:
        pins.write("# changed\n")
    copy.setup("tools")
    assert "-m pip install --quiet --group tools" in copy.calls
    wanted = hashlib.sha256((copy.folder / "pyproject.toml").read_bytes()).hexdigest()
    assert (copy.folder / ".venv" / "setup-tools.sha256").read_text().strip() == wanted


def test_an_install_that_failed_is_tried_again(copy):
    assert copy.setup("fail-here").returncode != 0
    assert not (copy.folder / ".venv" / "setup-fail-here.sha256").exists()
    copy.setup("fail-here")
    assert "-m pip install --quiet --group fail-here" in copy.calls


def test_a_python_that_is_too_old_is_refused_by_name(copy):
    done = copy.setup("tools", PYTHON="false")
    assert done.returncode == 2
    assert "false is older than 3.11: set PYTHON" in done.stderr
    assert not (copy.folder / ".venv").exists()
