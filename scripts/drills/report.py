# SPDX-License-Identifier: Apache-2.0
"""The records of a canary: canary.json (docs/canary.schema.json), canary.html and release.json."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drills import plots
from drills.verdict import (
    ACCEPT,
    INCONCLUSIVE,
    JUDGED_KINDS,
    REJECT,
    Verdict,
    never_lost,
    served_tokens,
)
from serving.files import replace_file

SCHEMA_VERSION = 1
ADVICE = {
    ACCEPT: "active kept what lru lost and was not clearly slower. Promote it "
    "(COMPUTECACHE_MODE=active in .env, then docker compose up -d vllm; or run the canary with "
    "--promote) and watch the dashboard for a day. To go back: COMPUTECACHE_MODE=lru, same way.",
    REJECT: "Stay in lru. The reasons below carry their numbers: a failed request or a failed "
    "rollback is a fault to report with the server's log; fewer kept tokens or a slower first "
    "token mean that active does not pay for this traffic at this scan limit.",
    INCONCLUSIVE: "Nothing was decided, so stay in lru. Mend what is named below and run the "
    "canary again: more repetitions, more pressure, or the mode that was asked for.",
}
ADVICE_EMBEDDED_ACCEPT = (
    "The patch does its work on this machine's CPU: active kept what lru lost, and going back to "
    "lru served. This says nothing about the speed of your GPU: next, run the canary on the stack "
    "that serves (canary.py run --target compose) and decide by its verdict."
)
WORD = {ACCEPT: "active is better here", REJECT: "stay in lru", INCONCLUSIVE: "could not tell"}
COLOR = {ACCEPT: "#0f766e", REJECT: "#b91c1c", INCONCLUSIVE: "#a16207"}


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


def phase_row(visit: dict) -> dict:
    """Return what one visit shows, in the words of the table."""
    report = visit["report"] or {}
    counters = report.get("counters") or {}
    lost = None
    if report.get("warm_prefix_cached_tokens") and report["post_flood_cached_tokens"] is not None:
        lost = "kept" if never_lost(report) else "lost"
    requests = report.get("requests") or {"sent": 0, "failed": 0}
    ttft = report.get("ttft_ms", {})
    return {
        "phase": visit["role"],
        "mode": report.get("mode"),
        "hot_prefix": lost,
        "cached_tokens": served_tokens(report) if report else None,
        "reusable_tokens": report.get("reusable_tokens"),
        "warm_prefix_cached_tokens": report.get("warm_prefix_cached_tokens"),
        "post_flood_cached_tokens": report.get("post_flood_cached_tokens"),
        "hit_ratio": counters.get("hit_ratio"),
        "ttft_p95_ms": {
            JUDGED_KINDS[kind]: ttft[kind]["p95"]
            for kind in JUDGED_KINDS
            if ttft.get(kind, {}).get("samples") and kind != "control"
        },
        "requests_served": requests["sent"] - requests["failed"],
        "requests_failed": requests["failed"],
        "error": visit["error"],
    }


def complete(record: dict, verdict: Verdict, repo: Path) -> dict:
    """Return canary.json's content: the verdict first, then the run's record."""
    visits = record["visits"]
    reports = [v["report"] for v in visits if v["report"]]
    identities = [v["identity"] for v in visits if v.get("identity")]
    identity = identities[0] if identities else {}
    installations = {json.dumps(i.get("installation"), sort_keys=True) for i in identities}
    return {
        "schema": "computecache/canary",
        "schema_version": SCHEMA_VERSION,
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "reasons": verdict.reasons,
        "phases": [phase_row(v) for v in visits],
        "checks": verdict.checks,
        "statistics": verdict.statistics,
        "server_starts": sum(v.get("ready_s") is not None for v in visits),
        "installation": identity.get("installation"),
        "one_installation": len(installations) == 1,
        "source": source_revision(repo),
        "model": reports[0]["model"] if reports else None,
        "gpu": identity.get("gpu"),
        "image": identity.get("image"),
        "scan_limit": reports[0]["scan_limit"] if reports else None,
        "versions": {
            "vllm": next((v["vllm"] for v in visits if v.get("vllm")), None),
            "torch": identity.get("torch"),
            "python": platform.python_version(),
        },
        **record,
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


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items()) or "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_table(canary: dict) -> None:
    """Print the phases and the checks on stderr."""
    console = Console(stderr=True, soft_wrap=True, width=None if sys.stderr.isatty() else 100)
    table = Table(title=f"canary on {canary['target']}: {canary['model']}")
    for title in ("phase", "mode", "hot prefix", "cached", "hit ratio", "p95 TTFT, ms", "served"):
        table.add_column(title)
    for row in canary["phases"]:
        cached = f"{row['warm_prefix_cached_tokens']} -> {row['post_flood_cached_tokens']}"
        if row["warm_prefix_cached_tokens"] is None:
            cached = f"{_cell(row['cached_tokens'])} of {_cell(row['reusable_tokens'])}"
        table.add_row(
            row["phase"],
            _cell(row["mode"]),
            _cell(row["hot_prefix"]),
            cached,
            _cell(row["hit_ratio"]),
            ", ".join(f"{kind} {p95:.0f}" for kind, p95 in row["ttft_p95_ms"].items()) or "-",
            f"{row['requests_served']} of {row['requests_served'] + row['requests_failed']}",
        )
    console.print(table)
    for check in canary["checks"]:
        console.print(f"{check['status']:8}{check['name']}: {check['detail']}", markup=False)


def _rows(pairs: list[tuple[str, object]]) -> str:
    return "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_cell(value))}</td></tr>" for name, value in pairs
    )


def html(canary: dict) -> str:
    """Return the report as one page that loads nothing: verdict, pictures, numbers, settings."""
    outcome, visits = canary["outcome"], canary["visits"]
    pictures = [
        ("Hot prefix under pressure", plots.survival(visits, canary["candidate_mode"])),
        ("Time to first token", plots.ttft(visits, canary["candidate_mode"])),
        ("Prefix cache hit ratio", plots.hit_ratio(visits)),
    ]
    figures = "".join(
        f'<figure role="img" aria-label="{title}"><h2>{title}</h2>{svg}</figure>'
        for title, svg in pictures
        if svg
    )
    checks = "".join(
        f'<li class="{c["status"]}"><b>{escape(c["name"])}: {c["status"]}.</b> '
        f"{escape(c['detail'])}</li>"
        for c in canary["checks"]
    )
    phases = "".join(
        f"<table><caption>{number}. {escape(row['phase'])}</caption>"
        + _rows([(name.replace("_", " "), value) for name, value in row.items() if name != "phase"])
        + "</table>"
        for number, row in enumerate(canary["phases"], 1)
    )
    source = canary["source"]
    facts = [
        ("finished", canary["finished_at"]),
        ("target", canary["target"]),
        ("final mode", f"{canary['final_mode']}: {canary['left']}"),
        ("scan limit", canary["scan_limit"]),
        ("source", f"{source['commit']}{' (with local changes)' if source['dirty'] else ''}"),
        ("model", canary["model"]),
        ("GPU", canary["gpu"]),
        ("image", canary["image"]),
        *((name, version) for name, version in canary["versions"].items()),
        ("server starts", canary["server_starts"]),
    ]
    advice, reasons = ADVICE[outcome], canary["reasons"]
    if outcome == ACCEPT:
        # Everything passed and is listed below; what was gained comes first.
        gains = ("kept", "ttft_hot_replay", "ttft_hot", "rollback")
        reasons = [c["detail"] for c in canary["checks"] if c["name"] in gains]
        if canary["target"] == "embedded":
            advice = ADVICE_EMBEDDED_ACCEPT
    template = Path(__file__).with_name("report.html").read_text()
    filled = {
        "outcome": outcome,
        "word": WORD[outcome],
        "color": COLOR[outcome],
        "advice": escape(advice),
        "reasons": "".join(f"<li>{escape(reason)}</li>" for reason in reasons),
        "figures": figures,
        "checks": checks,
        "phases": phases,
        "facts": _rows(facts),
        "settings": _rows([*canary["settings"].items(), *canary["limits"].items()]),
    }
    for name, value in filled.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def write_reports(out: Path, record: dict, verdict: Verdict, repo: Path) -> dict[str, str]:
    """Write the three files, print the table on stderr; returns the files' paths."""
    canary = complete(record, verdict, repo)
    contents = {
        "canary.json": json.dumps(canary, indent=1),
        "release.json": json.dumps(release_record(canary), indent=1),
        "canary.html": html(canary),
    }
    for name, text in contents.items():
        replace_file(out / name, text)
    print_table(canary)
    print(f"report: {out / 'canary.html'}", file=sys.stderr)
    return {name: str(out / name) for name in contents}
