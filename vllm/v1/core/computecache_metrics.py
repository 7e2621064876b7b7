# SPDX-License-Identifier: Apache-2.0
"""Prometheus endpoint for the ComputeCache policies of one engine process.

A policy counts in plain integers. The collector here reads them when Prometheus
asks, so a decision costs the same with and without the endpoint. It has a
registry of its own: vLLM's `/metrics` lives in another process, and
`PROMETHEUS_MULTIPROC_DIR` (which switches prometheus_client metrics to files)
has no effect on a custom collector.
"""

import errno
import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from socket import AF_INET6
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

PREFIX = "vllm:computecache"
PORTS_TRIED = 16
VICTIMS = "victims_"  # counters of this name are one family, by class


class PolicyCollector(Collector):
    """Turns the counters of several policies into metric families, when scraped.

    What there is to serve is what the policy's Settings and Counters have; the HELP texts are
    those of Counters.

    `pool` is "scheduler" for the pool that requests allocate from. Others, such as an offload
    connector's, are numbered in the order in which they were built.
    """

    def __init__(self, engine: str, deployed_mode: str = "lru") -> None:
        self.engine = engine
        self.deployed_mode = deployed_mode
        self.policies: list[Any] = []

    def collect(self) -> Iterator[Metric]:
        pools = [
            ([self.engine, policy.pool or str(i)], policy) for i, policy in enumerate(self.policies)
        ]
        labels = ("engine", "pool")
        if not pools:
            return
        any_policy = self.policies[0]

        settings = [setting.name for setting in fields(any_policy.settings)]
        info = GaugeMetricFamily(
            f"{PREFIX}_info", "Settings in force (always 1).", labels=(*labels, *settings)
        )
        for pool, policy in pools:
            info.add_metric([*pool, *(str(getattr(policy.settings, s)) for s in settings)], 1)
        yield info

        in_force = GaugeMetricFamily(
            f"{PREFIX}_mode_in_force",
            "1 if the policy acts as COMPUTECACHE_MODE asks, 0 if the value was refused, "
            "prefix caching is off or the policy switched itself off.",
            labels=(*labels, "deployed"),
        )
        wanted = self.deployed_mode.strip(" \t\r\n\"'").lower()
        for pool, policy in pools:
            acts = policy.enabled == (wanted == "active")
            in_force.add_metric(
                [*pool, self.deployed_mode.strip()], acts and policy.settings.mode == wanted
            )
        yield in_force

        off = GaugeMetricFamily(
            f"{PREFIX}_off",
            "1 if an active policy leaves its pool in plain LRU for good, and why.",
            labels=(*labels, "reason"),
        )
        for pool, policy in pools:
            off.add_metric([*pool, policy.off_because], bool(policy.off_because))
        yield off

        victims = CounterMetricFamily(
            f"{PREFIX}_victims",
            "Blocks handed out by the policy's decisions, by class.",
            labels=(*labels, "class"),
        )
        for field in fields(any_policy.counters):
            name, is_class = field.name.removeprefix(VICTIMS), field.name.startswith(VICTIMS)
            counter = CounterMetricFamily(f"{PREFIX}_{name}", field.metadata["help"], labels=labels)
            for pool, policy in pools:
                count = getattr(policy.counters, field.name)
                if is_class:
                    victims.add_metric([*pool, name], count)
                else:
                    counter.add_metric(pool, count)
            if not is_class:
                yield counter
        yield victims


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # Two engines on one port would answer scrapes in turn, each with its own counters.
    allow_reuse_port = False

    def server_bind(self) -> None:
        """Bind without asking a resolver for this machine's name, as http.server does.

        A slow one would hold the engine's start up; nothing here uses the name.
        """
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds; a silent client gives its thread back

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a log line each."""


def start_endpoint(collector: PolicyCollector, host: str, port: int, rank: int = 0) -> WSGIServer:
    """Serve `collector` from a daemon thread and return the running server.

    Rank r of a data-parallel deployment starts at `port + r`; a taken port moves
    on to the next one, within `port .. port + 15`. The port in use is
    `server.server_port`.

    Raises:
        OSError: `host` cannot be bound, or all 16 ports are taken.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    server = _bind(host, port, rank)
    server.set_app(_plain_text(make_wsgi_app(registry)))
    threading.Thread(target=server.serve_forever, name="computecache-metrics", daemon=True).start()
    return server


WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _plain_text(app: WSGIApp) -> WSGIApp:
    """Leave the format to the server: plain text, whatever the client prefers.

    In an OpenMetrics answer prometheus_client may write `vllm_` for `vllm:`,
    which depends on its version and on Prometheus's, and no query would match.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return app(environ, start_response)

    return answer


def _bind(host: str, port: int, rank: int) -> WSGIServer:
    server_class = _Server6 if ":" in host else _Server
    for step in range(PORTS_TRIED):
        candidate = port + (rank + step) % PORTS_TRIED
        try:
            return server_class((host, candidate), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            logger.warning("ComputeCache metrics: port %d is taken, trying the next", candidate)
    raise OSError(
        f"ports {port}..{port + PORTS_TRIED - 1} on {host} are all taken: "
        "set COMPUTECACHE_METRICS_PORT to a free range"
    )


def engine_rank(process_name: str) -> int:
    """Data-parallel rank in an engine process's name ("EngineCore_DP3"), 0 without one."""
    match = re.search(r"_DP(\d+)$", process_name)
    return int(match[1]) if match else 0


def metrics_port(value: str) -> int:
    """Parse COMPUTECACHE_METRICS_PORT.

    Raises:
        ValueError: not a whole number that leaves room for 15 more ports.
    """
    highest = 65536 - PORTS_TRIED
    if value.strip().isdecimal() and 1 <= int(value) <= highest:
        return int(value)
    raise ValueError(
        f"COMPUTECACHE_METRICS_PORT={value!r}: give a port from 1 to {highest}, "
        "or leave it unset to serve no policy metrics"
    )


def metrics_host(value: str) -> str:
    """Return the host to bind of COMPUTECACHE_METRICS_HOST: an IPv6 address may be in brackets."""
    host = value.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or "127.0.0.1"


_lock = threading.Lock()
_collector: PolicyCollector | None = None


def serve_policy(policy: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Add `policy` to this process's endpoint; the first call starts the endpoint.

    `policy` needs the attributes `settings` and `counters`, dataclasses, `enabled`, `pool` and
    `off_because`. It stays listed for the life of the process. Nothing is bound unless
    COMPUTECACHE_METRICS_PORT is set; COMPUTECACHE_METRICS_HOST (default 127.0.0.1) is the address.

    Raises:
        ValueError, OSError: the port is malformed or nothing can be bound. The
            caller logs it and serves without policy metrics.
    """
    global _collector
    value = environ.get("COMPUTECACHE_METRICS_PORT", "")
    if not value.strip():
        return
    with _lock:
        if _collector is None:
            rank = engine_rank(multiprocessing.current_process().name)
            deployed = environ.get("COMPUTECACHE_MODE", "").strip() or "lru"
            collector = PolicyCollector(str(rank), deployed)
            host = metrics_host(environ.get("COMPUTECACHE_METRICS_HOST", ""))
            server = start_endpoint(collector, host, metrics_port(value), rank)
            logger.info(
                "ComputeCache metrics of engine %d: http://%s:%d/metrics",
                rank,
                f"[{host}]" if ":" in host else host,
                server.server_port,
            )
            _collector = collector
        _collector.policies.append(policy)
