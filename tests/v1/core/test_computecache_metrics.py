# SPDX-License-Identifier: Apache-2.0
"""The policy's own Prometheus endpoint, over real sockets on 127.0.0.1."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

CORE = Path(__file__).parents[3] / "vllm/v1/core"
MODULE = CORE / "computecache_metrics.py"


def load_module(path: Path):
    """A fresh copy, so that each test has its own process-wide endpoint."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


policy_module = load_module(CORE / "computecache_policy.py")


@pytest.fixture
def metrics():
    return load_module(MODULE)


@pytest.fixture
def endpoint(metrics):
    """start(collector, ...) -> server; every server is closed at the end."""
    servers = []

    def start(*args, **kwargs):
        servers.append(metrics.start_endpoint(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def make_policy(mode="active", pool="", off_because="", **counts):
    return SimpleNamespace(
        settings=policy_module.Settings(mode=mode),
        counters=policy_module.Counters(**counts),
        enabled=mode == "active" and not off_because,
        pool=pool,
        off_because=off_because,
    )


def free_port_range() -> int:
    """The first of 16 ports that are free now."""
    for base in range(20000, 30000, 16):
        if all(is_free(port) for port in range(base, base + 16)):
            return base
    raise AssertionError("no 16 free ports in a row")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def scrape(port: int, accept: str = "*/*") -> httpx.Response:
    response = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    response.raise_for_status()
    return response


def samples(port: int) -> dict:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(scrape(port).text)
        for s in family.samples
    }


def value(port: int, name: str, **labels) -> float:
    labels = {"engine": "0", "pool": "0"} | labels
    return samples(port)[f"vllm:computecache_{name}", tuple(sorted(labels.items()))]


def test_every_counter_is_served_under_its_name_and_class(metrics, endpoint):
    counts = {
        "decisions": 11,
        "reordered_decisions": 7,
        "inspected_blocks": 300,
        "fallbacks": 1,
        "protected_hits": 5,
        "victims_unhashed": 21,
        "victims_never_reused": 22,
        "victims_reused": 23,
        "victims_protected": 24,
    }
    collector = metrics.PolicyCollector("0")
    collector.policies.append(make_policy(**counts))
    port = endpoint(collector, "127.0.0.1", free_port_range()).server_port

    for name, count in counts.items():
        if name.startswith("victims_"):
            assert value(port, "victims_total", **{"class": name[len("victims_") :]}) == count
        else:
            assert value(port, f"{name}_total") == count
    info = value(
        port,
        "info",
        mode="active",
        scan_limit="64",
        reuse_weight="64",
        depth_weight="1",
        age_weight="1",
        quick_demote_penalty="4096",
        log_every="256",
    )
    assert info == 1


@pytest.mark.parametrize(
    ("deployed", "mode", "enabled", "in_force"),
    [
        ("active", "active", True, 1),
        ("lru", "lru", False, 1),
        ('"Active"', "active", True, 1),
        ("activ", "lru", False, 0),
        ("active", "active", False, 0),
    ],
    ids=["active", "lru", "quoted", "refused value", "caching off"],
)
def test_mode_in_force_tells_a_policy_that_does_not_act_as_deployed(
    metrics, endpoint, deployed, mode, enabled, in_force
):
    collector = metrics.PolicyCollector("0", deployed)
    policy = make_policy(mode)
    policy.enabled = enabled
    collector.policies.append(policy)
    port = endpoint(collector, "127.0.0.1", free_port_range()).server_port
    assert value(port, "mode_in_force", deployed=deployed) == in_force


def test_values_are_read_at_scrape_time(metrics, endpoint):
    policy = make_policy(decisions=1)
    collector = metrics.PolicyCollector("0")
    collector.policies.append(policy)
    port = endpoint(collector, "127.0.0.1", free_port_range()).server_port
    assert value(port, "decisions_total") == 1
    policy.counters.decisions = 2**40
    assert value(port, "decisions_total") == 2**40


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
        "text/plain;version=1.0.0;escaping=underscores;q=0.4,*/*;q=0.2",
        "*/*",
    ],
    ids=["Prometheus 2", "Prometheus 3 with underscore escaping", "curl"],
)
def test_names_keep_their_colon_whatever_the_client_prefers(metrics, endpoint, accept):
    collector = metrics.PolicyCollector("0")
    collector.policies.append(make_policy(fallbacks=3))
    port = endpoint(collector, "127.0.0.1", free_port_range()).server_port
    response = scrape(port, accept)
    assert response.headers["content-type"].startswith("text/plain")
    assert 'vllm:computecache_fallbacks_total{engine="0",pool="0"} 3.0' in response.text


def test_the_real_policy_has_every_setting_and_counter(metrics, endpoint):
    settings = policy_module.Settings(mode="active", scan_limit=16)
    policy = policy_module.ComputeCachePolicy(settings, num_blocks=8, hash_block_size=16)
    policy.counters.decisions = 3
    collector = metrics.PolicyCollector("0", "active")
    collector.policies.append(policy)
    port = endpoint(collector, "127.0.0.1", free_port_range()).server_port
    assert value(port, "decisions_total") == 3
    assert value(port, "mode_in_force", deployed="active") == 1
    assert 'mode="active"' in scrape(port).text
    assert 'scan_limit="16"' in scrape(port).text
    families = {f.name: f for f in text_string_to_metric_families(scrape(port).text)}
    labels = families["vllm:computecache_info"].samples[0].labels
    assert set(labels) == {"engine", "pool", *(s.name for s in fields(policy_module.Settings))}
    for counter in fields(policy_module.Counters):
        if counter.name.startswith("victims_"):
            classes = {s.labels["class"] for s in families["vllm:computecache_victims"].samples}
            assert counter.name.removeprefix("victims_") in classes
        else:
            text = families[f"vllm:computecache_{counter.name}"].documentation
            assert text == counter.metadata["help"]


def test_pools_are_named_and_one_that_is_off_says_why(metrics, endpoint):
    collector = metrics.PolicyCollector("0", "active")
    why = "a connector's reason"
    collector.policies += [make_policy(), make_policy(pool="scheduler", off_because=why)]
    port = endpoint(collector, "127.0.0.1", free_port_range()).server_port
    assert value(port, "off", pool="0", reason="") == 0
    assert value(port, "off", pool="scheduler", reason=why) == 1
    assert value(port, "mode_in_force", pool="scheduler", deployed="active") == 0
    assert value(port, "mode_in_force", pool="0", deployed="active") == 1


def test_taken_port_moves_on_and_says_so(metrics, endpoint, caplog):
    base = free_port_range()
    with socket.create_server(("127.0.0.1", base)):
        server = endpoint(metrics.PolicyCollector("0"), "127.0.0.1", base)
    assert server.server_port == base + 1
    assert f"port {base} is taken" in caplog.text


def test_second_engine_never_shares_the_first_ones_port(metrics, endpoint):
    base = free_port_range()
    first = endpoint(metrics.PolicyCollector("0"), "127.0.0.1", base)
    second = endpoint(metrics.PolicyCollector("0"), "127.0.0.1", base)
    assert (first.server_port, second.server_port) == (base, base + 1)


def test_rank_chooses_the_port_and_wraps_round(metrics, endpoint):
    base = free_port_range()
    for rank in (1, 17):
        server = endpoint(metrics.PolicyCollector(str(rank)), "127.0.0.1", base, rank)
        assert server.server_port == base + rank % 16 + (rank == 17)


def test_sixteen_taken_ports_are_an_error_that_names_the_remedy(metrics, endpoint):
    base = free_port_range()
    with contextlib.ExitStack() as taken:
        for port in range(base, base + 16):
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(OSError, match=r"all taken: set COMPUTECACHE_METRICS_PORT"):
            metrics.start_endpoint(metrics.PolicyCollector("0"), "127.0.0.1", base)


def test_unset_or_blank_port_binds_nothing(metrics):
    for environ in ({}, {"COMPUTECACHE_METRICS_PORT": " "}):
        metrics.serve_policy(make_policy(), environ)
    assert metrics._collector is None


@pytest.mark.parametrize("text", ["0", "65521", "80a", "-1", "8001.0"])
def test_malformed_port_is_named_in_the_error(metrics, text):
    with pytest.raises(ValueError, match=rf"COMPUTECACHE_METRICS_PORT='{text}'"):
        metrics.serve_policy(make_policy(), {"COMPUTECACHE_METRICS_PORT": text})


@pytest.mark.parametrize(
    ("name", "rank"),
    [("EngineCore", 0), ("EngineCore_DP0", 0), ("EngineCore_DP12", 12), ("MainProcess", 0)],
)
def test_engine_rank_from_the_process_name(metrics, name, rank):
    assert metrics.engine_rank(name) == rank


SEVERAL_POLICIES = """
import importlib.util, multiprocessing, os, sys, urllib.request
def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
metrics, policy = load("computecache_metrics"), load("computecache_policy")
multiprocessing.current_process().name = "EngineCore_DP1"
for mode in ("active", "lru"):
    settings = policy.Settings(mode=mode)
    metrics.serve_policy(policy.ComputeCachePolicy(settings, num_blocks=8, hash_block_size=16))
port = int(os.environ["COMPUTECACHE_METRICS_PORT"]) + 1
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
"""


def test_one_endpoint_for_all_policies_of_an_engine_in_multiprocess_mode(tmp_path):
    """Two pools in EngineCore_DP1, with the environment vLLM sets for itself.

    The process must also end by itself: the endpoint's thread is a daemon.
    """
    result = subprocess.run(
        [sys.executable, "-c", SEVERAL_POLICIES, str(CORE)],
        env=os.environ
        | {
            "COMPUTECACHE_METRICS_PORT": str(free_port_range()),
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    families = {f.name: f for f in text_string_to_metric_families(result.stdout)}
    modes = {
        (s.labels["engine"], s.labels["pool"]): s.labels["mode"]
        for s in families["vllm:computecache_info"].samples
    }
    assert modes == {("1", "0"): "active", ("1", "1"): "lru"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lookup", ["getfqdn", "gethostbyaddr", "gethostbyname", "getnameinfo"])
def test_no_resolver_is_asked_for_a_name_while_the_engine_starts(
    metrics, endpoint, monkeypatch, lookup
):
    """http.server asks for this machine's name when it binds: 6 s where the resolver is slow."""

    def slow(*arguments):
        raise AssertionError(f"{lookup} was asked")

    monkeypatch.setattr(socket, lookup, slow)
    server = endpoint(metrics.PolicyCollector("0"), "127.0.0.1", free_port_range())
    assert httpx.get(f"http://127.0.0.1:{server.server_port}/metrics", trust_env=False).is_success


@pytest.mark.parametrize(
    ("value", "host"),
    [("", "127.0.0.1"), (" ", "127.0.0.1"), ("[::1]", "::1"), (" ::1 ", "::1"), ("::", "::")],
)
def test_an_ipv6_host_may_be_in_brackets(metrics, value, host):
    assert metrics.metrics_host(value) == host


def test_an_ipv6_host_in_brackets_is_served_and_logged_as_an_address(metrics, caplog):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    environ = {"COMPUTECACHE_METRICS_HOST": "[::1]", "COMPUTECACHE_METRICS_PORT": str(port)}
    policy = policy_module.ComputeCachePolicy(policy_module.Settings(), 8, 16)
    with caplog.at_level("INFO"):
        metrics.serve_policy(policy, environ)
    (address,) = [word for word in caplog.text.split() if word.startswith("http://")]
    assert address.startswith("http://[::1]:")
    assert "vllm:computecache_info" in httpx.get(address, trust_env=False).text
