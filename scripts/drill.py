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
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from embedded_server import ServerError
from env_file import EnvFileError
from make_model import make_model
from prefix_pressure import press
from server_metrics import MetricsError
from targets import SIGNALS, ComposeTarget, EmbeddedTarget, TargetError, UrlTarget
from verdict import FAIL, UNKNOWN, Limits, Verdict
from workload import Client, Result, WorkloadError, read_api_key
from workload_options import positive

REPO = Path(__file__).resolve().parent.parent
# What a visit can end with; anything else is a bug and shows its traceback.
EXPECTED_ERRORS = (ServerError, MetricsError, TargetError, EnvFileError, WorkloadError)
DYING_S = 5.0  # from the first request that fails until a server that was killed has ended


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, TERM or HUP arrived; the text names the signal."""


def say(text: str) -> None:
    """Tell the operator about progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class State:
    """What a later run must know if this one is killed: a small JSON file, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict = json.loads(path.read_text()) if path.is_file() else {}

    def save(self, **changes: object) -> None:
        """Change some values and write all of them."""
        self.values |= changes
        part = self.path.with_suffix(".partial")
        part.write_text(json.dumps(self.values, indent=1))
        os.replace(part, self.path)


class Drill:
    """A drill in progress: `visits` so far, and `interrupted`, a sentence once a signal came."""

    def __init__(self, options: argparse.Namespace, target, state: State) -> None:
        self.options, self.target, self.state = options, target, state
        self.started_at = now()
        self.visits: list[dict] = []
        self.interrupted: str | None = None

    def visit(self, role: str, mode: str, *, scan_limit: int | None = None, seed: int = 0) -> dict:
        """Run the workload once against a server in `mode`; returns the visit, also in `visits`.

        A server that cannot be reached or dies is in the visit's "error".
        """
        self.state.save(phase=role, mode=mode)
        found = {
            "role": role,
            "mode_asked": mode,
            "number": len(self.visits) + 1,
            "report": None,
            "error": None,
            "started_at": now(),
        }
        options = argparse.Namespace(**{**vars(self.options), "seed": seed})
        try:
            with self.target.visit(role, mode, found["number"], scan_limit) as site:
                say(f"  ready{f' after {site.ready_s} s' if site.ready_s else ''}: {site.base_url}")
                found["ready_s"] = site.ready_s
                patience_s = DYING_S
                try:
                    asyncio.run(_measure(site, options, found))
                    if healthy(found):
                        patience_s = 0.0
                except Interrupted:
                    patience_s = 0.0
                    raise
                finally:
                    if (code := site.exit_code(patience_s)) is not None:
                        found["error"] = f"the server ended by itself with {code}"
                found["identity"] = self.target.identity()
        except EXPECTED_ERRORS as error:
            found["error"] = found["error"] or str(error)
            say(f"  {error}")
        found["finished_at"] = now()
        self.visits.append(found)
        return found

    def run(self, steps: Callable[[], None]) -> None:
        """Run `steps`, which make the visits; a signal ends them and is in `interrupted`."""
        try:
            steps()
        except Interrupted as signal_name:
            self.interrupted = f"interrupted by {signal_name} in phase {self.state.values['phase']}"
            say(f"{self.interrupted}; leaving the target in lru")
        except BaseException:
            self.target.leave_in_lru()  # a bug: no verdict, but lru all the same
            raise
        ignore_signals()

    def finish(self, verdict: Verdict, promote: bool = False) -> dict:
        """Leave the target in lru, or in active after an ACCEPT with `promote`.

        Adds what went wrong to the verdict; returns how things are left.
        """
        if self.interrupted:
            verdict.add("interrupted", UNKNOWN, self.interrupted)
        mode, left = "active", "promoted: the stack runs with COMPUTECACHE_MODE=active"
        try:
            if promote and verdict.exit_code == 0:
                self.target.promote()
            else:
                mode, left = "lru", self.target.leave_in_lru()
        except (TargetError, EnvFileError) as error:
            mode, left = self._restore_after(error, verdict, mode)
        return {
            "started_at": self.started_at,
            "finished_at": now(),
            "target": self.target.name,
            "final_mode": mode,
            "left": left,
        }

    def _restore_after(self, error: Exception, verdict: Verdict, mode: str) -> tuple[str, str]:
        """Go back to lru after a failed promotion, or say that lru could not be restored."""
        if mode == "active":
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


async def _measure(site, options: argparse.Namespace, found: dict) -> None:
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
        found["vllm"] = await client.version()
        found["report"] = await press(client, options, site.policy, progress)


def _leave_out_interruption(loop: asyncio.AbstractEventLoop, context: dict) -> None:
    # A signal that arrives inside a request is raised there and, once more, out of the loop.
    if not isinstance(context.get("exception"), Interrupted):
        loop.default_exception_handler(context)


def healthy(visit: dict) -> bool:
    """Tell whether a visit can be judged at all."""
    report = visit["report"]
    return bool(report) and not (visit["error"] or report["failures"] or report["problems"])


@contextmanager
def drill(options: argparse.Namespace) -> Iterator[Drill]:
    """Hold the output folder's lock, mend what a killed drill left, and catch signals.

    Raises TargetError when another drill holds the folder or the target cannot be used.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "canary.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetError(f"another drill is running with --out {options.out}") from None
        state = State(options.out / "canary-state.json")
        target = make_target(options, state.save)
        before = state.values
        if not before.get("finished", True) and before["target"] == target.name:
            say(f"the last drill was killed in phase {before['phase']}: cleaning up after it")
            target.recover(before)
        state.values = {"target": target.name, "started_at": now()}
        state.save(phase="start", mode="lru", finished=False)
        with signals_as_interruption():
            yield Drill(options, target, state)


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


@contextmanager
def signals_as_interruption() -> Iterator[None]:
    """Raise Interrupted at the first signal; later ones are ignored, so that every `finally` runs.

    What follows the first one is the way back to lru.
    """

    def stop(number: int, frame: object) -> None:
        ignore_signals()
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Let the way back to lru, which is short, finish whatever arrives."""
    for number in SIGNALS:
        # Not SIG_IGN: a command that the way back starts would inherit that.
        signal.signal(number, lambda number, frame: None)


def exit_code_of(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a whole drill; 2 with a message when it could not even be begun."""
    try:
        return run(options)
    except EXPECTED_ERRORS as error:
        say(f"not run: {error}")
    except KeyboardInterrupt:
        say("interrupted before the first visit")
    return 2


def limits(options: argparse.Namespace) -> Limits:
    """Return what the candidate is held to; a CPU that also runs the client is noisy."""
    regression = options.ttft_regression
    if regression is None:
        regression = 2.0 if options.target == "embedded" else 0.05
    return Limits(regression, options.ttft_p95_budget_ms, options.min_samples)


def share(text: str) -> float:
    """Parse "5%" or "0.05"."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a share such as 5% or 0.05")
    return value


def add_drill_options(parser: argparse.ArgumentParser, targets: tuple[str, ...]) -> None:
    """Add the options that say where a drill runs and what the candidate is held to."""
    add = parser.add_argument
    add("--target", choices=targets, required=True)
    add("--out", type=Path, default=REPO / "out")
    add("--model", help="served model name (default: what the server lists first)")
    add("--project", type=Path, default=REPO, help="folder of compose.yaml and .env")
    add("--ready-timeout", type=positive, default=1800, help="compose: seconds to become healthy")
    add("--scan-limit", type=positive, default=64, help="embedded: COMPUTECACHE_SCAN_LIMIT")
    add("--blocks", type=positive, default=64, help="embedded: blocks of 32 tokens in the pool")
    add("--max-model-len", type=positive, default=1024, help="embedded: longest request in tokens")
    add("--ttft-regression", type=share, help="p95 TTFT allowed above lru's (5%%; embedded 200%%)")
    add("--ttft-p95-budget-ms", type=float, help="instead: no p95 TTFT above this")
    add("--min-samples", type=positive, default=5, help="pairs of repetitions needed")
