# SPDX-License-Identifier: Apache-2.0
"""What every drill on a target shares: one at a time, visits, interruption, the way back to lru.

A drill is a sequence of visits to servers in given modes. Whatever ends it (its last visit, a
fault, a signal, kill -9), the target is brought back to lru: at once, or by the next drill.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from drills.checks import FAIL, UNKNOWN, Check, make_check
from drills.env_file import EnvFileError
from drills.options import make_target
from drills.record import RecordError, write_record
from drills.signals import Interrupted, ignore_signals, signals_as_interruption
from drills.targets import Site, Target, TargetError
from drills.verdict import Verdict
from drills.visit import Mode, Role, Visit
from servers.embedded import ServerError
from serving.client import Client
from serving.command import COULD_NOT_RUN, unexpected
from serving.console import now, say
from serving.metrics import MetricsError
from serving.press import press
from serving.requests import Result, WorkloadError
from serving.secret import read_api_key

# What a visit can end with; anything else is a bug, and ends the drill.
EXPECTED_ERRORS = (ServerError, MetricsError, TargetError, EnvFileError, WorkloadError)
STATE_NAME = "canary-state.json"
DYING_S = 5.0  # from the first request that fails until a server that was killed has ended


class State:
    """What a later run must know if this one is killed: a small JSON file, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict = {}

    def killed(self, target: str) -> dict | None:
        """Return what the last drill saved if it was killed on `target`, {} if that is unknown.

        None: there is nothing to mend.
        """
        try:
            before = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(self.path, error) from error
        except (ValueError, RecursionError):
            before = None
        if not _is_state(before):
            say(f"{self.path} is no record of a drill: taken for one that was killed")
            return {}
        return None if before["finished"] or before["target"] != target else before

    def save(self, **changes: object) -> None:
        """Change some values and write all of them. Raises RecordError."""
        self.values |= changes
        write_record(self.path, self.values)


def _is_state(values: object) -> bool:
    kinds = {"target": str, "phase": str, "finished": bool}
    return isinstance(values, dict) and all(isinstance(values.get(n), k) for n, k in kinds.items())


class Session:
    """A drill in progress: `visits` so far, and `ended_by`, a check, once it was ended early."""

    def __init__(self, options: argparse.Namespace, target: Target, state: State) -> None:
        self.options, self.target, self.state = options, target, state
        self.started_at = now()
        self.visits: list[Visit] = []
        self.ended_by: Check | None = None
        self.left = False  # whether `finish` has left the target as it should be

    def visit(
        self, role: Role, mode: Mode, *, scan_limit: int | None = None, seed: int = 0
    ) -> Visit:
        """Run the workload once against a server in `mode`; returns the visit, also in `visits`.

        A server that cannot be reached or dies is in the visit's `error`.
        """
        self.state.save(phase=role, mode=mode)
        visit = Visit(role, mode, len(self.visits) + 1)
        if scan_limit is not None:
            visit.scan_limit = scan_limit
        options = argparse.Namespace(**{**vars(self.options), "seed": seed})
        try:
            with self.target.visit(role, mode, visit.number, scan_limit) as site:
                say(f"  ready{f' after {site.ready_s} s' if site.ready_s else ''}: {site.base_url}")
                visit.ready_s = site.ready_s
                patience_s = DYING_S
                try:
                    asyncio.run(_measure(site, options, visit))
                    if visit.healthy:
                        patience_s = 0.0
                except Interrupted:
                    patience_s = 0.0
                    raise
                finally:
                    if (code := site.exit_code(patience_s)) is not None:
                        visit.error = f"the server ended by itself with {code}"
                visit.identity = self.target.identity()
        except EXPECTED_ERRORS as error:
            visit.error = visit.error or str(error)
            say(f"  {error}")
        visit.finished_at = now()
        self.visits.append(visit)
        return visit

    def run(self, steps: Callable[[], None]) -> None:
        """Run `steps`, which make the visits; a signal, a full disk or a bug ends them early."""
        try:
            steps()
        except Interrupted as signal_name:
            detail = f"interrupted by {signal_name} in phase {self.state.values['phase']}"
            self.ended_by = make_check("interrupted", UNKNOWN, detail)
        except RecordError as error:
            detail = f"ended before phase {self.state.values['phase']}: {error}"
            self.ended_by = make_check("records", UNKNOWN, detail)
        except Exception as error:  # a bug says nothing of the candidate: no verdict, but a record
            detail = f"ended in phase {self.state.values.get('phase')} by {unexpected(error)}"
            self.ended_by = make_check("unexpected", UNKNOWN, detail)
        ignore_signals()
        if self.ended_by:
            say(f"{self.ended_by['detail']}; leaving the target in lru")

    def finish(self, verdict: Verdict, promote: bool = False) -> dict:
        """Leave the target in lru, or in active after an ACCEPT with `promote`.

        Adds what went wrong to the verdict; returns how things are left.
        """
        if self.ended_by:
            verdict.checks.append(self.ended_by)
        promoting = promote and verdict.exit_code == 0
        mode, left = "active", "promoted: the stack runs with COMPUTECACHE_MODE=active"
        try:
            if promoting:
                with signals_as_interruption():  # what it began can be taken back
                    self.state.save(phase="promotion", mode="active")
                    self.target.promote()
            else:
                mode, left = "lru", self.target.leave_in_lru()
        except (TargetError, EnvFileError, RecordError, Interrupted) as error:
            mode, left = self._restore_after(error, verdict, promoting)
        say(left)
        self.left = True
        return {
            "started_at": self.started_at,
            "finished_at": now(),
            "target": self.target.name,
            "final_mode": mode,
            "left": left,
        }

    def _restore_after(
        self, error: BaseException, verdict: Verdict, promoting: bool
    ) -> tuple[str, str]:
        """Go back to lru after a failed promotion, or say that lru could not be restored."""
        if promoting:
            if isinstance(error, Interrupted):
                verdict.add("interrupted", UNKNOWN, f"interrupted by {error} in phase promotion")
            else:
                verdict.add("promote", FAIL, f"the promotion failed: {error}")
            try:
                return "lru", self.target.leave_in_lru()
            except (TargetError, EnvFileError) as second:
                error = second
        verdict.add("left_in_lru", FAIL, f"lru could not be restored: {error}")
        return "unknown", f"NOT RESTORED, see docs/canary.md: {error}"

    def close(self, left: dict, outcome: str) -> None:
        """Note the end. Without lru restored, the next drill begins by trying that again."""
        finished = left["final_mode"] != "unknown"
        self.state.save(phase="done", mode=left["final_mode"], finished=finished, outcome=outcome)


async def _measure(site: Site, options: argparse.Namespace, visit: Visit) -> None:
    def progress(result: Result) -> None:
        if result.error:
            say(f"    {result.request.kind}: FAILED: {result.error}")
        elif result.request.kind == "hot_replay":
            say(f"    hot replay: {result.cached_tokens} cached, {result.ttft_ms:.1f} ms")

    asyncio.get_running_loop().set_exception_handler(_leave_out_interruption)
    key = read_api_key(options.project / ".env")
    timeout_s = options.request_timeout
    async with Client(
        site.base_url, api_key=key, model=options.model, timeout_s=timeout_s
    ) as client:
        visit.vllm = await client.version()
        visit.report = await press(client, options, site.policy, progress)


def _leave_out_interruption(loop: asyncio.AbstractEventLoop, context: dict) -> None:
    # A signal that arrives inside a request is raised there and, once more, out of the loop.
    if not isinstance(context.get("exception"), Interrupted):
        loop.default_exception_handler(context)


@contextmanager
def open_session(options: argparse.Namespace) -> Iterator[Session]:
    """Hold the locks, mend what a killed drill left, and catch signals.

    Whatever is raised before `finish` has left the target as it should be, it is left in lru.
    Raises TargetError when another drill holds the folder or the stack or the target cannot be
    used, RecordError when the folder cannot be written, WorkloadError when the API key is no key.
    """
    with ExitStack() as locks:
        locks.enter_context(_locked(_lock_file(options.out), f"with --out {options.out}"))
        read_api_key(options.project / ".env")
        target = make_target(options, (state := State(options.out / STATE_NAME)).save)
        if target.name == "compose":
            # Of two drills with folders of their own, either would recreate the other's server.
            stack = _folder_file(options.project)
            locks.enter_context(_locked(stack, f"on the stack of {options.project}"))
        if (before := state.killed(target.name)) is not None:
            phase = before.get("phase", "unknown")
            say(f"the last drill was killed in phase {phase}: cleaning up after it")
            target.recover(before)
        target.begin()
        state.values = {"target": target.name, "started_at": now()}
        state.save(phase="start", mode="lru", finished=False)
        session = Session(options, target, state)
        with signals_as_interruption():
            try:
                yield session
            except BaseException:
                if not session.left:  # a bug: no verdict, but lru all the same
                    ignore_signals()
                    target.leave_in_lru()
                raise


def _lock_file(out: Path) -> int:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return os.open(out / "canary.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RecordError(out, error) from error


def _folder_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TargetError(
            f"{folder} cannot be opened ({error.strerror}): name --project"
        ) from error


@contextmanager
def _locked(file: int, what: str) -> Iterator[None]:
    """Hold an open file's lock, and close it. TargetError when another drill holds it."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetError(f"another drill is running {what}: wait for its end") from None
        except OSError as error:
            remedy = "give another folder, on a local disk"
            raise TargetError(
                f"nothing can be locked {what} ({error.strerror}): {remedy}"
            ) from error
        yield
    finally:
        os.close(file)


def exit_code_of(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a whole drill; 2 with a message when it could not be begun, or not be recorded."""
    try:
        return run(options)
    except EXPECTED_ERRORS as error:
        say(f"not run: {error}")
    except RecordError as error:
        say(f"not recorded, so nothing is decided: {error}")
    except KeyboardInterrupt:
        say("interrupted before the first visit")
    return COULD_NOT_RUN
