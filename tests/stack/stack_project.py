# SPDX-License-Identifier: Apache-2.0
"""A copy of the checkout with a .env of its own, and docker compose run in it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx

REPO = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", ".env", "out", "__pycache__", ".*_cache", ".hypothesis")
)
CPU = ("-f", "compose.yaml", "-f", "compose.cpu.yaml")
# Grafana's image can be had from a registry only.
SERVED = ("vllm", "prometheus")
SECRETS = {
    "VLLM_API_KEY": "0b5f6a1e0b7d4c39a2e1f0d6b5c4a392",
    "GRAFANA_ADMIN_PASSWORD": "3f2e3d4c5b6a79880716253443526170",
}
READY_S = 400
COMMAND_S = 500


def free_ports(names: Iterable[str]) -> dict[str, str]:
    """Return ports of 127.0.0.1 that nothing is bound to now, one a name."""
    probes = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: str(probe.getsockname()[1]) for name, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    return ports


def wait_for(what: str, condition: Callable[[], object], timeout_s: float, every_s: float = 0.5):
    """Return the first true value of `condition`; AssertionError names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(every_s)
    return value


class Project:
    """One Compose project: `folder` holds the files, `environ` reaches the engine.

    Its name and ports are its own, so that nothing else in the engine is touched.
    """

    def __init__(self, folder: Path, environ: dict[str, str], name: str) -> None:
        self.folder, self.environ, self.name = folder, environ, name
        self.settings = SECRETS | {"COMPOSE_PROJECT_NAME": name}
        self.settings |= free_ports(("API_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"))
        self.started = time.time()
        self.closed_faults: list[str] = []  # what check_env said before the files were opened
        shutil.copytree(REPO, folder, ignore=LEFT_OUT)
        self.write_env()

    @property
    def env_file(self) -> Path:
        return self.folder / ".env"

    def write_env(self, text: str | None = None, **changed: str) -> None:
        """Write .env: `text` as it is, or the settings with what is `changed`."""
        values = self.settings | changed
        lines = "".join(f"{name}={value}\n" for name, value in values.items())
        self.env_file.write_bytes((lines if text is None else text).encode())
        self.env_file.chmod(0o600)

    def compose(self, *arguments: str, check: bool = True, **shell: str):
        """Run docker compose with both files in the folder, as a user does; `shell` is exported."""
        return self.run("docker", "compose", *CPU, *arguments, check=check, **shell)

    def run(
        self,
        *command: str,
        check: bool = True,
        stdin: str | None = None,
        timeout_s: float = COMMAND_S,
        **shell: str,
    ):
        """Run any command in the folder."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ | shell,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout[-500:]}{done.stderr[-2500:]}")
        return done

    def up(self, *services: str, check: bool = True, **shell: str):
        """Start and wait until healthy, as the guide says."""
        wait = ("up", "-d", "--wait", "--wait-timeout", str(READY_S))
        done = self.compose(*wait, *(services or SERVED), check=False, **shell)
        if check and done.returncode:
            logs = self.compose("logs", "--tail", "40", check=False).stdout
            raise AssertionError(f"up: {done.stderr[-1500:]}\n{logs[-6000:]}")
        return done

    def check_env(self, **shell: str) -> tuple[int, list[str]]:
        """Run scripts/check_env.py in the folder; return its exit code and the faults it names."""
        done = self.run("python3", "scripts/check_env.py", check=False, **shell)
        return done.returncode, json.loads(done.stdout)["faults"]

    def wait_for_log(self, service: str, text: str, timeout_s: float = 60) -> str:
        """Return a service's log once it has `text`."""

        def log() -> str:
            done = self.compose("logs", "--no-log-prefix", service, check=False)
            return done.stdout if text in done.stdout else ""

        return wait_for(f"{text!r} in the log of {service}", log, timeout_s)

    def container(self, service: str) -> str:
        """Return the id of a service's container, running or not; "" when there is none.

        Asked of the engine: Compose does not answer with a bad .env.
        """
        labels = {"project": self.name, "service": service, "oneoff": "False"}
        filters = [f"--filter=label=com.docker.compose.{k}={v}" for k, v in labels.items()]
        return self.run("docker", "ps", "-aq", "--no-trunc", *filters).stdout.strip()

    def inspect(self, service: str) -> dict:
        return json.loads(self.run("docker", "inspect", self.container(service)).stdout)[0]

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.settings[port]}"

    def serves(self) -> bool:
        """Return whether the model answers a request with the key."""
        body = {"model": "computecache-tiny", "prompt": [10, 11, 12], "max_tokens": 1}
        key = {"Authorization": f"Bearer {SECRETS['VLLM_API_KEY']}"}
        try:
            with httpx.Client(trust_env=False, timeout=60) as client:
                url = f"{self.url('API_PORT')}/v1/completions"
                return client.post(url, json=body, headers=key).is_success
        except httpx.TransportError:
            return False

    def remove(self) -> None:
        """Take everything of this project away, whatever state it and its files are in."""
        label = f"label=com.docker.compose.project={self.name}"
        for kind, find, drop in (
            ("container", ("ls", "-aq"), ("rm", "--force", "--volumes")),
            ("network", ("ls", "-q"), ("rm",)),
            ("volume", ("ls", "-q"), ("rm", "--force")),
        ):
            command = ("docker", kind, *find, "--filter", label)
            if found := self._docker(*command).split():
                self._docker("docker", kind, *drop, *found)

    def _docker(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, timeout=120
        ).stdout


def make_closed(folder: Path) -> None:
    """Give every file of a copy the mode it has in a checkout made with umask 077."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & 0o700)
