# SPDX-License-Identifier: Apache-2.0
"""Part 7 of gpu_evidence.py: the drill on each of two engines of one CPU server."""

from __future__ import annotations

from embedded_server import EmbeddedServer
from gpu_bench import KEPT_KEYS, Bench, options
from gpu_servers import say
from make_model import make_model
from prefix_pressure import press, read_policy
from prometheus_client.parser import text_string_to_metric_families
from server_metrics import MetricsError, fetch, policy_state
from workload import Client


async def dp2(bench: Bench) -> None:
    """Part 7, on a machine without a GPU: the drill on each of two engines of one server."""
    model = make_model(bench.fleet.folder / "tiny-model")
    for mode in ("lru", "active"):
        if bench.store.cell(bench.part, mode) is not None:
            continue
        say(f"dp2: starting two engines, mode {mode}")
        server = EmbeddedServer(
            model,
            mode,
            bench.fleet.folder / f"dp2-{mode}.log",
            env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            args=("--data-parallel-size", "2"),
        )
        with server:
            first = int(server.policy_metrics_url.rsplit(":", 1)[1].split("/")[0])
            urls = _policy_urls(first, engines=2)
            data = {"ready_s": server.ready_s, "endpoints": {}, "engines": {}}
            for engine, url in urls.items():
                data["endpoints"][engine] = {"pools": policy_state(fetch(url))["pools"]}
            for rank in range(2):
                data["engines"][str(rank)] = await _press_rank(server.base_url, urls, rank)
        bench.store.add(bench.part, mode, data)
        say(
            f"dp2 {mode}: "
            + ", ".join(
                f"engine {rank} kept {report['post_flood_cached_tokens']} of "
                f"{report['warm_prefix_cached_tokens']}"
                for rank, report in data["engines"].items()
            )
        )


def _policy_urls(first_port: int, engines: int) -> dict[str, str]:
    """Return the endpoint of each engine, by the engine it says it is."""
    found: dict[str, str] = {}
    for port in range(first_port, first_port + 16):
        url = f"http://127.0.0.1:{port}/metrics"
        try:
            text = fetch(url, timeout_s=2)
        except MetricsError:
            continue
        served = {
            sample.labels["engine"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:computecache_info"
        }
        if len(served) != 1 or served & set(found):
            raise MetricsError(f"{url} serves engines {sorted(served)}, others have {list(found)}")
        found[served.pop()] = url
    if len(found) != engines:
        raise MetricsError(f"{len(found)} policy endpoints answer, {engines} were expected")
    return found


async def _press_rank(base_url: str, urls: dict[str, str], rank: int) -> dict:
    """Run the drill on one engine; what each engine's policy decided meanwhile is in the answer."""

    def decisions() -> dict[str, int]:
        return {e: policy_state(fetch(u))["counters"]["decisions"] for e, u in urls.items()}

    asked = options(hot_tokens=640, flood_tokens=640, flood_requests=6, repetitions=2, seed=rank)
    before = decisions()
    async with Client(base_url, data_parallel_rank=rank) as client:
        report = await press(client, asked, lambda: read_policy([urls[str(rank)]]))
    after = decisions()
    return {
        "decisions": {engine: after[engine] - before[engine] for engine in after},
        **{name: report[name] for name in KEPT_KEYS if name in report},
    }
