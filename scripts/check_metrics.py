# SPDX-License-Identifier: Apache-2.0
"""Compare what the metrics endpoints serve with monitoring/contract.json, a line for each series.

    check_metrics.py --profile plain
    check_metrics.py --profile lmcache-0.5.6 --url lmcache=http://127.0.0.1:8080/metrics

A line begins with what was found: `present`, `waiting` (may be absent before the first event),
`renamed` (served under the name of another version) or `missing`.

Exit 0: complete. 1: a series is missing or renamed. 2: an endpoint could not be read, or bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import NotRequired, TypedDict

from serving.command import run_command
from serving.files import REPO
from serving.metrics import MetricsError, series_names
from serving.requests import WorkloadError

CONTRACT = REPO / "monitoring/contract.json"
URLS = {
    "vllm": "http://127.0.0.1:8000/metrics",
    "policy": "http://127.0.0.1:8001/metrics",
    "lmcache": "http://127.0.0.1:8080/metrics",
}
FAULTS = ("renamed", "missing")


class Series(TypedDict):
    """One entry of the contract; monitoring/contract.schema.json has the same fields."""

    name: str
    endpoint: str
    profiles: list[str]
    absent_before_first_event: bool
    replacement: NotRequired[str]


def other_names(contract: Iterable[Series], name: str) -> set[str]:
    """Return the names that earlier and later versions have for a series."""
    pairs = [(row["name"], row["replacement"]) for row in contract if "replacement" in row]
    return {new for old, new in pairs if old == name} | {old for old, new in pairs if new == name}


def compare(contract: list[Series], profile: str, served: dict[str, set[str]]) -> list[list[str]]:
    """Return [status, endpoint, name, remark] for each series of a profile.

    served: the names that each endpoint serves.
    """
    rows = []
    for series in contract:
        if profile not in series["profiles"]:
            continue
        name, endpoint = series["name"], series["endpoint"]
        others = sorted(other_names(contract, name) & served[endpoint])
        if name in served[endpoint]:
            status, remark = "present", ""
        elif others:
            status, remark = "renamed", f"served as {', '.join(others)}: give the other --profile"
        elif series["absent_before_first_event"]:
            status, remark = "waiting", "appears with its first event"
        else:
            status, remark = "missing", ""
        rows.append([status, endpoint, name, remark])
    return rows


def _endpoint_url(text: str) -> tuple[str, str]:
    endpoint, _, url = text.partition("=")
    if endpoint not in URLS or not url:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give ENDPOINT=URL, where ENDPOINT is one of {', '.join(URLS)}"
        )
    return endpoint, url


def main(argv: list[str] | None = None) -> int:
    contract = json.loads(CONTRACT.read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=contract["profiles"], required=True)
    parser.add_argument(
        "--url",
        type=_endpoint_url,
        action="append",
        default=[],
        metavar="ENDPOINT=URL",
        help=f"where an endpoint is (default {', '.join(f'{e}={u}' for e, u in URLS.items())})",
    )
    options = parser.parse_args(argv)
    urls = URLS | dict(options.url)
    asked = {s["endpoint"] for s in contract["series"] if options.profile in s["profiles"]}
    try:
        served = {endpoint: series_names(urls[endpoint]) for endpoint in sorted(asked)}
    except (MetricsError, WorkloadError) as error:
        print(f"check_metrics: {error}: is it running? give its address as --url", file=sys.stderr)
        return 2
    rows = compare(contract["series"], options.profile, served)
    for row in rows:
        print(" ".join(row).rstrip())
    faults = sum(status in FAULTS for status, *_ in rows)
    verdict = f"{faults} of {len(rows)} series missing or renamed" if faults else "complete"
    print(f"check_metrics: {options.profile}: {verdict}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
