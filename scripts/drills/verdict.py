# SPDX-License-Identifier: Apache-2.0
"""From the visits of a canary to ACCEPT, REJECT or INCONCLUSIVE, with the numbers for each.

The last lru visit is the rollback; it counts as baseline too, so that a machine that gets slower
or faster meanwhile does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from drills import checks
from drills.bootstrap import compare_outputs, kept_difference, pair_repetitions, ttft_ratios
from drills.checks import (
    FAIL,
    JUDGED_KINDS,
    PASS,
    UNKNOWN,
    Check,
    Limits,
    Status,
    make_check,
    reports_of,
)
from drills.visit import Visit
from serving.summary import Report

Outcome = Literal["ACCEPT", "REJECT", "INCONCLUSIVE"]
ACCEPT: Outcome = "ACCEPT"
REJECT: Outcome = "REJECT"
INCONCLUSIVE: Outcome = "INCONCLUSIVE"
EXIT_CODES = {ACCEPT: 0, REJECT: 1, INCONCLUSIVE: 2}


@dataclass
class Verdict:
    """One entry of `checks` for each question asked, and the numbers behind them."""

    checks: list[Check] = field(default_factory=list)
    statistics: dict = field(default_factory=dict)

    def add(self, name: str, status: Status, detail: str) -> None:
        """Add a check that is not about the workload."""
        self.checks.append(make_check(name, status, detail))

    @property
    def outcome(self) -> Outcome:
        found = {check["status"] for check in self.checks}
        return REJECT if FAIL in found else INCONCLUSIVE if UNKNOWN in found else ACCEPT

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def reasons(self) -> list[str]:
        """The checks that decided: what failed, else what could not be told, else what passed."""
        for status in (FAIL, UNKNOWN, PASS):
            if found := [c["detail"] for c in self.checks if c["status"] == status]:
                return found
        return []


def judge(visits: list[Visit], limits: Limits) -> Verdict:
    """Judge a finished canary. Visits come in the order in which they ran."""
    baselines = [v for v in visits if v.role != "candidate"]
    candidates = [v for v in visits if v.role == "candidate"]
    found = _gates(visits, baselines, candidates)
    if not candidates:
        return Verdict([*found, make_check("candidate", UNKNOWN, "no candidate was run")])
    statistics: dict = {}
    if _all_pass(found):
        lru, candidate = reports_of(baselines), reports_of(candidates)
        pairs = pair_repetitions(lru, candidate)
        found.append(checks.samples(len(pairs), limits))
        if _all_pass(found):
            statistics = _statistics(lru, candidate, pairs)
            found += [check] if (check := checks.tier(lru, candidate)) else []
            found += _compared(statistics, lru[0]["settings"], limits)
    return Verdict([*found, checks.rollback(visits)], statistics)


def judge_lru(visits: list[Visit]) -> Verdict:
    """Judge the lru visits alone: they served, lost the prefix, and the last was a rollback."""
    baselines = [v for v in visits if v.role != "candidate"]
    return Verdict([*_gates(baselines, baselines, []), checks.rollback(visits)])


def _gates(visits: list[Visit], baselines: list[Visit], candidates: list[Visit]) -> list[Check]:
    """Return the checks without which the numbers mean nothing; the last only if the rest pass."""
    gates = [checks.requests(baselines, candidates)]
    if any(visit.report for visit in visits):
        gates += [checks.modes(visits), checks.counters(visits), checks.installation(visits)]
    return [*gates, checks.pressure(reports_of(baselines))] if _all_pass(gates) else gates


def _statistics(lru: list[Report], candidate: list[Report], pairs: list[dict]) -> dict:
    """Return the numbers that the checks of the workload are made from."""
    # On servers that stay up the last lru visit had prompts that no candidate had.
    seeds = {report["seed"] for report in candidate}
    same_prompts = [report for report in lru if report["seed"] in seeds]
    return {
        "kept_tokens": kept_difference(pair_repetitions(same_prompts, candidate)),
        "ttft": {
            kind: ratios
            for kind in JUDGED_KINDS
            if (ratios := ttft_ratios(pairs, lru, kind)) is not None
        },
        "outputs": compare_outputs(lru, candidate),
    }


def _compared(statistics: dict, settings: dict, limits: Limits) -> list[Check]:
    """Return the checks of the candidate against lru; `settings` are the workload's options."""
    hot = settings["shape"] == "pressure"
    return [
        checks.kept(statistics["kept_tokens"], hot=hot, limits=limits),
        *(checks.ttft(kind, found, limits, hot) for kind, found in statistics["ttft"].items()),
        checks.outputs(statistics["outputs"], judged=hot and settings["concurrency"] == 1),
    ]


def _all_pass(found: list[Check]) -> bool:
    return all(check["status"] == PASS for check in found)
