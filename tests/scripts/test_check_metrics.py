# SPDX-License-Identifier: Apache-2.0
"""check_metrics.py as an operator runs it, against pages that are made from the contract itself."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest
import yaml

REPO = Path(__file__).parents[2]
MONITORING = REPO / "monitoring"
CONTRACT = json.loads((MONITORING / "contract.json").read_text())
NAMES = {series["name"] for series in CONTRACT["series"]}
# A series that is read, not a prefix of several and not a rule's own name.
READ = re.compile(r"\b(?:vllm:|lmcache_mp_)[a-z0-9_]*[a-z0-9]\b(?!_)")


def names_of(profile, endpoint=None):
    return {
        series["name"]
        for series in CONTRACT["series"]
        if profile in series["profiles"] and endpoint in (None, series["endpoint"])
    }


class Page(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        names = self.server.pages[self.path.strip("/")]
        text = names if isinstance(names, str) else "".join(f"{name} 1.0\n" for name in names)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def check(script):
    """check(profile, pages): run the command against a server with a page for each endpoint."""
    servers = []

    def run(profile, **pages):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        server.pages = {e: names_of(profile, e) for e in ("vllm", "policy", "lmcache")} | pages
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        base = f"http://127.0.0.1:{server.server_port}"
        urls = [f"--url={endpoint}={base}/{endpoint}" for endpoint in server.pages]
        return script("check_metrics.py", "--profile", profile, *urls)

    yield run
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def lines(done, status):
    return [line for line in done.stdout.splitlines() if line.startswith(f"{status} ")]


def test_the_contract_follows_its_schema_and_names_each_series_once():
    schema = json.loads((MONITORING / "contract.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(CONTRACT, schema)
    assert len(NAMES) == len(CONTRACT["series"])
    for series in CONTRACT["series"]:
        assert set(series["profiles"]) <= CONTRACT["profiles"].keys(), series["name"]
        if "replacement" in series:
            assert series["replacement"] in NAMES
        on_lmcache = series["endpoint"] == "lmcache"
        assert on_lmcache == series["name"].startswith("lmcache_mp_")
        assert not on_lmcache or "plain" not in series["profiles"]


@pytest.mark.parametrize(
    "text",
    [
        {"profiles": {}},
        {"series": [{"name": "x", "endpoint": "vllm"}]},
        {"series": [CONTRACT["series"][0] | {"endpoint": "elsewhere"}]},
        {"series": [CONTRACT["series"][0] | {"misspelt": 1}]},
    ],
)
def test_the_schema_refuses(text):
    schema = json.loads((MONITORING / "contract.schema.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(CONTRACT | text, schema)


def expressions():
    """Every text of the repository from which a series is read, by where it is."""
    for name in ("alerts.yml", "recording_rules.yml"):
        for group in yaml.safe_load((MONITORING / name).read_text())["groups"]:
            for rule in group["rules"]:
                yield name, rule["expr"]
    dashboard = MONITORING / "grafana/provisioning/dashboards/computecache.json"
    loaded = json.loads(dashboard.read_text())
    for panel in loaded["panels"]:
        for target in panel.get("targets", []):
            yield "dashboard", target["expr"]
    for annotation in loaded["annotations"]["list"]:
        yield "dashboard", annotation["expr"]
    for path in sorted((REPO / "scripts").rglob("*.py")):
        for text in re.findall(r'"[^"\n]*"', path.read_text()):
            yield str(path.relative_to(REPO)), text


def test_every_series_that_the_project_reads_is_in_the_contract():
    read = {(name, where) for where, text in expressions() for name in READ.findall(text) if name}
    assert {"alerts.yml", "dashboard", "scripts/serving/metrics.py"} <= {w for _, w in read}
    assert sorted((name, where) for name, where in read if name not in NAMES) == []


def test_no_check_relies_on_the_bytes_that_restored_keys_do_not_count_in():
    assert [where for where, text in expressions() if "l2_usage_bytes" in text] == []
    assert [name for name in NAMES if "l2_usage_bytes" in name] == []


@pytest.mark.parametrize("profile", CONTRACT["profiles"])
def test_a_page_with_everything_is_complete(check, profile):
    done = check(profile)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines(done, "present")) == len(names_of(profile))
    assert done.stderr == f"check_metrics: {profile}: complete\n"


def test_counters_may_wait_for_their_first_event_and_gauges_may_not(check):
    profile, always = "lmcache-0.5.6", {"lmcache_mp_l2_store_adapters"}
    waiting = check(profile, lmcache={"lmcache_mp_l2_prefetch_adapters"} | always)
    assert waiting.returncode == 0, waiting.stdout
    assert "waiting lmcache lmcache_mp_l2_prefetch_failure_chunks_total" in waiting.stdout
    missing = check(profile, lmcache=always)
    assert missing.returncode == 1
    assert lines(missing, "missing") == ["missing lmcache lmcache_mp_l2_prefetch_adapters"]


def test_a_name_of_another_version_is_renamed_not_waiting(check):
    old = check("lmcache-0.5.6", lmcache=names_of("lmcache-0.5.2", "lmcache"))
    assert old.returncode == 1
    assert (
        "renamed lmcache lmcache_mp_lookup_hit_l2_keys_total served as "
        "lmcache_mp_l2_prefetch_hit_chunks_total: give the other --profile"
    ) in lines(old, "renamed")
    new = check("lmcache-0.5.2", lmcache=names_of("lmcache-0.5.6", "lmcache"))
    assert new.returncode == 1
    assert len(lines(new, "renamed")) == 2


def test_a_missing_series_of_vllm_is_a_fault_in_every_profile(check):
    served = names_of("plain", "vllm") - {"vllm:external_prefix_cache_hits_total"}
    done = check("plain", vllm=served)
    assert done.returncode == 1
    assert lines(done, "missing") == ["missing vllm vllm:external_prefix_cache_hits_total"]
    assert "1 of 29 series missing or renamed" in done.stderr


def test_what_cannot_be_read_is_told_and_not_judged(check, script):
    done = script("check_metrics.py", "--profile", "plain", "--url=policy=http://127.0.0.1:9/")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("check_metrics: http://127.0.0.1:9/: ")
    assert len(done.stderr.splitlines()) == 1
    garbage = check("plain", vllm="<html>no metrics</html>\n")
    assert garbage.returncode == 2
    assert "/vllm: no metrics came but <html>no metrics</html>" in garbage.stderr


@pytest.mark.parametrize(
    "arguments", [("--profile", "none"), (), ("--profile", "plain", "--url", "http://a/metrics")]
)
def test_bad_usage_is_refused(script, arguments):
    done = script("check_metrics.py", *arguments)
    assert done.returncode == 2
    assert "error:" in done.stderr
