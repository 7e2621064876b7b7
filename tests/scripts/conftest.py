# SPDX-License-Identifier: Apache-2.0
"""Fake servers for tests of the scripts, and the way to run a script as an operator would."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from evidence import bench as bench_module
from evidence import plan
from evidence.store import Store
from servers import fleet as fleet_module
from servers.processes import free_port

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
_spec = importlib.util.spec_from_file_location("fake_vllm", HERE / "fake_vllm.py")
fake_vllm = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_vllm)


@contextmanager
def serving(*arguments):
    server = fake_vllm.Fake(fake_vllm.parse([str(a) for a in arguments]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.policy_url = f"{server.url}/policy/metrics"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="session")
def fake():
    """serving(*arguments): a context manager around a fake server; see fake_vllm.py."""
    return serving


@pytest.fixture(scope="session")
def script():
    """script(name, *arguments, **env): run scripts/NAME with this Python, output captured."""

    def run(name, *arguments, **env):
        command = [sys.executable, str(REPO / "scripts" / name), *map(str, arguments)]
        return subprocess.run(
            command, env=os.environ | env, capture_output=True, text=True, check=False, timeout=300
        )

    return run


ENV = "# of this test\nVLLM_API_KEY=secret-of-this-test\nCOMPUTECACHE_MODE=lru\nAPI_PORT={port}\n"
DRILL = ("--hot-tokens", "320", "--ttft-regression", "300%")


class Stack:
    """A folder with .env, a `docker` of its own and the canary's records in out/.

    `project` and `out` may be set to other folders before `start`.
    """

    def __init__(self, folder):
        self.folder = self.project = folder
        self.out = folder / "out"
        self.env_file = folder / ".env"
        self.env_file.write_text(ENV.format(port=free_port()))
        self.env_file.chmod(0o600)
        self.before = self.env_file.read_bytes()
        self.fake_options("--api-key secret-of-this-test")
        docker = folder / "bin" / "docker"
        docker.parent.mkdir()
        program = f'exec {sys.executable} {HERE / "fake_docker.py"} "$@"'
        docker.write_text(f"#!/bin/sh\nexport FAKE_DOCKER={folder}\n{program}\n")
        docker.chmod(0o755)

    def fake_options(self, text, mode=None):
        (self.folder / ("fake_options" + (f"_{mode}" if mode else ""))).write_text(text)

    def start(self, *arguments, script="canary.py", **env):
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, str(REPO / "scripts" / script)]
        command += ["run"] if script == "canary.py" else []
        where = ["--target", "compose", "--project", self.project, "--out", self.out]
        return subprocess.Popen(
            [*command, *map(str, where), *DRILL, *arguments],
            env=os.environ | {"PATH": path} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that were started under nohup have inherited that HUP is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def run(self, *arguments, **env):
        process = self.start(*arguments, **env)
        self.output = "\n".join(process.communicate(timeout=120))
        return process.returncode

    def record(self, name="canary.json"):
        return json.loads((self.out / name).read_text())

    def ups(self):
        return (self.folder / "docker.log").read_text().split("\n")[:-1]

    def server_mode(self):
        """The mode that the server of the last `up` was started in; None between two servers."""
        try:
            pid = int((self.folder / "server.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (OSError, ValueError):
            return None
        return command[command.index("--mode") + 1] if "--mode" in command else None

    def wait_for_phase(self, process, phase):
        state = self.out / "canary-state.json"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if state.exists() and json.loads(state.read_text())["phase"] == phase:
                return
            time.sleep(0.01)
        raise AssertionError(f"phase {phase} was not reached: {process.communicate()}")


@pytest.fixture
def stack(tmp_path):
    stack = Stack(tmp_path)
    yield stack
    if (pid_file := tmp_path / "server.pid").exists():
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


@pytest.fixture
def sleepers(tmp_path, monkeypatch):
    """A fleet whose servers are processes that sleep; three of 4 GiB each and one of 8."""
    made = [
        fleet_module.Spec("g", name, "lru", 64, 1, "m", (), gib, fleet_module.EAGER)
        for name, gib in (("a", 4), ("b", 4), ("c", 4), ("big", 8))
    ]
    folder, paths = tmp_path / "fleet", {"patched": "x"}
    fleet = fleet_module.Fleet(made, folder, paths, {}, 12, first_port=free_port())

    def sleep(command, **more):
        return Popen([sys.executable, "-c", "import time; time.sleep(600)"], **more)

    monkeypatch.setattr(fleet_module.subprocess, "Popen", sleep)
    yield fleet
    fleet.drop(*fleet.running)


@pytest.fixture
def bench(tmp_path, sleepers):
    store = Store(tmp_path / "out", tmp_path / "state", {"started": "first"}, ["drill"])
    sleepers.start(sleepers.specs[:1])
    now = time.monotonic()
    return bench_module.Bench(
        sleepers, store, plan.REHEARSAL, now + 60, [], True, "drill", now + 60
    )
