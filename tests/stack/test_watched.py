# SPDX-License-Identifier: Apache-2.0
"""Prometheus in its container: it scrapes both endpoints, every expression returns data, and the
alerts of a dead server and of a refused mode fire and end by themselves."""

import json
import random
import time

import httpx
import pytest
import yaml
from stack_project import SECRETS, wait_for

DATA_S = 120
ALERT_S = 120


class Prometheus:
    def __init__(self, url: str, started: float) -> None:
        self._url, self._started = f"{url}/api/v1/", started

    def get(self, path: str, **parameters: object):
        with httpx.Client(trust_env=False, timeout=10) as client:
            answer = client.get(self._url + path, params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def numbers(self, expr: str) -> int:
        """How many samples that are numbers `expr` has returned since the start."""
        span = {"start": self._started, "end": time.time(), "step": 5}
        result = self.get("query_range", query=expr, **span)["result"]
        values = [float(value) for series in result for _, value in series["values"]]
        return sum(value == value for value in values)

    def firing(self) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.fixture(scope="module")
def prometheus(stack):
    return Prometheus(stack.url("PROMETHEUS_PORT"), stack.started)


@pytest.fixture(scope="module")
def load(stack):
    """load(): bursts of equal prompts, new ones each burst, which overflow the pool."""
    draw = random.Random(1)
    key = {"Authorization": f"Bearer {SECRETS['VLLM_API_KEY']}"}

    def send() -> None:
        with httpx.Client(trust_env=False, timeout=60, headers=key) as client:
            for _ in range(4):
                prompt = [draw.randrange(10, 900) for _ in range(700)]
                body = {"model": "computecache-tiny", "prompt": prompt, "max_tokens": 2}
                for _ in range(3):
                    client.post(
                        f"{stack.url('API_PORT')}/v1/completions", json=body
                    ).raise_for_status()

    return send


def expressions(stack) -> dict[str, str]:
    """Every expression of the dashboard, with the interval that Grafana would fill in.

    Not those of a KV tier, which this stack is without.
    """
    path = "monitoring/grafana/provisioning/dashboards/computecache.json"
    dashboard = json.loads((stack.folder / path).read_text())
    found = {
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }
    found |= {f"annotation {a['name']}": a["expr"] for a in dashboard["annotations"]["list"]}
    found = {name: expr for name, expr in found.items() if "lmcache_mp_" not in expr}
    return {name: expr.replace("$__rate_interval", "20s") for name, expr in found.items()}


def rules(stack) -> dict[str, dict]:
    groups = [
        group
        for name in ("recording_rules.yml", "alerts.yml")
        for group in yaml.safe_load((stack.folder / "monitoring" / name).read_text())["groups"]
    ]
    return {
        rule.get("record") or rule["alert"]: rule for group in groups for rule in group["rules"]
    }


def test_both_targets_are_scraped_by_their_names_on_the_private_network(stack, prometheus):
    def up():
        targets = prometheus.get("targets")["activeTargets"]
        health = {target["labels"]["instance"]: target["health"] for target in targets}
        return health == {"vllm:8000": "up", "vllm:8001": "up"}

    wait_for("both targets up", up, 30)


def test_every_expression_of_the_dashboard_and_every_recording_rule_returns_data(
    stack, prometheus, load
):
    waiting = expressions(stack)
    waiting |= {name: name for name, rule in rules(stack).items() if "record" in rule}
    assert len(waiting) > 25

    def all_have_data() -> bool:
        load()
        for name, expr in list(waiting.items()):
            if prometheus.numbers(expr):
                del waiting[name]
        return not waiting

    try:
        wait_for("data", all_have_data, DATA_S)
    except AssertionError:
        assert waiting == {}
        raise


def test_every_rule_is_evaluated_and_no_alert_fires_while_all_is_well(stack, prometheus):
    loaded = {
        rule["name"]: rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]
    }
    assert loaded.keys() == rules(stack).keys()
    assert {name: rule["health"] for name, rule in loaded.items()} == dict.fromkeys(loaded, "ok")
    # A server's start is not its failure to be down: it may still be firing from then.
    wait_for("no alert", lambda: not prometheus.firing(), ALERT_S)


def test_a_killed_server_and_a_refused_mode_fire_their_alerts_which_end_by_themselves(
    stack, prometheus
):
    """One story, since every part of it costs a start of vLLM."""

    def fires(alert: str):
        return wait_for(f"{alert} fires", lambda: alert in prometheus.firing(), ALERT_S)

    def ends(alert: str):
        return wait_for(f"{alert} ends", lambda: alert not in prometheus.firing(), ALERT_S)

    stack.run("docker", "kill", stack.container("vllm"))
    fires("VllmServerDown")
    try:
        # Past preflight, as somebody would who sees to it that nothing stops them.
        stack.write_env(COMPUTECACHE_MODE="turbo")
        stack.up("--no-deps", "vllm")
        ends("VllmServerDown")
        fires("ComputeCacheModeNotInForce")
        assert stack.serves(), "with a refused mode it serves in lru"
    finally:
        stack.write_env()
    stack.up("vllm")
    # The start itself may take long enough for VllmServerDown.
    wait_for("no alert", lambda: not prometheus.firing(), ALERT_S)


def test_up_alone_takes_the_old_server_away_so_the_check_comes_first(stack):
    """Compose replaces containers before it starts any, so preflight cannot save the old one.

    docs/operations.md asks for the check before every `up` for this reason. Should this test
    fail, Compose has found an order in which it does not: say so there.
    """
    before = stack.container("vllm")
    stack.write_env(COMPUTECACHE_MODE="turbo")
    try:
        assert stack.check_env()[0] == 1
        done = stack.compose("up", "-d", "vllm", check=False)
        assert done.returncode != 0
        assert 'service "preflight" didn\'t complete successfully: exit 1' in done.stderr
        said = stack.compose("logs", "preflight").stdout
        assert "COMPUTECACHE_MODE='turbo' must be lru or active" in said
        assert stack.container("vllm") != before
        assert stack.inspect("vllm")["State"]["Status"] == "created"
        assert not stack.serves()
    finally:
        stack.write_env()
    stack.up("vllm")
    assert stack.serves()
