# SPDX-License-Identifier: Apache-2.0
"""From the visits of a canary to ACCEPT, REJECT or INCONCLUSIVE, with the numbers for each.

A visit is one run of the workload against one server: {"role", "mode_asked", "report", "error"},
where report is what press.press returned, or None when the server never answered.

The last lru visit is the rollback; it counts as baseline too, so that a machine that gets slower
or faster meanwhile does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drills.bootstrap import (
    CONFIDENCE_PERCENT,
    compare_outputs,
    kept_difference,
    pair_repetitions,
    ttft_ratios,
)

ACCEPT, REJECT, INCONCLUSIVE = "ACCEPT", "REJECT", "INCONCLUSIVE"
EXIT_CODES = {ACCEPT: 0, REJECT: 1, INCONCLUSIVE: 2}
PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"
JUDGED_KINDS = {
    "hot_replay": "hot replay",
    "hot": "hot prefix",
    "flood": "flood",
    "control": "zero-reuse control",
    "session_start": "first turn",
    "session_turn": "later turn",
    "trace": "trace",
}
# Of what a cache of any size could serve. Blocks larger than 16 tokens cost the rest.
NOTHING_LOST = 0.95


@dataclass(frozen=True)
class Limits:
    """What the candidate is held to.

    ttft_regression: a p95 time to first token may be this share above the baseline's.
    ttft_p95_budget_ms: or, instead, no p95 may be above this many milliseconds.
    min_samples: repetitions below which nothing is concluded.
    """

    ttft_regression: float = 0.05
    ttft_p95_budget_ms: float | None = None
    min_samples: int = 5


@dataclass
class Verdict:
    """One entry of `checks` for each question asked, and the numbers behind them."""

    checks: list[dict] = field(default_factory=list)
    statistics: dict = field(default_factory=dict)

    def add(self, name: str, status: str, detail: str) -> None:
        """Add a check that is not about the workload."""
        self.checks.append(_check(name, status, detail))

    @property
    def outcome(self) -> str:
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


def judge(visits: list[dict], limits: Limits) -> Verdict:
    """Judge a finished canary. Visits come in the order in which they ran."""
    baselines = [v for v in visits if v["role"] != "candidate"]
    candidates = [v for v in visits if v["role"] == "candidate"]
    checks = _gates(visits, baselines, candidates)
    if not candidates:
        return Verdict([*checks, _check("candidate", UNKNOWN, "no candidate was run")])
    if _all_pass(checks):
        checks.append(_samples(baselines, candidates, limits))
    statistics: dict = {}
    if _all_pass(checks):
        settings = baselines[0]["report"]["settings"]
        pairs = pair_repetitions(baselines, candidates)
        # On servers that stay up the last lru visit had prompts that no candidate had.
        seeds = {v["report"]["seed"] for v in candidates}
        same_prompts = [v for v in baselines if v["report"]["seed"] in seeds]
        statistics["kept_tokens"] = kept_difference(pair_repetitions(same_prompts, candidates))
        statistics["ttft"] = {
            kind: ratios
            for kind in JUDGED_KINDS
            if (ratios := ttft_ratios(pairs, baselines, kind)) is not None
        }
        statistics["outputs"] = compare_outputs(baselines, candidates)
        checks += [
            _kept(statistics["kept_tokens"], hot=settings["shape"] == "pressure"),
            *(_ttft(kind, ratios, limits) for kind, ratios in statistics["ttft"].items()),
            _outputs(
                statistics["outputs"],
                judged=settings["shape"] == "pressure" and settings["concurrency"] == 1,
            ),
        ]
    return Verdict([*checks, _rollback(visits)], statistics)


def judge_lru(visits: list[dict]) -> Verdict:
    """Judge the lru visits alone: they served, lost the prefix, and the last was a rollback."""
    baselines = [v for v in visits if v["role"] != "candidate"]
    return Verdict([*_gates(baselines, baselines, []), _rollback(visits)])


def _gates(visits: list[dict], baselines: list[dict], candidates: list[dict]) -> list[dict]:
    """Return the checks without which the numbers mean nothing; the last only if the rest pass."""
    gates = [_requests(baselines, candidates)]
    if any(visit["report"] for visit in visits):
        gates += [_modes(visits), _counters(visits), _installation(visits)]
    return [*gates, _pressure(baselines)] if _all_pass(gates) else gates


def never_lost(report: dict) -> bool:
    """Tell whether a report of lru shows no loss at all, so that there is nothing to protect."""
    if report["settings"]["shape"] == "pressure":
        warm = report["warm_prefix_cached_tokens"]
        return bool(warm) and report["post_flood_cached_tokens"] == warm
    return served_tokens(report) >= NOTHING_LOST * report["reusable_tokens"]


def served_tokens(report: dict) -> int:
    """Return the prompt tokens that a report's requests found in the cache."""
    return sum(tokens["cached"] for tokens in report["tokens"].values())


def _all_pass(checks: list[dict]) -> bool:
    return all(check["status"] == PASS for check in checks)


def _check(name: str, status: str, detail: str) -> dict:
    return {"name": name, "status": status, "detail": detail}


def _requests(baselines: list[dict], candidates: list[dict]) -> dict:
    def faults(visits: list[dict]) -> list[str]:
        found = []
        for visit in visits:
            where = f"{visit['role']} ({visit['mode_asked']})"
            if visit["report"] is None:
                found.append(f"{where}: {visit['error']}")
            elif failed := visit["report"]["failures"]:
                sent = visit["report"]["requests"]["sent"]
                ended = f"; {visit['error']}" if visit["error"] else ""
                found.append(
                    f"{where}: {len(failed)} of {sent} requests failed, the first: "
                    f"{failed[0]['error']}{ended}"
                )
        return found

    if not baselines:
        return _check("requests", UNKNOWN, "no server was measured")
    if bad := faults(candidates):
        return _check("requests", FAIL, "; ".join(bad))
    if bad := faults(baselines):
        return _check("requests", UNKNOWN, "; ".join(bad))
    sent = sum(v["report"]["requests"]["sent"] for v in [*baselines, *candidates])
    return _check("requests", PASS, f"all {sent} requests were answered")


def _modes(visits: list[dict]) -> dict:
    wrong = [
        f"{v['role']}: asked for {v['mode_asked']}, the server reports {v['report']['mode']}"
        for v in visits
        if v["report"] and v["report"]["mode"] != v["mode_asked"]
    ]
    if wrong:
        return _check("mode", UNKNOWN, "; ".join(wrong))
    asked = " and ".join(dict.fromkeys(v["mode_asked"] for v in visits))
    return _check("mode", PASS, f"the servers report {asked} as asked")


def _installation(visits: list[dict]) -> dict:
    identities = [visit.get("identity", {}) for visit in visits]
    seen = [identity["installation"] for identity in identities if "installation" in identity]
    if any(one != seen[0] for one in seen):
        return _check("installation", UNKNOWN, "the installed files changed during the run")
    return _check("installation", PASS, "every visit ran the same installation")


def _counters(visits: list[dict]) -> dict:
    problems = [
        f"{v['role']}: {problem}"
        for v in visits
        for problem in (v["report"]["problems"] if v["report"] else [])
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return _check("counters", UNKNOWN, "; ".join(problems[:3]) + more)
    return _check("counters", PASS, "the servers' counters agree with the answers' own usage")


def _samples(baselines: list[dict], candidates: list[dict], limits: Limits) -> dict:
    pairs = len(pair_repetitions(baselines, candidates))
    status = PASS if pairs >= limits.min_samples else UNKNOWN
    remedy = "" if status == PASS else ": give more --repetitions or --repeats"
    return _check("samples", status, f"{pairs} pairs, {limits.min_samples} needed{remedy}")


def _pressure(baselines: list[dict]) -> dict:
    reports = [v["report"] for v in baselines]
    if reports[0]["settings"]["shape"] != "pressure":
        served, reusable = served_tokens(reports[0]), reports[0]["reusable_tokens"]
        text = f"lru served {served} of {reusable} tokens that a larger cache could have served"
        if any(never_lost(report) for report in reports):
            return _check("pressure", UNKNOWN, f"{text}: too little to win, nothing was tested")
        return _check("pressure", PASS, text)
    warm = reports[0]["warm_prefix_cached_tokens"]
    if not warm:
        return _check("pressure", UNKNOWN, "the warmed prefix was never served from the cache")
    if any(never_lost(report) for report in reports):
        return _check(
            "pressure",
            UNKNOWN,
            f"lru kept all {warm} tokens through the flood, so nothing was tested: "
            "flood with more or longer prompts, or give the server fewer blocks",
        )
    lost = warm - max(report["post_flood_cached_tokens"] for report in reports)
    return _check("pressure", PASS, f"lru lost {lost} of {warm} hot tokens under the flood")


def _kept(numbers: dict, hot: bool) -> dict:
    low, high = numbers["difference_interval"]
    text = (
        f"tokens found in the cache by a {'hot replay' if hot else 'request'}: "
        f"candidate {numbers['candidate_mean']:g}, lru {numbers['baseline_mean']:g} "
        f"(difference {numbers['difference_mean']:+g}, "
        f"{CONFIDENCE_PERCENT}% interval {low:g} to {high:g})"
    )
    if low > 0:
        return _check("kept", PASS, text)
    if numbers["difference_mean"] > 0:
        return _check("kept", UNKNOWN, f"{text}: too uncertain, give more requests")
    return _check("kept", FAIL, f"{text}: no more than lru")


def _ttft(kind: str, numbers: dict, limits: Limits) -> dict:
    p95 = numbers["p95"]
    low, high = p95["ratio_interval"]
    text = f"{JUDGED_KINDS[kind]} TTFT p95: candidate {p95['candidate_ms']:.1f} ms"
    name = f"ttft_{kind}"
    if limits.ttft_p95_budget_ms is not None:
        status = PASS if p95["candidate_ms"] <= limits.ttft_p95_budget_ms else FAIL
        return _check(name, status, f"{text}, budget {limits.ttft_p95_budget_ms:g} ms")
    text += (
        f", lru {p95['baseline_ms']:.1f} ms (ratio {p95['ratio']:.2f}, {CONFIDENCE_PERCENT}% "
        f"interval {low:.2f} to {high:.2f}; allowed {1 + limits.ttft_regression:.2f})"
    )
    # Clearly worse: beyond the allowance with confidence, and than every single lru visit.
    allowed = 1 + limits.ttft_regression
    beyond_every_visit = p95["candidate_ms"] > allowed * p95["slowest_baseline_ms"]
    if low > allowed and beyond_every_visit:
        return _check(name, FAIL, f"{text}: clearly worse")
    return _check(name, PASS, text)


def _outputs(numbers: dict, judged: bool) -> dict:
    same = numbers["compared"] - numbers["different"]
    text = f"{same} of {numbers['compared']} outputs at temperature 0 equal lru's"
    if not judged:
        # Which requests share a batch, and how much of a prompt was cached, moves the rounding.
        return _check("outputs", PASS, f"{text} (reported, not judged for this workload)")
    if numbers["different"]:
        return _check("outputs", FAIL, f"{text}; different: {numbers['different_keys']}")
    return _check("outputs", PASS, text)


def _rollback(visits: list[dict]) -> dict:
    if not visits or visits[-1]["role"] != "rollback":
        return _check("rollback", UNKNOWN, "the rollback to lru was not run")
    report = visits[-1]["report"]
    if report is None:
        return _check("rollback", FAIL, f"the rollback did not serve: {visits[-1]['error']}")
    served = report["requests"]["sent"] - report["requests"]["failed"]
    text = f"after the rollback the server reports {report['mode']} and served {served} requests"
    good = report["mode"] == "lru" and served and not report["requests"]["failed"]
    return _check("rollback", PASS if good else FAIL, text)
