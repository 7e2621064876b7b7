# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

MONITORING = Path(__file__).parents[2] / "monitoring"


class Query(NamedTuple):
    where: str
    expr: str


@pytest.fixture(scope="session")
def dashboard() -> dict:
    path = MONITORING / "grafana/provisioning/dashboards/computecache.json"
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def dashboard_queries(dashboard) -> list[Query]:
    """Every expression of the dashboard, with the interval that Grafana would fill in."""
    queries = [
        Query(f"panel {panel['title']!r} {target['refId']}", target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    queries += [
        Query(f"annotation {annotation['name']!r}", annotation["expr"])
        for annotation in dashboard["annotations"]["list"]
    ]
    # Four scrape intervals of 5 s, the least that Grafana takes for it.
    return [Query(where, expr.replace("$__rate_interval", "20s")) for where, expr in queries]


def need_program(name: str) -> str:
    """Path of a program; without it skip, or fail where CI must run everything."""
    path = shutil.which(name)
    if path:
        return path
    reason = f"no {name} here: apt-get install --no-install-recommends prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def promtool() -> str:
    return need_program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return need_program("prometheus")
