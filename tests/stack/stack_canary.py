# SPDX-License-Identifier: Apache-2.0
"""The canary run on a project of the tests' engine, as a user runs it, and followed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stack_engine
from stack_project import CPU, Project, wait_for

# Short visits, long enough for a verdict; a busy machine decides nothing by its times.
DRILL = (
    *("--repetitions", "3", "--min-samples", "3", "--control-requests", "1", "--survival", ""),
    *("--hot-tokens", "320", "--flood-requests", "4", "--max-tokens", "1"),
    *("--ttft-regression", "9000%", "--ready-timeout", "300"),
)
# A health check each second: what is waited for is the server, not the next check.
QUICK = "services: {vllm: {healthcheck: {interval: 1s}}}\n"
PHASE_S = 300
END_S = 600
FIRST_REPLAY = "    hot replay: "
MODE = "COMPUTECACHE_MODE"


class Canary:
    """One run of scripts/canary.py in a project's folder, seen from outside."""

    def __init__(self, project: Project, process: subprocess.Popen, log: Path) -> None:
        self.project, self.process, self._log = project, process, log
        self._state = project.folder / "out" / "canary-state.json"

    def text(self) -> str:
        return self._log.read_text()

    def phase(self) -> str | None:
        return json.loads(self._state.read_text())["phase"] if self._state.exists() else None

    def wait_for_phase(self, phase: str, pressed: bool = False) -> None:
        """Return once the phase has begun or, `pressed`, once a flood has hit its server."""

        def there() -> bool:
            assert self.process.poll() is None, self.text()
            if self.phase() != phase:
                return False
            if phase == "promotion":
                return True
            # The record of an earlier canary, killed in this phase, may be there still.
            _, begun, after = self.text().rpartition(f"] {phase}: ")
            return bool(begun) and (FIRST_REPLAY in after or not pressed)

        wait_for(f"phase {phase} of the canary: {self.text()}", there, PHASE_S, 0.05)

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal as a terminal does, if one is given; return the exit code."""
        if number is not None:
            os.killpg(self.process.pid, number)
        code = self.process.wait(END_S)
        assert "Traceback" not in self.text(), self.text()
        return code

    def kill_9(self) -> None:
        self.process.kill()
        self.process.wait()

    def record(self, name: str = "canary.json") -> dict:
        return json.loads((self.project.folder / "out" / name).read_text())


def engine_mode(project: Project) -> str:
    """Return the mode that a project's engine itself reports."""
    program = (
        "import urllib.request as u; o = u.build_opener(u.ProxyHandler({})); "
        "print(o.open('http://127.0.0.1:8001/metrics').read().decode())"
    )
    inside = ("docker", "compose", "exec", "-T", "vllm", "python3", "-c", program)
    (line,) = (
        line
        for line in project.run(*inside).stdout.splitlines()
        if line.startswith("vllm:computecache_info{")
    )
    return line.partition('mode="')[2].partition('"')[0]


class CanaryProject:
    """A project whose `.env` names the files of the stack without a GPU, and canaries on it."""

    def __init__(self, project: Project, elsewhere: Path, override: str = QUICK) -> None:
        self.project, self._elsewhere, self._runs = project, elsewhere, 0
        (project.folder / "compose.quick.yaml").write_text(override)
        files = [*CPU[1::2], "compose.quick.yaml"]
        project.settings |= {"COMPOSE_FILE": os.pathsep.join(files)}
        project.settings |= {"NUM_GPU_BLOCKS": "64", "BLOCK_SIZE": "32", MODE: "lru"}
        project.write_env()
        self.env = project.env_file.read_bytes()

    @contextmanager
    def canary(self, *arguments: str) -> Iterator[Canary]:
        """Start a canary, from another folder than the project's; none is left running."""
        self._runs += 1
        log = self._elsewhere / f"canary-{self._runs}.log"
        script = self.project.folder / "scripts" / "canary.py"
        command = [sys.executable, "-u", str(script), "run", "--target", "compose"]
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, *DRILL, *arguments],
                cwd=self._elsewhere,
                env=self.project.environ,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        started = time.monotonic()
        try:
            yield Canary(self.project, process, log)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            shown = " ".join(arguments)
            print(f"canary {shown}: {process.returncode}, {time.monotonic() - started:.0f} s")

    def docker(self, *arguments: str) -> str:
        return self.project.run("docker", *arguments).stdout

    def container(self) -> str:
        """Return the id of the vllm service's container, "" where there is none."""
        return self.project.run("docker", "compose", "ps", "-a", "-q", "vllm").stdout.strip()

    def asked(self) -> str | None:
        """Return the mode that the container was made with, None while there is no such one."""
        # Compose fails where a container goes while it is listed.
        ids = ("docker", "compose", "ps", "-a", "-q", "vllm")
        found = self.project.run(*ids, check=False).stdout.split()
        if len(found) != 1:
            return None
        form = "{{range .Config.Env}}{{println .}}{{end}}"
        done = self.project.run("docker", "inspect", "-f", form, found[0], check=False)
        lines = [line.partition("=") for line in done.stdout.splitlines()]
        return next((value for name, _, value in lines if name == MODE), None)

    def mode(self) -> str:
        """Return the mode that the engine itself reports."""
        return engine_mode(self.project)

    def restart_engine(self) -> None:
        """End the tests' own engine as its service manager would, and start it again."""
        host = self.project.environ.get("DOCKER_HOST", "")
        folder = Path(host.removeprefix("unix://")).parent
        pid = stack_engine.running(folder / "docker.pid", folder) if host else None
        if pid is None:
            pytest.skip("the engine is not the tests' own: theirs alone is restarted")
        command = [
            os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        stack_engine.end(pid, stack_engine.STOP_TIMEOUT_S)
        # It leaves its own pid file and socket behind for the end of the tests to find.
        with (folder / "dockerd.log").open("ab") as log:
            subprocess.Popen(
                command[:-1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for("the engine again", lambda: stack_engine.reachable(self.project.environ), PHASE_S)

    def is_left_in_lru(self) -> bool:
        return self.project.env_file.read_bytes() == self.env and self.mode() == "lru"
