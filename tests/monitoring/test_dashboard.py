# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard and its provisioning, as far as this can be told without Grafana."""

import itertools
import json
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

PROVISIONING = Path(__file__).parents[2] / "monitoring/grafana/provisioning"
# The schema that Grafana 13.2 writes; later versions migrate it when they load it.
SCHEMA_VERSION = 42
# Read by Grafana's Prometheus plugin, which the dashboard model leaves to the plugin.
ANNOTATION_OF_THE_PLUGIN = {"step", "titleFormat", "tagKeys"}


def lost(given, kept, path="") -> list[str]:
    """Paths of `given` that `kept` lacks or holds with another value."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            found
            for key, value in given.items()
            for found in (
                lost(value, kept[key], f"{path}/{key}") if key in kept else [f"{path}/{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            found
            for number, (mine, theirs) in enumerate(zip(given, kept, strict=True))
            for found in lost(mine, theirs, f"{path}/{number}")
        ]
    return [] if given == kept else [path]


def test_no_key_is_unknown_to_the_dashboard_model(dashboard):
    """Reading into Grafana's published types and writing again loses misspelt keys."""
    register_default_plugins()
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    annotations = dashboard["annotations"]["list"]
    assert sorted(lost(dashboard, kept)) == sorted(
        f"/annotations/list/{number}/{key}"
        for number in range(len(annotations))
        for key in ANNOTATION_OF_THE_PLUGIN
    )


def test_a_misspelt_key_would_be_found(dashboard):
    register_default_plugins()
    wrong = json.loads(json.dumps(dashboard).replace('"fieldConfig"', '"fieldConfg"'))
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(wrong)))
    assert "/panels/1/fieldConfg" in lost(wrong, kept)


def test_schema_version_and_identity(dashboard):
    assert dashboard["schemaVersion"] == SCHEMA_VERSION
    assert dashboard["uid"] == "computecache"
    assert "id" not in dashboard, "an id belongs to one Grafana's database"


def test_panels_have_unique_ids_and_a_unit_and_a_description(dashboard):
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert len(panel["description"]) > 30, panel["title"]
            assert panel["targets"], panel["title"]


def test_panels_fit_the_grid_without_overlaps(dashboard):
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        assert 0 <= grid["x"] < grid["x"] + grid["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(dashboard["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (one["title"], other["title"])


def test_every_query_asks_the_provisioned_data_source(dashboard):
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["uid"] == "prometheus"
    reference = {"type": source["type"], "uid": source["uid"]}
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            asked = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert asked == [reference] * len(asked), panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(references) == len(set(references)), panel["title"]
    for annotation in dashboard["annotations"]["list"]:
        assert annotation["datasource"] == reference


def test_scrape_interval_is_the_one_grafana_derives_rates_from():
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    config = yaml.safe_load((PROVISIONING.parents[1] / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_provider_and_home_page_point_where_compose_mounts_the_dashboard():
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/computecache.yml").read_text())[
        "providers"
    ]
    grafana = yaml.safe_load((PROVISIONING.parents[2] / "compose.yaml").read_text())["services"][
        "grafana"
    ]
    (mount,) = [volume for volume in grafana["volumes"] if isinstance(volume, dict)]
    assert mount["source"] == "./monitoring/grafana/provisioning"
    assert provider["options"]["path"] == f"{mount['target']}/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/computecache.json"
    assert (PROVISIONING / "dashboards" / Path(home).name).is_file()


def test_dashboard_shows_what_operators_were_promised(dashboard):
    expressions = " ".join(
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    )
    for series in (
        "vllm:computecache_info",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:computecache_victims_total",
        "vllm:kv_block_lifetime_seconds_bucket",
        "vllm:kv_block_idle_before_evict_seconds_bucket",
        "vllm:kv_block_reuse_gap_seconds_bucket",
        "vllm:computecache_decisions_total",
        "vllm:computecache_fallbacks_total",
        "vllm:computecache_protected_hits_total",
    ):
        assert series in expressions
    assert [a["name"] for a in dashboard["annotations"]["list"]] == ["Mode change"]
