# SPDX-License-Identifier: Apache-2.0
"""What a canary shows a person: a table on stderr and canary.html; and the writing of its files."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drills import plots
from drills.record import complete, release_record, write_record
from drills.verdict import ACCEPT, INCONCLUSIVE, REJECT, Verdict
from drills.visit import Visit
from serving.console import FEW_NOTE, of_few, say

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
            ", ".join(
                f"{kind} {p95:.0f}{of_few(row['ttft_samples'][kind])}"
                for kind, p95 in row["ttft_p95_ms"].items()
            )
            or "-",
            f"{row['requests_served']} of {row['requests_served'] + row['requests_failed']}",
        )
    console.print(table)
    if any(of_few(count) for row in canary["phases"] for count in row["ttft_samples"].values()):
        console.print(FEW_NOTE, markup=False)
    for check in canary["checks"]:
        console.print(f"{check['status']:8}{check['name']}: {check['detail']}", markup=False)


def _rows(pairs: list[tuple[str, object]]) -> str:
    return "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_cell(value))}</td></tr>" for name, value in pairs
    )


def html(canary: dict, visits: list[Visit]) -> str:
    """Return the report as one page that loads nothing: verdict, pictures, numbers, settings."""
    outcome = canary["outcome"]
    advice, reasons = _advice(canary)
    filled = {
        "outcome": outcome,
        "word": WORD[outcome],
        "color": COLOR[outcome],
        "advice": escape(advice),
        "reasons": "".join(f"<li>{escape(reason)}</li>" for reason in reasons),
        "figures": _figures(visits, canary["candidate_mode"]),
        "checks": _checks(canary),
        "phases": _phases(canary),
        "facts": _rows(_facts(canary)),
        "settings": _rows([*canary["settings"].items(), *canary["limits"].items()]),
    }
    template = Path(__file__).with_name("report.html").read_text()
    for name, value in filled.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def _advice(canary: dict) -> tuple[str, list[str]]:
    """Return what to do, and what the page leads with."""
    outcome = canary["outcome"]
    if outcome != ACCEPT:
        return ADVICE[outcome], canary["reasons"]
    # Everything passed and is listed below; what was gained comes first.
    gains = ("kept", "ttft_hot_replay", "ttft_hot", "rollback")
    reasons = [c["detail"] for c in canary["checks"] if c["name"] in gains]
    return ADVICE_EMBEDDED_ACCEPT if canary["target"] == "embedded" else ADVICE[ACCEPT], reasons


def _figures(visits: list[Visit], candidate_mode: str) -> str:
    pictures = [
        ("Hot prefix under pressure", plots.survival(visits, candidate_mode)),
        ("Time to first token", plots.ttft(visits, candidate_mode)),
        ("Prefix cache hit ratio", plots.hit_ratio(visits)),
    ]
    return "".join(
        f'<figure role="img" aria-label="{title}"><h2>{title}</h2>{svg}</figure>'
        for title, svg in pictures
        if svg
    )


def _checks(canary: dict) -> str:
    return "".join(
        f'<li class="{c["status"]}"><b>{escape(c["name"])}: {c["status"]}.</b> '
        f"{escape(c['detail'])}</li>"
        for c in canary["checks"]
    )


def _phases(canary: dict) -> str:
    return "".join(
        f"<table><caption>{number}. {escape(row['phase'])}</caption>"
        + _rows([(name.replace("_", " "), value) for name, value in row.items() if name != "phase"])
        + "</table>"
        for number, row in enumerate(canary["phases"], 1)
    )


def _facts(canary: dict) -> list[tuple[str, object]]:
    source = canary["source"]
    return [
        ("finished", canary["finished_at"]),
        ("target", canary["target"]),
        ("final mode", f"{canary['final_mode']}: {canary['left']}"),
        ("scan limit", canary["scan_limit"]),
        ("source", f"{source['commit']}{' (with local changes)' if source['dirty'] else ''}"),
        ("model", canary["model"]),
        ("GPU", canary["gpu"]),
        ("image", canary["image"]),
        *canary["versions"].items(),
        ("server starts", canary["server_starts"]),
    ]


def write_reports(out: Path, visits: list[Visit], record: dict, verdict: Verdict) -> dict[str, str]:
    """Write the three files, print the table on stderr; returns the files' paths."""
    canary = complete(visits, record, verdict)
    names = ("canary.json", "release.json", "canary.html")
    write_record(out / "canary.json", canary)
    write_record(out / "release.json", release_record(canary))
    # After the records: a fault in a picture must not cost them.
    write_record(out / "canary.html", html(canary, visits))
    print_table(canary)
    say(f"report: {out / 'canary.html'}")
    return {name: str(out / name) for name in names}
