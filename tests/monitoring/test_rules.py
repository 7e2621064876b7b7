# SPDX-License-Identifier: Apache-2.0
"""Prometheus configuration, recording rules and alerts, checked by promtool."""

import subprocess
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
CASES = Path(__file__).with_name("alert_cases.yml")


def alerts() -> dict[str, dict]:
    groups = yaml.safe_load((REPO / "monitoring/alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", REPO / "monitoring/prometheus.yml"],
        ["check", "rules", "--lint-fatal", REPO / "monitoring/recording_rules.yml"],
        ["check", "rules", "--lint-fatal", REPO / "monitoring/alerts.yml"],
        ["test", "rules", CASES],
    ],
    ids=["configuration", "recording rules", "alerts", "cases"],
)
def test_promtool_accepts(promtool, arguments):
    result = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case_in_which_it_fires():
    fires = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for check in case.get("alert_rule_test", []):
            if check["exp_alerts"]:
                fires.add(check["alertname"])
        for check in case.get("promql_expr_test", []):
            for sample in check["exp_samples"]:
                fires |= {name for name in alerts() if f'alertname="{name}"' in sample["labels"]}
    assert fires == alerts().keys()


def test_every_alert_is_explained_to_operators():
    guide = (REPO / "docs/operations.md").read_text()
    assert [name for name in alerts() if f"`{name}`" not in guide] == []


def test_the_tier_is_scraped_only_where_its_name_resolves():
    config = yaml.safe_load((REPO / "monitoring/prometheus.yml").read_text())
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "lmcache"]
    assert "static_configs" not in job
    (found,) = job["dns_sd_configs"]
    assert (found["names"], found["type"], found["port"]) == (["lmcache"], "A", 8080)


def test_targets_are_what_compose_runs():
    config = yaml.safe_load((REPO / "monitoring/prometheus.yml").read_text())
    stack = yaml.safe_load((REPO / "compose.yaml").read_text())
    vllm = stack["services"]["vllm"]
    served = {
        "vllm": "--port=8000" in vllm["command"] and "vllm:8000",
        "computecache": f"vllm:{vllm['environment']['COMPUTECACHE_METRICS_PORT']}",
    }
    scraped = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in config["scrape_configs"]
        if job["job_name"] != "lmcache"
    }
    assert scraped == {job: [target] for job, target in served.items()}
    mounted = {
        Path(volume["target"]).name
        for volume in stack["services"]["prometheus"]["volumes"]
        if isinstance(volume, dict)
    }
    assert mounted == {"prometheus.yml", *config["rule_files"]}
