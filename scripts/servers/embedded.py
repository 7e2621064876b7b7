# SPDX-License-Identifier: Apache-2.0
"""The real vLLM server on this machine's CPU, as a context manager.

It binds 127.0.0.1 only, serves the model of make_model.py from a small block pool, and
writes its log to a file. Leaving the context stops every process it started.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from servers.processes import STOP_TIMEOUT_S, free_port, healthy, stop_group
from servers.start_log import cause

READY_TIMEOUT_S = 300
BLOCK_SIZE = 32  # tokens; the CPU's attention takes multiples of 32 only
SERVED_MODEL = "computecache-tiny"


class ServerError(RuntimeError):
    """The server could not be started, or died.

    The message begins with vLLM's own reason, where its log has one, and ends with the last lines.
    """


def vllm_folder() -> Path:
    """Return the folder of the vllm that a server started here imports. ServerError without one."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(f"{sys.executable} has no vllm: run `bash scripts/setup_env.sh`")
    return Path(next(iter(spec.submodule_search_locations)))


class EmbeddedServer:
    """One `python -m vllm.entrypoints.openai.api_server` process group.

    `mode` and `scan_limit` become COMPUTECACHE_MODE and COMPUTECACHE_SCAN_LIMIT; with
    `mode` None neither they nor the policy's metrics are set (an unpatched server).
    `blocks` of `block_size` tokens are the whole prefix cache. `env` and `args` are added last.
    """

    def __init__(
        self,
        model: Path,
        mode: str | None,
        log: Path,
        *,
        scan_limit: int = 64,
        blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = 1024,
        env: dict[str, str] | None = None,
        args: tuple[str, ...] = (),
    ) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.base_url = f"http://127.0.0.1:{(port := free_port())}"
        metrics_port = free_port()
        self.policy_metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.ready_s: float | None = None
        self._env = _environment()
        if mode is not None:
            self._env |= {
                "COMPUTECACHE_MODE": mode,
                "COMPUTECACHE_SCAN_LIMIT": str(scan_limit),
                "COMPUTECACHE_METRICS_PORT": str(metrics_port),
            }
        self._env |= env or {}
        self.command = [
            *(("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(model), "--served-model-name", SERVED_MODEL),
            *("--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(max_model_len), "--max-num-seqs", "16"),
            *("--block-size", str(block_size), "--num-gpu-blocks-override", str(blocks)),
            *("--enable-prefix-caching", "--kv-cache-metrics", "--enable-prompt-tokens-details"),
            *args,
        ]

    def __enter__(self) -> EmbeddedServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> int:
        """Start the server's process without waiting for it; returns its process group.

        `stop` must follow. Raises ServerError when this Python has no vllm.
        """
        vllm_folder()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        # A folder of its own: the repository's vllm/ must not be on the import path.
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self.log.parent,
                start_new_session=True,
            )
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """What the server's first process ended with (negative: the signal), None while it runs."""
        return self.process.poll() if self.process else None

    def wait_for_exit(self, timeout_s: float) -> int | None:
        """Return `exit_code` as soon as the first process ends, or None after `timeout_s`."""
        if self.process is None:
            return None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End every process of the server; TERM first, so that it closes its engine itself."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            if self.wait_for_exit(STOP_TIMEOUT_S) is None:
                self.process.kill()
                self.process.wait()
        stop_group(self.process.pid)

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _failed(self, what: str) -> ServerError:
        reason = cause(self.log.read_text(errors="replace"))
        first = f"{what}: {reason}; the end of {self.log}" if reason else what
        return ServerError(f"{first}:\n{self.log_tail()}")

    def wait_until_ready(self) -> None:
        """Return once /health answers. Raises ServerError when the server ends or stays silent."""
        while time.monotonic() < self._started + READY_TIMEOUT_S:
            if self.exit_code is not None:
                raise self._failed(f"the server ended with {self.exit_code}")
            if healthy(self.base_url):
                self.ready_s = round(time.monotonic() - self._started, 1)
                return
            time.sleep(0.2)
        raise self._failed(f"no answer within {READY_TIMEOUT_S} s")


def _environment() -> dict[str, str]:
    """Return this process's environment without the policy's settings, for a server on the CPU."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:8]))
    return {k: v for k, v in os.environ.items() if not k.startswith("COMPUTECACHE_")} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_NO_USAGE_STATS": "1",
    }
