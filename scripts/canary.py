# SPDX-License-Identifier: Apache-2.0
"""The canary: baseline in lru, candidate in active, rollback to lru, and a verdict.

    canary.py run --target embedded            a real CPU server, started and stopped here
    canary.py run --target compose             the stack of compose.yaml, one service recreated
    canary.py run --target url --baseline-url A --candidate-url B

Whatever happens (a failed request, a crash, Ctrl-C, TERM), the target is left in lru; only
`--promote` after an ACCEPT leaves a Compose stack, and its .env, in active. Writes canary.json,
canary.html and release.json to --out. docs/canary.md says how to read them.

Exit 0: ACCEPT. 1: REJECT. 2: INCONCLUSIVE, bad usage, or it could not run. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys

from drills.checks import never_lost
from drills.options import add_drill_options, limits, refuse_short_prefix
from drills.report import write_reports
from drills.session import Session, exit_code_of, open_session
from drills.verdict import judge
from drills.visit import Mode, Role
from serving.command import run_command
from serving.console import say
from serving.options import add_workload_options, parse_workload, positive, workload_settings
from serving.secret import redacted_record

DEFAULTS = {"repetitions": 6, "flood_requests": 5, "control_requests": 4, "survival": [1, 2, 3, 4]}


def schedule(repeats: int) -> list[Role]:
    """Return the role of each visit: pairs in ABBA order, and lru as the last, the rollback."""
    order: list[Role] = []
    for pair in range(repeats):
        order += ["candidate", "baseline"] if pair % 2 else ["baseline", "candidate"]
    if order[-1] == "baseline":
        order.pop()
    return [*order, "rollback"]


def make_visits(canary: Session) -> None:
    """Visit in the order of `schedule`; after a fault no further candidate is started."""
    options = canary.options
    roles = schedule(options.repeats)
    turns = {"lru": 0, "candidate": 0}
    while roles:
        role = roles.pop(0)
        side = "candidate" if role == "candidate" else "lru"
        mode: Mode = options.candidate_mode if side == "candidate" else "lru"
        number = len(canary.visits) + 1
        say(f"[{number}/{number + len(roles)}] {role}: {mode}")
        # A server that stays up must not see a prompt again; a new one may.
        seed = options.seed + (0 if canary.target.restarts else turns[side])
        turns[side] += 1
        visit = canary.visit(role, mode, seed=seed)
        if not visit.healthy or (role == "baseline" and visit.report and never_lost(visit.report)):
            # Before any candidate there is nothing to roll back from.
            roles = roles[-1:] if turns["candidate"] else []


def run(options: argparse.Namespace) -> int:
    """Run the whole canary and write its records; returns the exit code."""
    with open_session(options) as canary:
        canary.run(lambda: make_visits(canary))
        verdict = judge(canary.visits, limits(options))
        record = canary.finish(verdict, options.promote) | {
            "candidate_mode": options.candidate_mode,
            "settings": workload_settings(options) | {"repeats": options.repeats},
            "limits": vars(limits(options)),
        }
        files = write_reports(options.out, canary.visits, record, verdict)
        canary.close(record, verdict.outcome)
    answer = {"outcome": verdict.outcome, "reasons": verdict.reasons, "files": files}
    print(json.dumps(redacted_record(answer)), flush=True)
    say(verdict.outcome)
    return verdict.exit_code


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ends the process with 2 when it cannot be understood."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command = parser.add_subparsers(required=True).add_parser("run", help="run the canary")
    add_drill_options(command, ("embedded", "compose", "url"))
    add = command.add_argument
    add("--repeats", type=positive, default=1, help="lru/candidate pairs of visits, in ABBA order")
    add("--candidate-mode", choices=("active", "lru"), default="active", help="lru: see a REJECT")
    add("--promote", action="store_true", help="compose: leave the stack in active on ACCEPT")
    add("--baseline-url", help="url: the server in lru")
    add("--baseline-policy-url", action="append", help="its policy metrics, once an engine")
    add("--candidate-url", help="url: the server in the candidate's mode")
    add("--candidate-policy-url", action="append", help="its policy metrics, once an engine")
    add_workload_options(command)
    command.set_defaults(**DEFAULTS, seed=None)
    options = parse_workload(parser, argv)
    if options.promote and options.target != "compose":
        parser.error("--promote is for --target compose")
    refuse_short_prefix(parser, options)
    if options.seed is None:
        # Servers that stay up may remember the prompts of an earlier canary. Not the time: a clock
        # may jump back to that of an earlier one.
        options.seed = secrets.randbelow(2**31) if options.target == "url" else 0
    return options


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(run, parse(argv))


if __name__ == "__main__":
    sys.exit(run_command(main, result="in --out"))
