# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the `docker` command of an operator's shell, as far as the canary calls it.

`up` starts a fake server as the environment says, else .env; `exec` runs beside it, `port` tells
where it is. FAKE_DOCKER is the folder of what it did: docker.log, server.pid, published. No engine
is involved, so this shows what the canary asks for and in which order, not that containers work.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

DEFAULTS = {"COMPUTECACHE_MODE": "lru", "COMPUTECACHE_SCAN_LIMIT": "64", "API_PORT": "8000"}
HERE = Path(__file__).resolve().parent
# The tests' own questions, and the program in the "container": past any proxy.
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def settings(project):
    """What Compose would hand over: an exported variable wins over .env."""
    lines = (project / ".env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    return {name: os.environ.get(name, value) for name, value in (DEFAULTS | values).items()}


def stop(folder):
    pid_file = folder / "server.pid"
    if pid_file.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        pid_file.unlink()


def up(project, folder):
    env = settings(project)
    mode, port = env["COMPUTECACHE_MODE"], env["API_PORT"]
    with (folder / "docker.log").open("a") as log:
        log.write(f"up {mode}\n")
    stop(folder)
    number = len((folder / "docker.log").read_text().splitlines())
    broken_at = folder / "broken_at"
    if (folder / "conflict").exists():
        print(
            'Conflict. The container name "/p-vllm-1" is already in use by container "b99a".',
            file=sys.stderr,
        )
        return 1
    if (folder / "broken").exists() or (
        broken_at.exists() and int(broken_at.read_text()) == number
    ):
        print("dependency failed to start: container vllm is unhealthy", file=sys.stderr)
        return 1
    options = (folder / "fake_options").read_text().split()
    if (only_in_mode := folder / f"fake_options_{mode}").exists():
        options += only_in_mode.read_text().split()
    server = subprocess.Popen(
        [
            *(sys.executable, HERE / "fake_vllm.py"),
            *("--port", port, "--mode", mode, *options),
            *("--scan-limit", env["COMPUTECACHE_SCAN_LIMIT"]),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "server.pid").write_text(str(server.pid))
    (folder / "published").write_text(port)
    while server.poll() is None:
        try:
            LOCAL.open(f"http://127.0.0.1:{port}/health", timeout=1)
            return 0
        except OSError:
            time.sleep(0.02)
    return 1


def engine_is_down(folder):
    """Whether the test has stopped the engine; it comes back after the questions in the file."""
    down = folder / "engine_down"
    if not down.exists():
        return False
    print("Cannot connect to the Docker daemon. Is the docker daemon running?", file=sys.stderr)
    if (left := int(down.read_text()) - 1) > 0:
        down.write_text(str(left))
    else:
        down.unlink()
    return True


def main(arguments):
    folder = Path(os.environ["FAKE_DOCKER"])
    if engine_is_down(folder):
        return 1
    if arguments[0] == "version":
        print("24.0.0")
        return 0
    assert arguments[:2] == ["compose", "--project-directory"], arguments
    project, action, rest = Path(arguments[2]), arguments[3], arguments[4:]
    assert Path.cwd() == project, "Compose looks for the files of COMPOSE_FILE there"
    if action == "up":
        return up(project, folder)
    if action == "port":
        assert rest == ["vllm", "8000"], rest
        if (folder / "not_published").exists():
            print("no port 8000/tcp for container project-vllm-1", file=sys.stderr)
            return 1
        with (folder / "visits").open("a") as visits:
            visits.write("a server to be visited is up\n")
        print(f"127.0.0.1:{(folder / 'published').read_text()}")
        return 0
    if action == "rm":
        assert rest == ["--stop", "--force", "vllm"], rest
        (folder / "conflict").unlink(missing_ok=True)
        return 0
    if action == "logs":
        assert rest[:3] == ["--no-log-prefix", "--no-color", "--since"], rest
        assert rest[4:] == ["vllm"], rest
        if (log := folder / "server_log").exists():
            print(log.read_text())
        return 0
    if action == "images":
        print("sha256:feed")
        return 0
    if action == "exec" and rest[2] == "nvidia-smi":
        print("Fake GPU, 1.0")
        return 0
    if action == "exec" and rest[2] == "python3":
        address = f"http://127.0.0.1:{(folder / 'published').read_text()}/policy/metrics"
        program = re.sub(r"http://127\.0\.0\.1:8001/metrics", address, rest[4])
        return subprocess.run([sys.executable, "-c", program], check=False).returncode
    print(f"fake docker: {arguments}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
