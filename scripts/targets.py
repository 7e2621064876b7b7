# SPDX-License-Identifier: Apache-2.0
"""Where a canary runs: a local CPU server, the Compose stack, or two servers at given addresses.

A target offers visit(role, mode, number), a context manager that yields a Site in that mode, and
leave_in_lru(), which ends the canary safely from any state and says how things are left.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dotenv import dotenv_values
from embedded_server import EmbeddedServer, stop_group
from env_file import NAME, EnvFileError, mode_line, with_mode_line, write_atomically
from server_metrics import compose_fetch, fetch, policy_state

Save = Callable[..., None]
SERVICE = "vllm"
POLICY_PORT = 8001


class TargetError(RuntimeError):
    """A target cannot be switched or reached; the message says what to do."""


@dataclass
class Site:
    """A server to send a workload to. `exit_code` is not None once it is known to have ended."""

    base_url: str
    policy: Callable[[], dict]
    ready_s: float | None = None
    exit_code: Callable[[], int | None] = lambda: None


class EmbeddedTarget:
    """The real server on this machine's CPU, a new one for each visit; none runs in between."""

    name = "embedded"
    restarts = True

    def __init__(self, model: Path, out: Path, save: Save, *, scan_limit: int, blocks: int) -> None:
        self._model, self._out, self._save = model.resolve(), out.resolve(), save
        self._scan_limit, self._blocks = scan_limit, blocks
        (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations
        self._core = Path(vllm) / "v1" / "core"

    @contextmanager
    def visit(self, role: str, mode: str, number: int) -> Iterator[Site]:
        server = EmbeddedServer(
            self._model,
            mode,
            self._out / f"server-{number}-{mode}.log",
            scan_limit=self._scan_limit,
            blocks=self._blocks,
        )
        try:
            server.start()
            self._save(server_group=server.process.pid)
            server.wait_until_ready()
            yield Site(
                server.base_url,
                lambda: policy_state(fetch(server.policy_metrics_url)),
                server.ready_s,
                lambda: server.exit_code,
            )
        finally:
            server.stop()
            self._save(server_group=None)

    def leave_in_lru(self) -> str:
        return "no server is running"

    def recover(self, state: dict) -> None:
        """End the server of a canary that was killed, if it is still there."""
        group = state.get("server_group")
        if group and b"vllm.entrypoints" in _command_line(group):
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
        if NAME in os.environ:
            print(
                f"note: {NAME} is exported in this shell and would override .env; the canary "
                "leaves it out, your own `docker compose` would not: unset it",
                file=sys.stderr,
            )
        self._found = self._env_file.read_bytes()
        self._line = mode_line(self._found)
        port = dotenv_values(self._env_file).get("API_PORT") or "8000"
        self.base_url = f"http://127.0.0.1:{port}"

    @contextmanager
    def visit(self, role: str, mode: str, number: int) -> Iterator[Site]:
        self._save(env_mode_line=None if self._line is None else self._line.decode())
        self._switch(f"{NAME}={mode}".encode())
        read = compose_fetch(self._compose, SERVICE, POLICY_PORT)
        yield Site(self.base_url, lambda: policy_state(read()))

    def leave_in_lru(self) -> str:
        """Give `.env` its bytes back (with lru, if it said otherwise) and recreate the service."""
        self.recover({"env_mode_line": None if self._line is None else self._line.decode()})
        return f"the {SERVICE} service runs with {NAME}=lru"

    def recover(self, state: dict) -> None:
        """Put the mode line of a canary that was killed back and recreate the service in lru."""
        line = state.get("env_mode_line")
        original = None if line is None else line.encode()
        if original is not None and mode_of(original) != "lru":
            original = f"{NAME}=lru".encode()
        self._switch(original)

    def promote(self) -> None:
        """Leave the stack in active: the only place that does."""
        self._switch(f"{NAME}=active".encode())

    def identity(self) -> dict:
        gpu = self._docker(
            *("exec", "-T", SERVICE, "nvidia-smi"),
            *("--query-gpu=name,driver_version", "--format=csv,noheader"),
            check=False,
        )
        image = self._docker("images", "-q", SERVICE, check=False)
        return {"gpu": gpu.strip() or "unknown", "image": image.strip() or "unknown"}

    def _switch(self, line: bytes | None) -> None:
        data = self._env_file.read_bytes()
        if (changed := with_mode_line(data, line)) != data:
            write_atomically(self._env_file, changed)
        # Recreated even when nothing changed: every visit starts with an empty cache.
        self._docker(
            *("up", "-d", "--force-recreate", "--wait"),
            *("--wait-timeout", str(self._ready_timeout_s), SERVICE),
        )

    def _docker(self, *arguments: str, check: bool = True) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("COMPUTECACHE_")}
        command = [*self._compose, *arguments]
        # A session of its own: Ctrl-C is the canary's to handle, not docker's.
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, start_new_session=True, check=False
        )
        if check and done.returncode:
            raise TargetError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-600:]}")
        return done.stdout if done.returncode == 0 else ""


class UrlTarget:
    """Two running servers, one in lru and one in the candidate's mode; nothing is switched."""

    name = "url"
    restarts = False

    def __init__(self, lru: tuple[str, list[str]], candidate: tuple[str, list[str]]) -> None:
        self._sites = {"lru": lru, "candidate": candidate}

    @contextmanager
    def visit(self, role: str, mode: str, number: int) -> Iterator[Site]:
        base_url, metrics = self._sites["candidate" if role == "candidate" else "lru"]
        yield Site(base_url, lambda: policy_state("\n".join(map(fetch, metrics))))

    def leave_in_lru(self) -> str:
        return "the servers were not switched"

    def recover(self, state: dict) -> None:
        """Nothing was changed, so nothing needs mending."""

    def identity(self) -> dict:
        return {"gpu": "not known of a given address", "image": None}


def mode_of(line: bytes) -> str:
    """Return the value of a COMPUTECACHE_MODE line as a shell or Compose would read it."""
    return line.partition(b"=")[2].strip().strip(b"\"'").strip().decode(errors="replace").lower()


def _command_line(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""


__all__ = ["ComposeTarget", "EmbeddedTarget", "EnvFileError", "Site", "TargetError", "UrlTarget"]
