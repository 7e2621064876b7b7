# SPDX-License-Identifier: Apache-2.0
"""Process groups, ports and health of the servers that a command starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import httpx

from serving import http

STOP_TIMEOUT_S = 20


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing is bound to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group_members(group_id: int) -> list[int]:
    """Return the processes of a process group that still run (a zombie does not)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended while we looked
            continue
        if int(group) == group_id and state != "Z":
            members.append(int(stat.parent.name))
    return members


def stop_group(group_id: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End a process group: TERM, at most `timeout_s` seconds, then KILL. Gone already is fine."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not group_members(group_id):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group_id, number)
        deadline = time.monotonic() + timeout_s
        while group_members(group_id) and time.monotonic() < deadline:
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    reap(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def reap(pid: int) -> None:
    """Collect the exit status of a child, if `pid` is one that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def healthy(base_url: str) -> bool:
    """Whether a server answers /health with success, within 2 seconds."""
    try:
        return http.get(f"{base_url}/health", timeout_s=2).is_success
    except httpx.TransportError:
        return False


def command_line(process_id: int) -> bytes:
    """Return a process's command line with its NULs; empty when it has ended."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""
