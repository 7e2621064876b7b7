# SPDX-License-Identifier: Apache-2.0
"""Fake servers for tests of the scripts, and the way to run a script as an operator would."""

import importlib.util
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location(
    "fake_vllm", Path(__file__).with_name("fake_vllm.py")
)
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
