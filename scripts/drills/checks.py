# SPDX-License-Identifier: Apache-2.0
"""The questions that a verdict asks of the visits, each with its answer in a sentence.

FAIL speaks against the candidate, UNKNOWN leaves open whether anything does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from drills.bootstrap import CONFIDENCE_PERCENT
from drills.visit import Visit
from serving.console import of_few
from serving.summary import Report

Status = Literal["pass", "fail", "unknown"]
PASS: Status = "pass"
FAIL: Status = "fail"
UNKNOWN: Status = "unknown"
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
# Visits of which a tier served shares this close computed nearly the same.
SAME_SHARE = 0.05


class Check(TypedDict):
    """One question asked of a drill. `detail`: the answer in a sentence, with its numbers."""

    name: str
    status: Status
    detail: str


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


def make_check(name: str, status: Status, detail: str) -> Check:
    """Return one entry of a verdict's checks."""
    return {"name": name, "status": status, "detail": detail}


def reports_of(visits: list[Visit]) -> list[Report]:
    """Return the reports of the visits whose servers answered."""
    return [visit.report for visit in visits if visit.report is not None]


def never_lost(report: Report) -> bool:
    """Tell whether a report of lru shows no loss at all, so that there is nothing to protect."""
    if report["settings"]["shape"] == "pressure":
        warm = report["warm_prefix_cached_tokens"]
        return bool(warm) and report["post_flood_cached_tokens"] == warm
    return served_tokens(report) >= NOTHING_LOST * report["reusable_tokens"]


def served_tokens(report: Report) -> int:
    """Return the prompt tokens that a report's requests found in the cache."""
    return sum(tokens["cached"] for tokens in report["tokens"].values())


def requests(baselines: list[Visit], candidates: list[Visit]) -> Check:
    """Was every request answered? One that lru leaves open says nothing of the candidate."""
    if not baselines:
        return make_check("requests", UNKNOWN, "no server was measured")
    if bad := _request_faults(candidates):
        return make_check("requests", FAIL, "; ".join(bad))
    if bad := _request_faults(baselines):
        return make_check("requests", UNKNOWN, "; ".join(bad))
    sent = sum(r["requests"]["sent"] for r in reports_of([*baselines, *candidates]))
    return make_check("requests", PASS, f"all {sent} requests were answered")


def _request_faults(visits: list[Visit]) -> list[str]:
    found = []
    for visit in visits:
        where = f"{visit.role} ({visit.mode_asked})"
        if visit.report is None:
            found.append(f"{where}: {visit.error}")
        elif failed := visit.report["failures"]:
            sent = visit.report["requests"]["sent"]
            ended = f"; {visit.error}" if visit.error else ""
            found.append(
                f"{where}: {len(failed)} of {sent} requests failed, the first: "
                f"{failed[0]['error']}{ended}"
            )
    return found


def modes(visits: list[Visit]) -> Check:
    """Did each server report the mode that was asked for?"""
    wrong = [
        f"{v.role}: asked for {v.mode_asked}, the server reports {v.report['mode']}"
        for v in visits
        if v.report and v.report["mode"] != v.mode_asked
    ]
    if wrong:
        return make_check("mode", UNKNOWN, "; ".join(wrong))
    asked = " and ".join(dict.fromkeys(v.mode_asked for v in visits))
    return make_check("mode", PASS, f"the servers report {asked} as asked")


def installation(visits: list[Visit]) -> Check:
    """Did the files that the targets can read stay the same?"""
    identities = [visit.identity for visit in visits if visit.identity]
    seen = [identity["installation"] for identity in identities if "installation" in identity]
    if any(one != seen[0] for one in seen):
        return make_check("installation", UNKNOWN, "the installed files changed during the run")
    return make_check("installation", PASS, "every visit ran the same installation")


def counters(visits: list[Visit]) -> Check:
    """Do the servers' counters agree with what was sent and answered?"""
    problems = [
        f"{v.role}: {problem}" for v in visits if v.report for problem in v.report["problems"]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return make_check("counters", UNKNOWN, "; ".join(problems[:3]) + more)
    return make_check("counters", PASS, "the servers' counters agree with the answers' own usage")


def samples(pairs: int, limits: Limits) -> Check:
    """Are there enough pairs of repetitions to conclude anything?"""
    status = PASS if pairs >= limits.min_samples else UNKNOWN
    remedy = "" if status == PASS else ": give more --repetitions or --repeats"
    return make_check("samples", status, f"{pairs} pairs, {limits.min_samples} needed{remedy}")


def pressure(reports: list[Report]) -> Check:
    """Did lru lose something that a policy could have kept?"""
    if reports[0]["settings"]["shape"] != "pressure":
        served, reusable = served_tokens(reports[0]), reports[0]["reusable_tokens"]
        text = f"lru served {served} of {reusable} tokens that a larger cache could have served"
        if any(never_lost(report) for report in reports):
            return make_check("pressure", UNKNOWN, f"{text}: too little to win, nothing was tested")
        return make_check("pressure", PASS, text)
    warm = reports[0]["warm_prefix_cached_tokens"]
    if not warm:
        return make_check("pressure", UNKNOWN, "the warmed prefix was never served from the cache")
    if any(never_lost(report) for report in reports):
        return make_check(
            "pressure",
            UNKNOWN,
            f"lru kept all {warm} tokens through the flood, so nothing was tested: "
            "flood with more or longer prompts, or give the server fewer blocks",
        )
    after_floods = [r["post_flood_cached_tokens"] for r in reports]
    known = [tokens for tokens in after_floods if tokens is not None]
    if len(known) < len(after_floods):
        text = "the hot prompt was not sent again after a flood: raise --max-requests"
        return make_check("pressure", UNKNOWN, text)
    lost = warm - max(known)
    return make_check("pressure", PASS, f"lru lost {lost} of {warm} hot tokens under the flood")


def kept(numbers: dict, hot: bool, limits: Limits) -> Check:
    """Did the candidate find more tokens in the cache, with confidence? `hot`: in hot replays."""
    if numbers["pairs"] < limits.min_samples:
        what = "a hot replay" if hot else "an answer"
        return make_check("kept", UNKNOWN, _too_few(what, numbers["pairs"], limits))
    low, high = numbers["difference_interval"]
    text = (
        f"tokens found in the cache by a {'hot replay' if hot else 'request'}: "
        f"candidate {numbers['candidate_mean']:g}, lru {numbers['baseline_mean']:g} "
        f"(difference {numbers['difference_mean']:+g}, "
        f"{CONFIDENCE_PERCENT}% interval {low:g} to {high:g})"
    )
    if low > 0:
        return make_check("kept", PASS, text)
    if numbers["difference_mean"] > 0:
        return make_check("kept", UNKNOWN, f"{text}: too uncertain, give more requests")
    return make_check("kept", FAIL, f"{text}: no more than lru")


def _too_few(what: str, pairs: int, limits: Limits) -> str:
    return (
        f"{pairs} pairs of repetitions have {what} in both modes, {limits.min_samples} needed: "
        "raise --max-requests or give --repeats"
    )


def tier(lru: list[Report], candidate: list[Report]) -> Check | None:
    """Did a tier serve the one-use prompts alike in every visit? None when no tier served.

    It outlives a restart of the server: what the first visit computed, the next ones may load.
    """
    reports = [*lru, *candidate]
    if not any("tier" in report for report in reports):
        return None
    served = [sum(_external(report) for report in side) for side in (lru, candidate)]
    shares = [_loaded_share(report) for report in reports]
    low, high = min(shares), max(shares)
    text = (
        f"beside the device, a tier served {served[0]} tokens in lru and {served[1]} in the "
        f"candidate; of the one-use prompts {low:.0%} to {high:.0%}"
    )
    if high - low <= SAME_SHARE:
        return make_check("tier", PASS, text)
    remedy = (
        "their times cannot be compared: empty the tier before each visit, run the servers without "
        "it, or run this again with the same --seed, so that every visit finds them there"
    )
    return make_check("tier", UNKNOWN, f"{text}: {remedy}")


def _external(report: Report) -> int:
    return report["tier"]["external_tokens"] if "tier" in report else 0


def _loaded_share(report: Report) -> float:
    """Return the share of the prompts not sent alone that came from a tier, 0 to 1."""
    if "tier" not in report or not report["tier"]["unassigned_prompt_tokens"]:
        return 0.0
    return report["tier"]["unassigned_tokens"] / report["tier"]["unassigned_prompt_tokens"]


def ttft(kind: str, numbers: dict, limits: Limits, hot: bool) -> Check:
    """Is p95 of a kind within the budget, or not clearly worse than lru's?

    `hot`: whether every repetition should have the kind. A stream may have it in its first parts
    alone, as it has the first turns of sessions: too few to compare, and no fault.
    """
    p95 = numbers["p95"]
    low, high = p95["ratio_interval"]
    count = numbers["samples"]["candidate"]
    few_of = f" (of {count} requests: near the slowest)" if of_few(count) else ""
    text = f"{JUDGED_KINDS[kind]} TTFT p95{few_of}: candidate {p95['candidate_ms']:.1f} ms"
    name = f"ttft_{kind}"
    if limits.ttft_p95_budget_ms is not None:
        status = PASS if p95["candidate_ms"] <= limits.ttft_p95_budget_ms else FAIL
        return make_check(name, status, f"{text}, budget {limits.ttft_p95_budget_ms:g} ms")
    if numbers["pairs"] < limits.min_samples:
        few = _too_few(f"a {JUDGED_KINDS[kind]} request", numbers["pairs"], limits)
        return make_check(name, UNKNOWN if hot else PASS, f"{text}, not judged: {few}")
    text += (
        f", lru {p95['baseline_ms']:.1f} ms (ratio {p95['ratio']:.2f}, {CONFIDENCE_PERCENT}% "
        f"interval {low:.2f} to {high:.2f}; allowed {1 + limits.ttft_regression:.2f})"
    )
    # Clearly worse: beyond the allowance with confidence, and than every single lru visit.
    allowed = 1 + limits.ttft_regression
    beyond_every_visit = p95["candidate_ms"] > allowed * p95["slowest_baseline_ms"]
    if low > allowed and beyond_every_visit:
        return make_check(name, FAIL, f"{text}: clearly worse")
    return make_check(name, PASS, text)


def outputs(numbers: dict, judged: bool) -> Check:
    """Did equal prompts get equal texts? `judged`: whether another text fails."""
    same = numbers["compared"] - numbers["different"]
    text = f"{same} of {numbers['compared']} outputs at temperature 0 equal lru's"
    if not judged:
        # Which requests share a batch, and how much of a prompt was cached, moves the rounding.
        return make_check("outputs", PASS, f"{text} (reported, not judged for this workload)")
    if numbers["different"]:
        return make_check("outputs", FAIL, f"{text}; different: {numbers['different_keys']}")
    return make_check("outputs", PASS, text)


def rollback(visits: list[Visit]) -> Check:
    """Did the last visit serve in lru?"""
    if not visits or visits[-1].role != "rollback":
        return make_check("rollback", UNKNOWN, "the rollback to lru was not run")
    report = visits[-1].report
    if report is None:
        return make_check("rollback", FAIL, f"the rollback did not serve: {visits[-1].error}")
    served = report["requests"]["sent"] - report["requests"]["failed"]
    text = f"after the rollback the server reports {report['mode']} and served {served} requests"
    good = report["mode"] == "lru" and served and not report["requests"]["failed"]
    return make_check("rollback", PASS if good else FAIL, text)
