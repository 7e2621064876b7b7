# SPDX-License-Identifier: Apache-2.0
"""Several vLLM servers side by side on one GPU, which may outlive the script that started them.

A server is known by "group:name". The fleet's file lists those that run, so that a later call
adopts them. They bind 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from servers.embedded import ServerError
from servers.processes import alive, healthy, reap, stop_group
from serving.console import progress
from serving.files import replace_file

READY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 5
MODEL_NAME = "computecache-gpu"
# How the model is run, best first; a server that dies while starting is retried one step down.
EXECUTION = (
    (),
    ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'),
    ("--enforce-eager",),
)
EAGER = len(EXECUTION) - 1
# What a log says about the machinery behind the numbers.
TELLING = re.compile(
    r"Using .*[aA]ttention|torch\.compile took|Graph capturing finished|GPU KV cache size"
    r"|Model loading took|init engine \("
)


@dataclass(frozen=True)
class Spec:
    """One server. mode None: unpatched. gib: GPU memory it takes, for the fleet's budget."""

    group: str
    name: str
    mode: str | None
    scan_limit: int
    blocks: int
    model: str
    args: tuple[str, ...]
    gib: float
    execution: int = 0

    @property
    def key(self) -> str:
        return f"{self.group}:{self.name}"


@dataclass
class Running:
    """A started server; pid is its process group's too."""

    key: str
    pid: int
    port: int
    policy_port: int | None
    log: str
    gib: float
    execution: int
    ready_s: float | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def policy_url(self) -> str | None:
        return None if self.policy_port is None else f"http://127.0.0.1:{self.policy_port}/metrics"

    def log_lines(self) -> list[str]:
        return Path(self.log).read_text(errors="replace").splitlines()

    def facts(self) -> list[str]:
        """The lines of the log that tell how the model is run."""
        return [line[-240:] for line in self.log_lines() if TELLING.search(line)]


@dataclass
class Fleet:
    """Starts, adopts and stops servers.

    folder: logs, compile cache and the fleet's file. pythonpath: by mode, "patched" and
    "unpatched". budget_gib: what all servers together may take.
    """

    specs: list[Spec]
    folder: Path
    pythonpath: dict[str, str]
    env: dict[str, str]
    budget_gib: float
    first_port: int = 8200
    running: dict[str, Running] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    history: list[dict] = field(default_factory=list)
    execution: int = 0
    # When each was started, by time.monotonic(); one that was adopted: first waited for.
    _started: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def file(self) -> Path:
        return self.folder / "servers.json"

    def adopt(self) -> None:
        """Take over what an earlier call left running."""
        if not self.file.exists():
            return
        saved = json.loads(self.file.read_text())
        self.execution, self.history = saved["execution"], saved["history"]
        for one in (Running(**fields) for fields in saved["running"]):
            if alive(one.pid):
                self.running[one.key] = one

    def save(self) -> None:
        running = [asdict(one) for one in self.running.values()]
        saved = {"execution": self.execution, "history": self.history, "running": running}
        replace_file(self.file, json.dumps(saved))

    def of(self, group: str) -> list[Spec]:
        return [spec for spec in self.specs if spec.group == group]

    def start(self, specs: Iterable[Spec]) -> None:
        """Start those that do not run, without waiting; others stop if the GPU is too small."""
        specs = list(specs)
        wanted = {spec.key for spec in specs}
        self.drop(*(key for key, one in self.running.items() if not alive(one.pid)))
        missing = [s for s in specs if s.key not in self.running and s.key not in self.lost]
        if missing:
            self._make_room(sum(spec.gib for spec in missing), wanted)
        for spec in missing:
            self._launch(spec, max(spec.execution, self.execution))
        self.save()

    def _make_room(self, needed_gib: float, wanted: set[str]) -> None:
        """Stop servers that are not wanted, the oldest first, until `needed_gib` are left."""
        over_gib = needed_gib + sum(one.gib for one in self.running.values()) - self.budget_gib
        ending = []
        for key, one in self.running.items():
            if over_gib > 0 and key not in wanted:
                ending.append(key)
                over_gib -= one.gib
        self.drop(*ending)

    def wait(self, specs: Iterable[Spec], until: float) -> None:
        """Return when each started one answers or is lost; `until` is a time.monotonic()."""
        waiting = {spec.key: spec for spec in specs if spec.key in self.running}
        waiting = {k: s for k, s in waiting.items() if self.running[k].ready_s is None}
        retried: set[str] = set()
        while waiting:
            for key, spec in list(waiting.items()):
                if self._settled(spec, retried):
                    del waiting[key]
            if time.monotonic() > until and waiting:
                raise ServerError(f"no time left to wait for {', '.join(waiting)}")
            if waiting:
                time.sleep(0.3)
        self.save()

    def _settled(self, spec: Spec, retried: set[str]) -> bool:
        """Tell whether a server that was starting answers or is lost; retry one that died, once."""
        key, one = spec.key, self.running[spec.key]
        started = self._started.setdefault(key, time.monotonic())
        if healthy(one.base_url):
            one.ready_s = round(time.monotonic() - started, 1)
            self._note(one, facts=one.facts())
            progress(f"{key} ready after {one.ready_s} s")
            return True
        if alive(one.pid) and time.monotonic() <= started + READY_TIMEOUT_S:
            return False
        tail = "\n".join(one.log_lines()[-40:])
        self.drop(key)
        if key not in retried and one.execution < EAGER:
            progress(f"{key} did not start, again with {EXECUTION[one.execution + 1]}")
            self._note(one, died=tail)
            retried.add(key)
            self._launch(spec, one.execution + 1)
            return False
        self.lost[key] = tail
        progress(f"{key} is lost:\n{tail}")
        return True

    def drop(self, *keys: str) -> None:
        """End the processes of these servers, all at once."""
        ending = [self.running.pop(key) for key in keys]
        for one in ending:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and any(alive(one.pid) for one in ending):
            time.sleep(0.1)
        for one in ending:
            stop_group(one.pid, 1)
            reap(one.pid)
        self.save()

    def _note(self, one: Running, **more: object) -> None:
        seen = {"key": one.key, "execution": EXECUTION[one.execution], "ready_s": one.ready_s}
        self.history.append({**seen, **more})

    def _launch(self, spec: Spec, execution: int) -> None:
        used = {one.port for one in self.running.values()}
        port = next(p for p in range(self.first_port, self.first_port + 400, 2) if p not in used)
        name = spec.key.replace(":", "-")
        log = self.folder / f"{name}.{int(time.time())}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(spec, port, execution),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(spec, port),
                cwd=self.folder,  # not the repository: its vllm/ is no package
                start_new_session=True,
            )
        policy_port = None if spec.mode is None else port + 1
        self._started[spec.key] = time.monotonic()
        self.running[spec.key] = Running(
            spec.key, process.pid, port, policy_port, str(log), spec.gib, execution
        )
        progress(f"{spec.key} starting on port {port}")

    def _environment(self, spec: Spec, port: int) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("COMPUTECACHE_")}
        env |= self.env | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for POST /reset_prefix_cache
            "VLLM_CACHE_ROOT": str(self.folder / "vllm_cache"),
            "PYTHONPATH": self.pythonpath["unpatched" if spec.mode is None else "patched"],
        }
        if spec.mode is not None:
            env |= {
                "COMPUTECACHE_MODE": spec.mode,
                "COMPUTECACHE_SCAN_LIMIT": str(spec.scan_limit),
                "COMPUTECACHE_METRICS_PORT": str(port + 1),
            }
        return env


def _command(spec: Spec, port: int, execution: int) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--model", spec.model),
        *("--served-model-name", MODEL_NAME, "--num-gpu-blocks-override", str(spec.blocks)),
        *("--enable-prefix-caching", "--kv-cache-metrics", "--enable-prompt-tokens-details"),
        "--disable-uvicorn-access-log",
        *spec.args,
        *EXECUTION[execution],
    ]
