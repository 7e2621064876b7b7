# SPDX-License-Identifier: Apache-2.0
"""The stack of compose.yaml as a target: one service, switched by the environment of `up`.

`.env` says lru throughout, so that any `docker compose up` after a drill that was killed goes back
to lru. Only a promotion writes it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dotenv import dotenv_values

from drills.env_file import setting_line, with_setting_line
from drills.signals import SIGNALS
from drills.targets import Save, Site, Target, TargetError
from drills.visit import Identity, Mode, Role
from servers.start_log import cause
from serving.console import now, say
from serving.files import replace_file
from serving.metrics import compose_fetch, policy_state

SERVICE = "vllm"
MODE, SCAN_LIMIT = "COMPUTECACHE_MODE", "COMPUTECACHE_SCAN_LIMIT"
API_PORT, POLICY_PORT = 8000, 8001  # in the container
ENGINE_S = 120  # for an engine that is being restarted
ANSWER_S = 10.0  # for the engine to say its version: one that hangs is not there
REPLACING_S = 60  # for an engine that goes on stopping a container
ENV_LINE = "env_line"  # of a promotion's state: the line that it replaces in .env


class ComposeTarget(Target):
    """The stack of compose.yaml: a visit recreates one service in a mode, `.env` stays as it is."""

    name = "compose"
    restarts = True

    def __init__(self, folder: Path, save: Save, *, ready_timeout_s: int) -> None:
        self._env_file, self._save, self._ready_timeout_s = folder / ".env", save, ready_timeout_s
        self._promotes_from: dict = {}  # what a promotion changes, once one has begun
        if shutil.which("docker") is None:
            raise TargetError("--target compose needs `docker` on PATH")
        if not self._env_file.is_file():
            raise TargetError(f"{self._env_file} is missing: copy .env.example and fill it in")
        self._folder = folder.resolve()
        self._compose = ["docker", "compose", "--project-directory", str(self._folder)]
        for name in (MODE, SCAN_LIMIT):
            if name in os.environ:
                print(
                    f"note: {name} is exported in this shell and would override .env; it is left "
                    "out here, your own `docker compose` would see it: unset it",
                    file=sys.stderr,
                )

    def begin(self) -> None:
        """Refuse a `.env` that a later `docker compose up` would not go back to lru with."""
        setting_line(self._read_env(), MODE)  # EnvFileError: it is there twice
        mode = dotenv_values(self._env_file).get(MODE)
        if mode not in (None, "", "lru"):
            raise TargetError(
                f"{MODE}={mode} in {self._env_file}: a canary begins in lru and has to find it "
                f"there afterwards. Write {MODE}=lru, `docker compose up -d --wait {SERVICE}`, and "
                "run this again"
            )

    @contextmanager
    def visit(self, role: Role, mode: Mode, number: int, scan_limit: int | None) -> Iterator[Site]:
        limit = {} if scan_limit is None else {SCAN_LIMIT: str(scan_limit)}
        self._up({MODE: mode} | limit)
        read = compose_fetch(self._compose, self._folder, SERVICE, POLICY_PORT)
        yield Site(self._address(), lambda: policy_state(read()))

    def leave_in_lru(self) -> str:
        """Recreate the service in lru; a promotion that failed is taken out of `.env` again."""
        self._up_in_lru()
        self._take_back_promotion(self._promotes_from)
        return f"the {SERVICE} service runs with {MODE}=lru"

    def recover(self, state: dict) -> None:
        """Bring the service back to lru, and `.env` where a drill was killed while promoting."""
        self._take_back_promotion(state)
        self.begin()
        self._up_in_lru()

    def promote(self) -> None:
        """Leave the stack in active, and `.env` too: the only place that does."""
        data, active = self._read_env(), f"{MODE}=active".encode()
        line = setting_line(data, MODE)
        with_setting_line(data, MODE, active)  # EnvFileError before anything is switched
        self._promotes_from = {ENV_LINE: None if line is None else line.decode()}
        self._save(**self._promotes_from)
        self._up({MODE: "active"})
        self._write_line(active)

    def identity(self) -> Identity:
        gpu = self._docker(
            *("exec", "-T", SERVICE, "nvidia-smi"),
            *("--query-gpu=name,driver_version", "--format=csv,noheader"),
            check=False,
        )
        image = self._docker("images", "-q", SERVICE, check=False)
        return {"gpu": gpu.strip() or "unknown", "image": image.strip() or "unknown"}

    def _take_back_promotion(self, state: dict) -> None:
        line = state.get(ENV_LINE)
        if ENV_LINE in state and (line is None or isinstance(line, str)):
            self._write_line(None if line is None else line.encode())

    def _read_env(self) -> bytes:
        try:
            data = self._env_file.read_bytes()
            data.decode()
        except OSError as error:
            raise TargetError(
                f"{self._env_file} cannot be read ({error.strerror}): put it back, readable"
            ) from error
        except UnicodeDecodeError as error:
            raise TargetError(
                f"{self._env_file} is not UTF-8 (byte {error.start}): save it as plain UTF-8"
            ) from error
        return data

    def _write_line(self, line: bytes | None) -> None:
        data = self._read_env()
        changed = with_setting_line(data, MODE, line)
        if changed == data:
            return
        try:
            replace_file(self._env_file, changed)
        except OSError as error:
            shown = f"without a line {MODE}" if line is None else f"with {line.decode()}"
            raise TargetError(
                f"{self._env_file} cannot be written {shown} ({error.strerror}): make room and "
                "write access there"
            ) from error

    def _address(self) -> str:
        """Return where Compose published the service's port: it may come from .env or a shell."""
        remedy = f'publish it: ports: ["127.0.0.1:8000:{API_PORT}"] of {SERVICE} in compose.yaml'
        try:
            found = self._docker("port", SERVICE, str(API_PORT)).split()
        except TargetError as error:
            raise TargetError(f"{error}; {remedy}") from error
        host, _, port = found[0].rpartition(":") if found else ("", "", "")
        if not port.isdecimal() or int(port) == 0:
            raise TargetError(f"port {API_PORT} of {SERVICE} is on no port of this host: {remedy}")
        everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}
        return f"http://{everywhere.get(host, host)}:{port}"

    def _up_in_lru(self) -> None:
        deadline = time.monotonic() + REPLACING_S
        while True:
            try:
                return self._up({MODE: "lru"})
            except TargetError as error:
                # An `up` that was ended while it replaced the container leaves the new one without
                # its name, and the engine busy with the old one.
                if "already in use by container" not in str(error) or time.monotonic() > deadline:
                    raise
                self._docker("rm", "--stop", "--force", SERVICE, check=False)
                time.sleep(0.5)

    def _up(self, settings: dict[str, str]) -> None:
        # Recreated even when nothing changed: every visit starts with an empty cache.
        wait = ("--wait", "--wait-timeout", str(self._ready_timeout_s))
        command = ("up", "-d", "--force-recreate", *wait, SERVICE)
        began = now()
        try:
            self._docker(*command, settings=settings)
        except TargetError as error:
            if self._engine_answers():
                raise TargetError(f"{self._cause(began)}{error}") from None
            say(f"the Docker engine does not answer: waiting {ENGINE_S} s for it to come back")
            deadline = time.monotonic() + ENGINE_S
            while not self._engine_answers():
                if time.monotonic() > deadline:
                    raise TargetError(
                        f"{error}; start the Docker engine and run this again"
                    ) from None
                time.sleep(0.5)
            self._docker(*command, settings=settings)

    def _cause(self, since: str) -> str:
        """Return vLLM's own reason why it did not start since a time, "" where its log has none."""
        log = ("logs", "--no-log-prefix", "--no-color", "--since", since, SERVICE)
        found = cause(self._docker(*log, check=False))
        return f"{SERVICE} did not start: {found}; " if found else ""

    def _engine_answers(self) -> bool:
        ask = ("docker", "version", "--format", "{{.Server.Version}}")
        try:
            return bool(self._run(*ask, check=False, timeout_s=ANSWER_S))
        except subprocess.TimeoutExpired:
            return False

    def _docker(
        self, *arguments: str, check: bool = True, settings: dict[str, str] | None = None
    ) -> str:
        return self._run(*self._compose, *arguments, check=check, settings=settings)

    def _run(
        self,
        *command: str,
        check: bool = True,
        settings: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        # What is in the environment wins over .env, where Compose finds the other settings.
        env = {k: v for k, v in os.environ.items() if not k.startswith("COMPUTECACHE_")}
        env |= settings or {}
        # Signals wait while docker starts: interrupted there, it would go on, known to nobody,
        # beside the one that restores lru.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = subprocess.Popen(
                command,
                cwd=self._folder,  # where Compose looks for the files of COMPOSE_FILE
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is the canary's to handle, not docker's
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            )
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                process.wait()
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if check and process.returncode:
            raise TargetError(f"`{' '.join(command)}` failed: {errors.strip()[-600:]}")
        return output if process.returncode == 0 else ""
