# SPDX-License-Identifier: Apache-2.0
"""The canary: baseline in lru, candidate in active, rollback to lru, and a verdict.

    canary.py run --target embedded            a real CPU server, started and stopped here
    canary.py run --target compose             the stack of compose.yaml (switches .env)
    canary.py run --target url --baseline-url A --candidate-url B

Whatever happens (a failed request, a crash, Ctrl-C, TERM), the target is left in lru; only
`--promote` after an ACCEPT leaves a Compose stack in active. Writes canary.json, canary.html and
release.json to --out. docs/canary.md says how to read them.

Exit 0: ACCEPT. 1: REJECT. 2: INCONCLUSIVE, or bad usage. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from canary_report import write_reports
from embedded_server import ServerError
from make_model import make_model
from prefix_pressure import add_workload_options, positive, press, workload_settings
from server_metrics import MetricsError
from targets import ComposeTarget, EmbeddedTarget, EnvFileError, TargetError, UrlTarget
from verdict import FAIL, UNKNOWN, Limits, Verdict, judge, never_lost
from workload import Client, Result, WorkloadError, read_api_key

REPO = Path(__file__).resolve().parent.parent
# What a visit can end with; anything else is a bug and shows its traceback.
EXPECTED_ERRORS = (ServerError, MetricsError, TargetError, EnvFileError, WorkloadError)
DRILL = {"repetitions": 6, "flood_requests": 5, "control_requests": 4, "survival": [1, 2, 3, 4]}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, TERM or HUP arrived; the text names the signal."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def schedule(repeats: int, candidate_mode: str) -> list[tuple[str, str]]:
    """Return (role, mode) of each visit: pairs in ABBA order, and lru as the last, the rollback."""
    order: list[str] = []
    for pair in range(repeats):
        order += ["candidate", "baseline"] if pair % 2 else ["baseline", "candidate"]
    if order[-1] == "candidate":
        order.append("rollback")
    order[-1] = "rollback"
    return [(role, candidate_mode if role == "candidate" else "lru") for role in order]


class State:
    """What a later run must know if this one is killed: a small JSON file, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict = json.loads(path.read_text()) if path.is_file() else {}

    def save(self, **changes: object) -> None:
        self.values |= changes
        part = self.path.with_suffix(".partial")
        part.write_text(json.dumps(self.values, indent=1))
        os.replace(part, self.path)


@contextmanager
def only_one(out: Path):
    """Hold the lock of an output folder; TargetError when another canary holds it."""
    with (out / "canary.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetError(f"another canary is running with --out {out}") from None
        yield


def make_target(options: argparse.Namespace, save: Callable[..., None]):
    """Return the target that the options name."""
    if options.target == "embedded":
        return EmbeddedTarget(
            make_model(options.out / "model"),
            options.out,
            save,
            scan_limit=options.scan_limit,
            blocks=options.blocks,
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


def visit(target, options: argparse.Namespace, role: str, mode: str, number: int, seed: int):
    """Run the workload once; returns the visit, with "error" set when the server let it down."""
    found = {"role": role, "mode_asked": mode, "number": number, "report": None, "error": None}
    options = argparse.Namespace(**{**vars(options), "seed": seed})

    def progress(result: Result) -> None:
        if result.error:
            say(f"    {result.request.kind}: FAILED: {result.error}")
        elif result.request.kind == "hot_replay":
            say(f"    hot replay: {result.cached_tokens} cached, {result.ttft_ms:.1f} ms")

    async def measure(site) -> None:
        key = read_api_key(options.project / ".env")
        timeout_s = options.request_timeout
        async with Client(
            site.base_url, api_key=key, model=options.model, timeout_s=timeout_s
        ) as client:
            found["vllm"] = await client.version()
            found["report"] = await press(client, options, site.policy, progress)

    found["started_at"] = now()
    try:
        with target.visit(role, mode, number) as site:
            say(f"  ready{f' after {site.ready_s} s' if site.ready_s else ''}: {site.base_url}")
            found["ready_s"] = site.ready_s
            try:
                asyncio.run(measure(site))
            finally:
                if (code := site.exit_code()) is not None:
                    found["error"] = f"the server ended by itself with {code}"
            found["identity"] = target.identity()
    except EXPECTED_ERRORS as error:
        found["error"] = found["error"] or str(error)
        say(f"  {error}")
    found["finished_at"] = now()
    return found


def healthy(found: dict) -> bool:
    """Tell whether a visit can be judged at all."""
    report = found["report"]
    return bool(report) and not (found["error"] or report["failures"] or report["problems"])


def run_visits(target, options: argparse.Namespace, state: State, visits: list[dict]) -> None:
    """Append visits in order; after a fault no further candidate is started."""
    order = schedule(options.repeats, options.candidate_mode)
    turns = {"baseline": 0, "candidate": 0}
    while order:
        role, mode = order.pop(0)
        number = len(visits) + 1
        say(f"[{number}/{number + len(order)}] {role}: {mode}")
        state.save(phase=role, mode=mode, candidate_ran=state.values["candidate_ran"])
        if role == "candidate":
            state.save(candidate_ran=True)
        side = "candidate" if role == "candidate" else "baseline"
        # A server that stays up must not see a prompt again; a new one may.
        seed = options.seed + (0 if target.restarts else turns[side])
        turns[side] += 1
        found = visit(target, options, role, mode, number, seed)
        visits.append(found)
        untested = role == "baseline" and healthy(found) and never_lost(found["report"])
        if untested or not healthy(found):
            # Before any candidate there is nothing to roll back from.
            candidate_ran = any(v["role"] == "candidate" for v in visits)
            order = order[-1:] if candidate_ran and role != "rollback" else []


def run(options: argparse.Namespace) -> int:
    """Run the whole canary and write its records; returns the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    state = State(options.out / "canary-state.json")
    visits: list[dict] = []
    with only_one(options.out):
        target = make_target(options, state.save)
        unfinished = state.values if not state.values.get("finished", True) else None
        if unfinished and unfinished["target"] == target.name:
            say(f"the last canary was killed in phase {unfinished['phase']}: cleaning up after it")
            target.recover(unfinished)
        started_at = now()
        state.values = {"target": target.name, "started_at": started_at, "candidate_ran": False}
        state.save(phase="start", mode="lru", finished=False)
        interrupted = None
        with signals_as_interruption():
            try:
                run_visits(target, options, state, visits)
            except Interrupted as signal_name:
                interrupted = f"interrupted by {signal_name} in phase {state.values['phase']}"
                say(f"{interrupted}; leaving the target in lru")
            except BaseException:
                target.leave_in_lru()  # a bug: no verdict, but lru all the same
                raise
            ignore_signals()
            verdict = judge(visits, options.candidate_mode, limits(options))
            if interrupted:
                verdict.add("interrupted", UNKNOWN, interrupted)
            final_mode, left = finish(target, options, verdict)
        record = {
            "started_at": started_at,
            "finished_at": now(),
            "target": target.name,
            "candidate_mode": options.candidate_mode,
            "final_mode": final_mode,
            "left": left,
            "settings": workload_settings(options) | {"repeats": options.repeats},
            "limits": vars(limits(options)),
            "visits": visits,
        }
        files = write_reports(options.out, record, verdict, REPO)
        # Not finished when lru could not be restored: the next run begins by trying again.
        finished = final_mode != "unknown"
        state.save(phase="done", mode=final_mode, finished=finished, outcome=verdict.outcome)
    print(json.dumps({"outcome": verdict.outcome, "reasons": verdict.reasons, "files": files}))
    sys.stdout.flush()
    say(verdict.outcome)
    return verdict.exit_code


def finish(target, options: argparse.Namespace, verdict: Verdict) -> tuple[str, str]:
    """Leave the target as decided; returns the mode it is in and a sentence about it."""
    if options.promote and verdict.exit_code == 0:
        target.promote()
        return "active", "promoted: the stack runs with COMPUTECACHE_MODE=active"
    try:
        return "lru", target.leave_in_lru()
    except (TargetError, EnvFileError) as error:
        verdict.add("left_in_lru", FAIL, f"lru could not be restored: {error}")
        return "unknown", f"NOT RESTORED, see docs/canary.md: {error}"


def limits(options: argparse.Namespace) -> Limits:
    """Return what the candidate is held to; a CPU that also runs the client is noisy."""
    regression = options.ttft_regression
    if regression is None:
        regression = 1.0 if options.target == "embedded" else 0.05
    return Limits(regression, options.ttft_p95_budget_ms, options.min_samples)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_interruption():
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
        signal.signal(number, signal.SIG_IGN)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def share(text: str) -> float:
    """Parse "5%" or "0.05"."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a share such as 5% or 0.05")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command = parser.add_subparsers(required=True).add_parser("run", help="run the canary")
    add = command.add_argument
    add("--target", choices=("embedded", "compose", "url"), required=True)
    add("--out", type=Path, default=REPO / "out")
    add("--repeats", type=positive, default=1, help="lru/candidate pairs of visits, in ABBA order")
    add("--candidate-mode", choices=("active", "lru"), default="active", help="lru: see a REJECT")
    add("--promote", action="store_true", help="compose: leave the stack in active on ACCEPT")
    add("--model", help="served model name (default: what the server lists first)")
    add("--project", type=Path, default=REPO, help="folder of compose.yaml and .env")
    add("--ready-timeout", type=positive, default=1800, help="compose: seconds to become healthy")
    add("--scan-limit", type=positive, default=64, help="embedded: COMPUTECACHE_SCAN_LIMIT")
    add("--blocks", type=positive, default=64, help="embedded: blocks of 32 tokens in the pool")
    add("--baseline-url", help="url: the server in lru")
    add("--baseline-policy-url", action="append", help="its policy metrics, once an engine")
    add("--candidate-url", help="url: the server in the candidate's mode")
    add("--candidate-policy-url", action="append", help="its policy metrics, once an engine")
    add("--ttft-regression", type=share, help="p95 TTFT allowed above lru's (5%%; embedded 100%%)")
    add("--ttft-p95-budget-ms", type=float, help="instead: no p95 TTFT above this")
    add("--min-samples", type=positive, default=5, help="pairs of repetitions needed")
    add_workload_options(command)
    command.set_defaults(**DRILL)
    options = parser.parse_args(argv)
    if options.shape != "pressure":
        parser.error("the canary judges --shape pressure; prefix_pressure.py runs the others")
    if options.promote and options.target != "compose":
        parser.error("--promote is for --target compose")
    if options.target == "url" and "--seed" not in (argv or sys.argv):
        # The servers may remember the prompts of an earlier canary.
        options.seed = int(time.time())
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        return run(options)
    except EXPECTED_ERRORS as error:
        say(f"canary: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
