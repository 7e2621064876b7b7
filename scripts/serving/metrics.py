# SPDX-License-Identifier: Apache-2.0
"""What a running server says about itself: prefix-cache counters, and the policy's mode.

Both come from Prometheus text. A series that is absent is an error, never a zero.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving import http
from serving.replies import shown, status_fault

POLICY_SETTINGS = (
    "scan_limit",
    "reuse_weight",
    "depth_weight",
    "age_weight",
    "quick_demote_penalty",
    "log_every",
)
UNPATCHED = "unpatched"


class MetricsError(RuntimeError):
    """Metrics are missing, contradict each other, or cannot be read."""


@dataclass(frozen=True)
class PrefixCounters:
    """Tokens looked up in the prefix cache and tokens found there, over all engines.

    hits_tokens: found on the device. external_tokens: found in a KV connector's tier instead.
    """

    queries_tokens: int
    hits_tokens: int
    external_tokens: int = 0

    def __sub__(self, earlier: PrefixCounters) -> PrefixCounters:
        return PrefixCounters(
            self.queries_tokens - earlier.queries_tokens,
            self.hits_tokens - earlier.hits_tokens,
            self.external_tokens - earlier.external_tokens,
        )


def _samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"no metrics came but {shown(text)}: is this the address?") from error
    return found


def _count(name: str, value: float) -> int:
    if not math.isfinite(value):
        raise MetricsError(f"{name} is {value}, no count: restart the server")
    return round(value)


def series_names(url: str) -> set[str]:
    """Return the names of the series on a metrics page.

    Raises MetricsError when it cannot be read or is no Prometheus text, WorkloadError as fetch.
    """
    text = fetch(url)
    try:
        return set(_samples(text))
    except MetricsError as error:
        raise MetricsError(f"{url}: {error}") from error


def prefix_counters(text: str) -> PrefixCounters:
    """Sum vLLM's prefix-cache counters over engines. Raises MetricsError when one is absent.

    A server that has no counter for external hits has no tier to find them in.
    """
    samples = _samples(text)
    sums = []
    for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"):
        if name not in samples:
            raise MetricsError(f"{name} is not on /metrics: is prefix caching on, is this vLLM?")
        sums.append(_count(name, sum(value for _, value in samples[name])))
    queries_tokens, hits_tokens = sums
    if by_source := samples.get("vllm:prompt_tokens_cached_by_source_total"):
        device = [value for labels, value in by_source if labels["source"] == "device"]
        hits_tokens = _count("vllm:prompt_tokens_cached_by_source_total", sum(device))
    external = samples.get("vllm:external_prefix_cache_hits_total", [])
    loaded = _count("vllm:external_prefix_cache_hits_total", sum(v for _, v in external))
    return PrefixCounters(queries_tokens, hits_tokens, loaded)


def policy_state(text: str) -> dict:
    """Return the policy's mode, settings and counters from its own metrics endpoint.

    Several pools or engines must agree on mode and settings; their counters are added up.
    Raises MetricsError when the endpoint has no policy or they disagree.
    """
    samples = _samples(text)
    infos = [labels for labels, _ in samples.get("vllm:computecache_info", [])]
    if not infos:
        raise MetricsError("vllm:computecache_info is absent: this endpoint serves no policy")
    distinct = {tuple(info.get(name, "") for name in ("mode", *POLICY_SETTINGS)) for info in infos}
    if len(distinct) > 1:
        raise MetricsError(f"the engines disagree on mode or settings: {sorted(distinct)}")
    mode, *values = distinct.pop()
    counters: dict[str, int] = {}
    for name, found in samples.items():
        if name.startswith("vllm:computecache_") and name.endswith("_total"):
            for labels, value in found:
                key = name.removeprefix("vllm:computecache_").removesuffix("_total")
                if "class" in labels:
                    key = f"{key}_{labels['class']}"
                counters[key] = counters.get(key, 0) + _count(name, value)
    try:
        settings = dict(zip(POLICY_SETTINGS, map(int, values), strict=True))
    except ValueError as error:
        raise MetricsError(
            f"vllm:computecache_info holds no settings: {shown(str(values))}"
        ) from error
    return {"mode": mode, "settings": settings, "counters": counters, "pools": len(infos)}


def fetch(url: str, timeout_s: float = 10) -> str:
    """GET a metrics page. Raises MetricsError naming the address when it does not answer 200.

    WorkloadError when the address or the proxy settings cannot be used.
    """
    try:
        response = http.get(url, timeout_s)
    except httpx.HTTPError as error:
        raise MetricsError(f"{url}: {error or type(error).__name__}") from error
    if fault := status_fault(response):
        raise MetricsError(f"{url}: {fault}")
    return response.text


def policy_at(urls: list[str]) -> dict:
    """Return the state of the policy at these addresses, one for each engine, as policy_state does.

    Raises MetricsError naming the addresses.
    """
    text = "\n".join(map(fetch, urls))
    try:
        return policy_state(text)
    except MetricsError as error:
        raise MetricsError(f"{' '.join(urls)}: {error}") from error


def compose_fetch(compose: list[str], folder: Path, service: str, port: int) -> Callable[[], str]:
    """Return a reader of the policy endpoint inside a Compose service, which binds no host port.

    `compose` is the command line up to and including its own options, run in `folder`.
    """
    # Past any proxy: the container may have HTTP_PROXY from the engine's settings.
    program = (
        "import urllib.request as u; o = u.build_opener(u.ProxyHandler({})); "
        f"print(o.open('http://127.0.0.1:{port}/metrics', timeout=10).read().decode())"
    )

    def read() -> str:
        command = [*compose, "exec", "-T", service, "python3", "-c", program]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise MetricsError(f"`compose exec {service}` did not end within 60 s") from error
        if done.returncode:
            raise MetricsError(f"`compose exec {service}`: {done.stderr.strip()[-400:]}")
        return done.stdout

    return read
