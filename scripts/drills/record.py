# SPDX-License-Identifier: Apache-2.0
"""What a canary leaves for other programs: canary.json (docs/canary.schema.json), release.json."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from drills.checks import JUDGED_KINDS, never_lost, reports_of, served_tokens
from drills.verdict import Verdict
from drills.visit import ABSENT, Absent, Role, Visit
from serving.files import REPO, replace_file
from serving.secret import redacted, redacted_record
from serving.summary import Report

SCHEMA_VERSION = 1


class RecordError(RuntimeError):
    """What a drill has to keep cannot be written or read; the message says what to do."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path}: {error.strerror or error}: make room and write access there, or give "
            "another folder as --out, and run this again"
        )


def write_record(path: Path, content: dict | str) -> None:
    """Write a drill's file in one step, a dict as strict JSON, without any secret.

    RecordError when it cannot be.
    """
    if isinstance(content, str):
        text = redacted(content)
    else:
        text = json.dumps(redacted_record(content), indent=1, allow_nan=False)
    try:
        # A server's text may hold half a surrogate pair, which UTF-8 cannot.
        replace_file(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise RecordError(path, error) from error


@dataclass(frozen=True)
class Phase:
    """What one visit shows, in the words of the table; docs/canary.schema.json has the same fields.

    phase: the visit's role. mode: as the server itself reported. hot_prefix: None for a workload
    without one hot prefix. ttft_p95_ms and ttft_samples (how many times it rests on): by kind, the
    control left out. None: nothing was measured.
    without one hot prefix. cached_tokens: on the device. external_tokens: from a KV tier.
    ttft_p95_ms: by kind, the control left out. None: nothing was measured.
    """

    phase: Role
    mode: str | None = None
    hot_prefix: Literal["kept", "lost"] | None = None
    cached_tokens: int | None = None
    reusable_tokens: int | None = None
    external_tokens: int | Absent = ABSENT
    warm_prefix_cached_tokens: int | None = None
    post_flood_cached_tokens: int | None = None
    hit_ratio: float | None = None
    ttft_p95_ms: dict[str, float] = field(default_factory=dict)
    ttft_samples: dict[str, int] = field(default_factory=dict)
    requests_served: int = 0
    requests_failed: int = 0
    error: str | None = None

    def record(self) -> dict:
        """Return it as canary.json holds it: without external_tokens where no tier served."""
        return {name: value for name, value in asdict(self).items() if value is not ABSENT}


def device_tokens(report: Report) -> int:
    """Return the prompt tokens that a report's requests found on the device."""
    unassigned = report["tier"]["unassigned_tokens"] if "tier" in report else 0
    return served_tokens(report) - unassigned


def phase_of(visit: Visit) -> Phase:
    """Return what a visit shows; all None and 0 when its server never answered."""
    report = visit.report
    if report is None:
        return Phase(visit.role, error=visit.error)
    hot_prefix: Literal["kept", "lost"] | None = None
    if report["warm_prefix_cached_tokens"] and report["post_flood_cached_tokens"] is not None:
        hot_prefix = "kept" if never_lost(report) else "lost"
    counters = report.get("counters")
    ttft = {
        name: times
        for kind, name in JUDGED_KINDS.items()
        if kind != "control"
        and (times := report["ttft_ms"].get(kind)) is not None
        and times["p95"] is not None
    }
    return Phase(
        phase=visit.role,
        mode=report["mode"],
        hot_prefix=hot_prefix,
        cached_tokens=device_tokens(report),
        external_tokens=report["tier"]["external_tokens"] if "tier" in report else ABSENT,
        reusable_tokens=report["reusable_tokens"],
        warm_prefix_cached_tokens=report["warm_prefix_cached_tokens"],
        post_flood_cached_tokens=report["post_flood_cached_tokens"],
        hit_ratio=counters["hit_ratio"] if counters else None,
        ttft_p95_ms={name: p95 for name, t in ttft.items() if (p95 := t["p95"]) is not None},
        ttft_samples={name: times["samples"] for name, times in ttft.items()},
        requests_served=report["requests"]["sent"] - report["requests"]["failed"],
        requests_failed=report["requests"]["failed"],
        error=visit.error,
    )


def source_revision(repo: Path) -> dict:
    """Return the commit the scripts ran from, and whether tracked files differ from it."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(repo), *arguments], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


def complete(visits: list[Visit], record: dict, verdict: Verdict) -> dict:
    """Return canary.json's content: the verdict first, then the run's record and its visits."""
    reports = reports_of(visits)
    identities = [v.identity for v in visits if v.identity]
    identity: Mapping = identities[0] if identities else {}
    installations = {json.dumps(i.get("installation"), sort_keys=True) for i in identities}
    return {
        "schema": "computecache/canary",
        "schema_version": SCHEMA_VERSION,
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "reasons": verdict.reasons,
        "phases": [phase_of(v).record() for v in visits],
        "checks": verdict.checks,
        "statistics": verdict.statistics,
        "server_starts": sum(isinstance(v.ready_s, float) for v in visits),
        "installation": identity.get("installation"),
        "one_installation": len(installations) == 1,
        "source": source_revision(REPO),
        "model": reports[0]["model"] if reports else None,
        "gpu": identity.get("gpu"),
        "image": identity.get("image"),
        "scan_limit": reports[0]["scan_limit"] if reports else None,
        "versions": {
            "vllm": next((v.vllm for v in visits if v.vllm), None),
            "torch": identity.get("torch"),
            "python": platform.python_version(),
        },
        **record,
        "visits": [v.record() for v in visits],
    }


def release_record(canary: dict) -> dict:
    """Return what a release keeps: which revision was tried on what, and how it ended."""
    rows = {row["phase"]: row for row in canary["phases"]}
    names = ("outcome", "reasons", "source", "model", "gpu", "image", "versions", "final_mode")
    return {
        "schema": "computecache/release",
        "schema_version": SCHEMA_VERSION,
        **{name: canary[name] for name in (*names, "scan_limit", "left", "target", "finished_at")},
        "baseline": rows.get("baseline"),
        "candidate": rows.get("candidate"),
        "rollback": rows.get("rollback"),
    }
