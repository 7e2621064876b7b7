# SPDX-License-Identifier: Apache-2.0
"""Where a canary runs: a local CPU server, the Compose stack, or two servers at given addresses.

A target offers visit(role, mode, number, scan_limit), a context manager that yields a Site in that
mode, and leave_in_lru(), which ends a drill safely from any state and says how things are left.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dotenv import dotenv_values

from drills.env_file import setting_line, with_setting_line
from drills.signals import SIGNALS
from servers.embedded import EmbeddedServer
from servers.processes import command_line, group_members, stop_group
from servers.tiny_model import make_model
from serving.files import replace_file
from serving.metrics import compose_fetch, fetch, policy_state

Save = Callable[..., None]
SERVICE = "vllm"
MODE, SCAN_LIMIT = "COMPUTECACHE_MODE", "COMPUTECACHE_SCAN_LIMIT"
POLICY_PORT = 8001


class TargetError(RuntimeError):
    """A target cannot be switched or reached; the message says what to do."""


@dataclass
class Site:
    """A server to send a workload to.

    `exit_code` waits that many seconds for it to end; None if it has not, or if nobody can tell.
    """

    base_url: str
    policy: Callable[[], dict]
    ready_s: float | None = None
    exit_code: Callable[[float], int | None] = lambda timeout_s: None


class EmbeddedTarget:
    """The real server on this machine's CPU, a new one for each visit; none runs in between."""

    name = "embedded"
    restarts = True

    def __init__(
        self,
        model: Path,
        out: Path,
        save: Save,
        *,
        scan_limit: int,
        blocks: int,
        max_model_len: int,
    ) -> None:
        self._model, self._out, self._save = model.resolve(), out.resolve(), save
        self._scan_limit, self._blocks, self._max_model_len = scan_limit, blocks, max_model_len
        (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations
        self._core = Path(vllm) / "v1" / "core"

    @contextmanager
    def visit(self, role: str, mode: str, number: int, scan_limit: int | None) -> Iterator[Site]:
        server = EmbeddedServer(
            self._model,
            mode,
            self._out / f"server-{number}-{mode}.log",
            scan_limit=scan_limit or self._scan_limit,
            blocks=self._blocks,
            max_model_len=self._max_model_len,
        )
        try:
            server.start()
            self._save(server_group=server.process.pid)
            server.wait_until_ready()
            yield Site(
                server.base_url,
                lambda: policy_state(fetch(server.policy_metrics_url)),
                server.ready_s,
                server.wait_for_exit,
            )
        finally:
            server.stop()
            self._save(server_group=None)

    def leave_in_lru(self) -> str:
        return "no server is running"

    def recover(self, state: dict) -> None:
        """End the server of a drill that was killed, if it is still there."""
        group = state.get("server_group")
        # The number may belong to something else by now.
        if group and any(b"vllm" in command_line(p).lower() for p in group_members(group)):
            stop_group(group)

    def identity(self) -> dict:
        cpu = platform.processor() or platform.machine()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        return {
            "gpu": f"none (CPU: {cpu}, {len(os.sched_getaffinity(0))} cores)",
            "image": None,
            "blocks": self._blocks,
            "torch": importlib.metadata.version("torch"),
            "installation": {
                name: hashlib.sha256((self._core / name).read_bytes()).hexdigest()
                for name in ("block_pool.py", "computecache_policy.py")
            },
        }


class ComposeTarget:
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
        self._lines = {name: line and line.decode() for name, line in found.items()}
        port = dotenv_values(self._env_file).get("API_PORT") or "8000"
        self.base_url = f"http://127.0.0.1:{port}"

    @contextmanager
    def visit(self, role: str, mode: str, number: int, scan_limit: int | None) -> Iterator[Site]:
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

    def identity(self) -> dict:
        gpu = self._docker(
            *("exec", "-T", SERVICE, "nvidia-smi"),
            *("--query-gpu=name,driver_version", "--format=csv,noheader"),
            check=False,
        )
        image = self._docker("images", "-q", SERVICE, check=False)
        return {"gpu": gpu.strip() or "unknown", "image": image.strip() or "unknown"}

    def _switch(self, lines: dict[str, str | None]) -> None:
        data = changed = self._env_file.read_bytes()
        for name, line in lines.items():
            changed = with_setting_line(changed, name, line and line.encode())
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


class UrlTarget:
    """Two running servers, one in lru and one in the candidate's mode; nothing is switched."""

    name = "url"
    restarts = False

    def __init__(self, lru: tuple[str, list[str]], candidate: tuple[str, list[str]]) -> None:
        self._sites = {"lru": lru, "candidate": candidate}

    @contextmanager
    def visit(self, role: str, mode: str, number: int, scan_limit: int | None) -> Iterator[Site]:
        base_url, metrics = self._sites["candidate" if role == "candidate" else "lru"]
        yield Site(base_url, lambda: policy_state("\n".join(map(fetch, metrics))))

    def leave_in_lru(self) -> str:
        return "the servers were not switched"

    def recover(self, state: dict) -> None:
        """Nothing was changed, so nothing needs mending."""

    def identity(self) -> dict:
        return {"gpu": "not known of a given address", "image": None}


def value_of(line: str) -> str:
    """Return a `.env` line's value as a shell or Compose would read it, in lower case."""
    return line.partition("=")[2].strip().strip("\"'").strip().lower()


def make_target(options: argparse.Namespace, save: Callable[..., None]):
    """Return the target that the options name."""
    if options.target == "embedded":
        return EmbeddedTarget(
            make_model(options.out / "model"),
            options.out,
            save,
            scan_limit=options.scan_limit,
            blocks=options.blocks,
            max_model_len=options.max_model_len,
        )
    if options.target == "compose":
        return ComposeTarget(options.project, save, ready_timeout_s=options.ready_timeout)
    if not (options.baseline_url and options.candidate_url):
        raise TargetError("--target url needs --baseline-url and --candidate-url")
    if not (options.baseline_policy_url and options.candidate_policy_url):
        raise TargetError("--target url needs --baseline-policy-url and --candidate-policy-url")
    return UrlTarget(
        (options.baseline_url, options.baseline_policy_url),
        (options.candidate_url, options.candidate_policy_url),
    )
