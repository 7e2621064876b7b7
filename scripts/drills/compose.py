# SPDX-License-Identifier: Apache-2.0
"""The stack of compose.yaml as a target: one service, switched by lines of its `.env`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dotenv import dotenv_values

from drills.env_file import setting_line, with_setting_line
from drills.signals import SIGNALS
from drills.targets import Save, Site, Target, TargetError
from drills.visit import Identity, Mode, Role
from serving.files import replace_file
from serving.metrics import compose_fetch, policy_state

SERVICE = "vllm"
MODE, SCAN_LIMIT = "COMPUTECACHE_MODE", "COMPUTECACHE_SCAN_LIMIT"
POLICY_PORT = 8001


class ComposeTarget(Target):
    """The stack of compose.yaml: the mode is one line of `.env`, a visit recreates one service."""

    name = "compose"
    restarts = True

    def __init__(self, folder: Path, save: Save, *, ready_timeout_s: int) -> None:
        self._env_file, self._save, self._ready_timeout_s = folder / ".env", save, ready_timeout_s
        if shutil.which("docker") is None:
            raise TargetError("--target compose needs `docker` on PATH")
        if not self._env_file.is_file():
            raise TargetError(f"{self._env_file} is missing: copy .env.example and fill it in")
        self._compose = ["docker", "compose", "--project-directory", str(folder)]
        for name in (MODE, SCAN_LIMIT):
            if name in os.environ:
                print(
                    f"note: {name} is exported in this shell and would override .env; it is left "
                    "out here, your own `docker compose` would see it: unset it",
                    file=sys.stderr,
                )
        data = self._env_file.read_bytes()
        found = {name: setting_line(data, name) for name in (MODE, SCAN_LIMIT)}
        self._lines: dict[str, str | None] = {
            name: None if line is None else line.decode() for name, line in found.items()
        }
        port = dotenv_values(self._env_file).get("API_PORT") or "8000"
        self.base_url = f"http://127.0.0.1:{port}"

    @contextmanager
    def visit(self, role: Role, mode: Mode, number: int, scan_limit: int | None) -> Iterator[Site]:
        self._save(env_lines=self._lines)
        lines = {MODE: f"{MODE}={mode}"}
        if scan_limit is not None:
            lines[SCAN_LIMIT] = f"{SCAN_LIMIT}={scan_limit}"
        self._switch(lines)
        read = compose_fetch(self._compose, SERVICE, POLICY_PORT)
        yield Site(self.base_url, lambda: policy_state(read()))

    def leave_in_lru(self) -> str:
        """Give `.env` its bytes back (with lru, if it said otherwise) and recreate the service."""
        self.recover({"env_lines": self._lines})
        return f"the {SERVICE} service runs with {MODE}=lru"

    def recover(self, state: dict) -> None:
        """Put back the lines that a killed drill changed, mode lru, and recreate the service."""
        lines = dict(state.get("env_lines", self._lines))
        if lines[MODE] is not None and value_of(lines[MODE]) != "lru":
            lines[MODE] = f"{MODE}=lru"
        self._switch(lines)

    def promote(self) -> None:
        """Leave the stack in active: the only place that does."""
        self._switch(self._lines | {MODE: f"{MODE}=active"})

    def identity(self) -> Identity:
        gpu = self._docker(
            *("exec", "-T", SERVICE, "nvidia-smi"),
            *("--query-gpu=name,driver_version", "--format=csv,noheader"),
            check=False,
        )
        image = self._docker("images", "-q", SERVICE, check=False)
        return {"gpu": gpu.strip() or "unknown", "image": image.strip() or "unknown"}

    def _switch(self, lines: Mapping[str, str | None]) -> None:
        data = changed = self._env_file.read_bytes()
        for name, line in lines.items():
            changed = with_setting_line(changed, name, None if line is None else line.encode())
        if changed != data:
            replace_file(self._env_file, changed)
        # Recreated even when nothing changed: every visit starts with an empty cache.
        self._docker(
            *("up", "-d", "--force-recreate", "--wait"),
            *("--wait-timeout", str(self._ready_timeout_s), SERVICE),
        )

    def _docker(self, *arguments: str, check: bool = True) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("COMPUTECACHE_")}
        command = [*self._compose, *arguments]
        # Signals wait while docker starts: interrupted there, it would go on, known to nobody,
        # beside the one that restores lru.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is the canary's to handle, not docker's
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            )
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                output, errors = process.communicate()
            except BaseException:
                process.kill()
                process.wait()
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if check and process.returncode:
            raise TargetError(f"`{' '.join(command)}` failed: {errors.strip()[-600:]}")
        return output if process.returncode == 0 else ""


def value_of(line: str) -> str:
    """Return a `.env` line's value as a shell or Compose would read it, in lower case."""
    return line.partition("=")[2].strip().strip("\"'").strip().lower()
