# SPDX-License-Identifier: Apache-2.0
"""Where a drill runs: what is asked of every target, a local CPU server, and two given addresses.

The Compose stack, the only target that can be promoted, is in drills/compose.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from drills.visit import Identity, Mode, Role
from servers.embedded import EmbeddedServer, vllm_folder
from servers.processes import command_line, group_members, stop_group
from serving.http import check_address
from serving.metrics import policy_at

# What the installer writes to vllm/v1/core: its hooks, and its modules.
INSTALLED = (
    *("block_pool.py", "sched/scheduler.py"),
    *("computecache_policy.py", "computecache_metrics.py"),
)
Save = Callable[..., None]  # keeps what a later drill must know, by name


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


class Target(Protocol):
    """A place where servers are visited in given modes, and which is left in lru.

    name: its --target. restarts: every visit gets a new server, so prompts may come again.
    A drill calls recover first, where the one before was killed, then begin; visit for each of its
    visits, and identity before that visit's end; promote or leave_in_lru last. What cannot be
    switched or reached is a TargetError, a server that does not start a ServerError.
    """

    name: ClassVar[str]
    restarts: ClassVar[bool]

    def visit(
        self, role: Role, mode: Mode, number: int, scan_limit: int | None
    ) -> AbstractContextManager[Site]:
        """Bring a server up in `mode` and yield it; `scan_limit` None: as it is configured."""

    def begin(self) -> None:
        """Refuse (TargetError) what no drill may begin with; nothing has been changed then."""
        return

    def identity(self) -> Identity:
        """Return what the server of the visit in progress runs on."""

    def leave_in_lru(self) -> str:
        """End a drill safely, from any state and more than once; says how things are left."""

    def recover(self, state: dict) -> None:
        """Mend what a killed drill left behind; `state` is what it saved, {} if that is unknown."""

    def promote(self) -> None:
        """Leave the target in active. Raises TargetError where that is not the canary's to do."""
        raise TargetError(f"the canary cannot promote on {self.name}, only on compose")


class EmbeddedTarget(Target):
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
        self._core = vllm_folder() / "v1" / "core"

    @contextmanager
    def visit(self, role: Role, mode: Mode, number: int, scan_limit: int | None) -> Iterator[Site]:
        server = EmbeddedServer(
            self._model,
            mode,
            self._out / f"server-{number}-{mode}.log",
            scan_limit=scan_limit or self._scan_limit,
            blocks=self._blocks,
            max_model_len=self._max_model_len,
        )
        try:
            try:
                group = server.start()
            except OSError as error:
                raise TargetError(
                    f"the server cannot be started ({error}): make room in {self._out}"
                ) from error
            self._save(server_group=group)
            server.wait_until_ready()
            yield Site(
                server.base_url,
                lambda: policy_at([server.policy_metrics_url]),
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
        if type(group) is not int or group <= 1:
            return
        # The number may belong to something else by now.
        if any(b"vllm" in command_line(p).lower() for p in group_members(group)):
            stop_group(group)

    def identity(self) -> Identity:
        return {
            "gpu": f"none (CPU: {_cpu()}, {len(os.sched_getaffinity(0))} cores)",
            "image": None,
            "blocks": self._blocks,
            "torch": importlib.metadata.version("torch"),
            "installation": installation(self._core),
        }


class UrlTarget(Target):
    """Two running servers, one in lru and one in the candidate's mode; nothing is switched."""

    name = "url"
    restarts = False

    def __init__(self, lru: tuple[str, list[str]], candidate: tuple[str, list[str]]) -> None:
        self._sites = {"lru": lru, "candidate": candidate}

    @contextmanager
    def visit(self, role: Role, mode: Mode, number: int, scan_limit: int | None) -> Iterator[Site]:
        base_url, metrics = self._sites["candidate" if role == "candidate" else "lru"]
        yield Site(base_url, lambda: policy_at(metrics))

    def begin(self) -> None:
        """Refuse an address that cannot be one, before the first server is asked."""
        for base_url, metrics in self._sites.values():
            for url in (base_url, *metrics):
                check_address(url)

    def leave_in_lru(self) -> str:
        return "the servers were not switched"

    def recover(self, state: dict) -> None:
        """Nothing was changed, so nothing needs mending."""

    def identity(self) -> Identity:
        return {"gpu": "not known of a given address", "image": None}


def installation(core: Path) -> dict[str, str]:
    """Return the sha256 of each installed file in `core`, vLLM's v1/core, by its name."""
    return {name: hashlib.sha256((core / name).read_bytes()).hexdigest() for name in INSTALLED}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
