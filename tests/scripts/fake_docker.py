# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the `docker` command of an operator's shell, as far as the canary calls it.

`up` starts a fake server in the mode that .env says, `exec` runs beside it. The folder of
.env holds what it did: docker.log, server.pid. No engine is involved, so this shows what the
canary does to .env and in which order, not that containers work.
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

HERE = Path(__file__).resolve().parent


def read_env(folder):
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def stop(folder):
    pid_file = folder / "server.pid"
    if pid_file.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        pid_file.unlink()


def up(folder):
    env = read_env(folder)
    # What Compose would do: an exported variable wins over .env.
    mode = os.environ.get("COMPUTECACHE_MODE", env.get("COMPUTECACHE_MODE", "lru"))
    with (folder / "docker.log").open("a") as log:
        log.write(f"up {mode}\n")
    stop(folder)
    number = len((folder / "docker.log").read_text().splitlines())
    broken_at = folder / "broken_at"
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
            *("--port", env["API_PORT"], "--mode", mode, *options),
            *("--scan-limit", env.get("COMPUTECACHE_SCAN_LIMIT", "64")),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "server.pid").write_text(str(server.pid))
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{env['API_PORT']}/health", timeout=1)
            return 0
        except OSError:
            time.sleep(0.02)
    return 1


def main(arguments):
    assert arguments[:2] == ["compose", "--project-directory"], arguments
    folder, action, rest = Path(arguments[2]), arguments[3], arguments[4:]
    if action == "up":
        return up(folder)
    if action == "images":
        print("sha256:feed")
        return 0
    if action == "exec" and rest[2] == "nvidia-smi":
        print("Fake GPU, 1.0")
        return 0
    if action == "exec" and rest[2] == "python3":
        address = f"http://127.0.0.1:{read_env(folder)['API_PORT']}/policy/metrics"
        program = re.sub(r"http://127\.0\.0\.1:8001/metrics", address, rest[4])
        return subprocess.run([sys.executable, "-c", program], check=False).returncode
    print(f"fake docker: {arguments}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
