# SPDX-License-Identifier: Apache-2.0
"""The shipped Prometheus configuration against the real server, on this machine's CPU.

One server and one Prometheus are started, load is sent, and every expression that
is shipped must be accepted and (on the dashboard) return numbers.
"""

import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

import check_metrics
from servers.embedded import SERVED_MODEL, EmbeddedServer
from servers.processes import free_port
from servers.tiny_model import make_model

MONITORING = Path(__file__).parents[2] / "monitoring"
DATA_TIMEOUT_S = 60
KEY = {"Authorization": "Bearer 8c5f6a1e0b7d4c39"}

pytestmark = pytest.mark.server


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url
        self.started = time.time()

    def get(self, path: str, **parameters) -> dict:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10).json()
        if answer["status"] != "success":
            raise AssertionError(f"{parameters}: {answer['error']}")
        return answer["data"]

    def numbers(self, expr: str) -> int:
        """How many samples that are numbers `expr` returns over the time observed."""
        result = self.get("query_range", query=expr, start=self.started, end=time.time(), step=1)[
            "result"
        ]
        values = [float(value) for series in result for _, value in series["values"]]
        return sum(value == value for value in values)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("server")
    with EmbeddedServer(
        make_model(folder / "model"),
        "active",
        folder / "server.log",
        env={"VLLM_API_KEY": KEY["Authorization"].removeprefix("Bearer ")},
        args=("--kv-cache-metrics-sample", "1.0"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def observed(server, prometheus, tmp_path_factory) -> Iterator[Prometheus]:
    """A Prometheus with the shipped files, but for the targets and a shorter interval."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(
        ("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s"
    )
    here = {
        "vllm:8000": httpx.URL(server.base_url).netloc.decode(),
        "vllm:8001": httpx.URL(server.policy_metrics_url).netloc.decode(),
    }
    # Without static targets: the KV tier, which is not run here.
    config["scrape_configs"] = [j for j in config["scrape_configs"] if "static_configs" in j]
    for job in config["scrape_configs"]:
        for targets in job["static_configs"]:
            targets["targets"] = [here[target] for target in targets["targets"]]
    config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    url = f"http://127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                prometheus,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={httpx.URL(url).netloc.decode()}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_ready(url, process, folder / "prometheus.log")
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Prometheus did not become ready:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def load(server):
    """send(seconds): bursts of equal prompts, new ones each burst, which overflow the pool."""
    draw = random.Random(1)

    def send(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            prompt = [draw.randrange(10, 900) for _ in range(400)]
            for _ in range(3):
                httpx.post(
                    f"{server.base_url}/v1/completions",
                    json={"model": SERVED_MODEL, "prompt": prompt, "max_tokens": 2},
                    headers=KEY,
                    timeout=60,
                ).raise_for_status()

    return send


def test_every_dashboard_expression_returns_numbers(observed, load, dashboard_queries):
    waiting = [query for query in dashboard_queries if "lmcache_mp_" not in query.expr]
    assert len(waiting) > 20
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while waiting and time.monotonic() < deadline:
        load(3)
        waiting = [query for query in waiting if not observed.numbers(query.expr)]
    assert waiting == []


def test_every_rule_and_alert_is_evaluated_without_error(observed):
    groups = yaml.safe_load((MONITORING / "recording_rules.yml").read_text())["groups"]
    groups += yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    shipped = {rule.get("record") or rule["alert"] for group in groups for rule in group["rules"]}
    loaded = {
        rule["name"]: rule for group in observed.get("rules")["groups"] for rule in group["rules"]
    }
    assert loaded.keys() == shipped
    assert {name: (rule["health"], rule.get("lastError")) for name, rule in loaded.items()} == (
        dict.fromkeys(shipped, ("ok", None))
    )


def test_every_recording_rule_has_recorded(observed):
    rules = yaml.safe_load((MONITORING / "recording_rules.yml").read_text())["groups"][0]["rules"]
    assert [rule["record"] for rule in rules if not observed.numbers(rule["record"])] == []


def test_every_series_that_a_rule_or_alert_names_is_served(observed):
    """An alert on a misspelt name would parse, and never fire."""
    text = (MONITORING / "recording_rules.yml").read_text()
    text += (MONITORING / "alerts.yml").read_text()
    named = set(re.findall(r"\b(?:vllm|computecache|model_name):\w+(?::\w+)?", text))
    assert len(named) > 10
    assert named - set(observed.get("label/__name__/values")) == set()


def test_the_metrics_contract_holds_on_the_real_server(observed, server, capsys):
    urls = {"vllm": f"{server.base_url}/metrics", "policy": server.policy_metrics_url}
    arguments = [f"--url={endpoint}={url}" for endpoint, url in urls.items()]
    code = check_metrics.main(["--profile", "plain", *arguments])
    assert (code, capsys.readouterr().err) == (0, "check_metrics: plain: complete\n")


def test_healthy_server_fires_no_alert(observed):
    firing = observed.get("alerts")["alerts"]
    assert [alert for alert in firing if alert["state"] == "firing"] == []


def test_engine_reports_the_deployed_mode_and_counts_the_load(observed):
    def vector(expr: str) -> list[dict]:
        return observed.get("query", query=expr)["result"]

    (info,) = vector("vllm:computecache_info")
    assert (info["metric"]["mode"], info["metric"]["engine"]) == ("active", "0")
    assert info["metric"]["pool"] == "scheduler", "the real Scheduler has told the policy so"
    (in_force,) = vector("vllm:computecache_mode_in_force")
    assert in_force["value"][1] == "1"
    (decisions,) = vector("vllm:computecache_decisions_total")
    (victims,) = vector("sum(vllm:computecache_victims_total)")
    assert 0 < float(decisions["value"][1]) < float(victims["value"][1])
    (fallbacks,) = vector("vllm:computecache_fallbacks_total")
    assert fallbacks["value"][1] == "0"


def test_the_api_key_guards_what_the_guide_says_and_no_more(server):
    """docs/operations.md, "What the API key does not protect"."""
    body = {"model": SERVED_MODEL, "prompt": [10, 11, 12], "max_tokens": 1}

    def status(method: str, path: str, **options) -> int:
        return httpx.request(method, server.base_url + path, timeout=60, **options).status_code

    assert status("POST", "/v1/completions", json=body) == 401
    assert status("POST", "/v1/completions", json=body, headers=KEY) == 200
    assert status("POST", "/invocations", json=body) == 200
    assert status("GET", "/metrics") == 200
    assert status("POST", "/reset_prefix_cache") == 404, "a dev-mode endpoint"
