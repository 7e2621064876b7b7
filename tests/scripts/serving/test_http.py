# SPDX-License-Identifier: Apache-2.0
"""This machine's own addresses are reached past any proxy; every other obeys the variables."""

import ast
import asyncio
import http.server
import threading
from pathlib import Path

import pytest

from servers.processes import healthy
from serving import http as serving_http
from serving.client import Client
from serving.metrics import MetricsError, fetch
from serving.requests import WorkloadError

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
DEAD = "127.0.0.1:9"  # nothing listens on the discard port
PROXIES = {
    "HTTP_PROXY": f"http://{DEAD}",
    "HTTPS_PROXY": f"http://{DEAD}",
    "ALL_PROXY": f"socks5://{DEAD}",
    "NO_PROXY": "fd00::/8,example.org",
}
NAMES = sorted([*PROXIES, *(name.lower() for name in PROXIES)])


@pytest.fixture
def set_proxies(monkeypatch):
    """set_proxies(NAME=value, ...): these and no other proxy variables."""

    def set_only(**values):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
            monkeypatch.setenv(name.lower(), value)

    return set_only


@pytest.fixture
def proxy():
    """A proxy that answers every GET itself; `asked` are the addresses it was asked for."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"by proxy\n")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def pool_of(url):
    async with Client(url) as client:
        return await client.token_pool()


@pytest.mark.parametrize("names", [[name] for name in PROXIES] + [list(PROXIES)], ids="+".join)
def test_loopback_is_reached_whatever_the_proxy_variables_say(fake, set_proxies, names):
    set_proxies(**{name: PROXIES[name] for name in names})
    with fake("--mode", "active") as server:
        for address in (server.url, server.url.replace("127.0.0.1", "localhost")):
            assert healthy(address)
            assert "computecache_info" in fetch(f"{address}/policy/metrics")
            assert asyncio.run(pool_of(address))[1] == 1024


def test_another_machine_is_asked_for_through_the_proxy(proxy, set_proxies):
    set_proxies(HTTP_PROXY=f"http://127.0.0.1:{proxy.server_port}")
    assert fetch("http://far.example:8001/metrics") == "by proxy\n"
    assert healthy("http://far.example:8000")

    async def get():
        async with serving_http.async_client("http://far.example:8000", timeout_s=10) as client:
            return (await client.get("/v1/models")).text

    assert asyncio.run(get()) == "by proxy\n"
    assert [address.rpartition(":")[2] for address in proxy.asked] == [
        *("8001/metrics", "8000/health", "8000/v1/models")
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("NO_PROXY", "fd00::/8"), ("HTTP_PROXY", "ftp://x")],
)
def test_proxy_settings_that_cannot_be_used_are_named(set_proxies, name, value):
    set_proxies(**{name: value})
    with pytest.raises(WorkloadError, match=rf"far\.example.* unset or correct .*{name}"):
        fetch("http://far.example:8001/metrics")
    with pytest.raises(WorkloadError, match=name):
        Client("http://far.example:8000")


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://localhost:x", "ftp://h/"])
def test_what_is_no_address_is_refused_with_the_form_of_one(url):
    with pytest.raises(WorkloadError, match=r"is no address.* http://HOST:PORT"):
        fetch(url)
    with pytest.raises(WorkloadError, match=r"is no address.* http://HOST:PORT"):
        Client(url)


def test_a_dead_server_is_an_error_of_its_metrics_not_of_the_proxy(set_proxies):
    set_proxies(**PROXIES)
    assert not healthy(f"http://{DEAD}")
    with pytest.raises(MetricsError, match="refused"):
        fetch(f"http://{DEAD}/metrics")


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("api.localhost", True),
        ("127.8.9.1", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("0.0.0.0", True),
        ("localhost.example", False),
        ("10.0.0.1", False),
        ("[fd00::1]", False),
        ("127.0.0.1.example", False),
    ],
)
def test_what_counts_as_this_machine(host, here):
    assert serving_http.on_this_machine(f"http://{host}:8000/metrics") is here


def calls_of_clients(tree):
    """Lines on which a file imports another HTTP client, or calls httpx itself."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if node.module == "httpx":
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func.value
            if isinstance(called, ast.Name) and called.id == "httpx":
                yield node.lineno
        if set(names) & {"urllib.request", "http.client", "requests", "aiohttp"}:
            yield node.lineno


def test_one_file_of_scripts_makes_http_clients():
    found = {
        path.relative_to(SCRIPTS).as_posix()
        for path in SCRIPTS.rglob("*.py")
        if list(calls_of_clients(ast.parse(path.read_bytes())))
    }
    assert found == {"serving/http.py"}


@pytest.mark.parametrize(
    "line",
    [
        "httpx.get(url)",
        "import urllib.request as u",
        "from urllib import request",
        "from httpx import get",
        "import http.client",
    ],
)
def test_another_client_would_be_seen(line):
    assert list(calls_of_clients(ast.parse(line)))
