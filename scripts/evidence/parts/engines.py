# SPDX-License-Identifier: Apache-2.0
"""The drill on each of two engines of one server, CPU or two GPUs."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from evidence.bench import Bench, kept, options
from servers.embedded import EmbeddedServer
from servers.tiny_model import make_model
from serving.client import Client
from serving.console import progress
from serving.metrics import MetricsError, fetch, policy_state
from serving.press import press, read_policy

# What the H200 runs with; the last of an option given twice counts.
GPU_ARGS = (
    *("--load-format", "dummy", "--dtype", "bfloat16", "--max-num-seqs", "16"),
    *("--gpu-memory-utilization", "0.1"),
)


async def dp2(bench: Bench) -> None:
    """Two engines on a machine without a GPU."""
    model = make_model(bench.fleet.folder / "tiny-model")
    await _two_engines(bench, model, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, (), 640)


async def dp2gpu(bench: Bench) -> None:
    """Two engines on two GPUs: the 0.6B shape, one engine on each."""
    spec = bench.fleet.of("small")[0]
    env = bench.fleet.env | {"PYTHONPATH": bench.fleet.pythonpath["patched"]}
    await _two_engines(bench, Path(spec.model), env, GPU_ARGS, 600, block_size=16, blocks=128)


async def _two_engines(
    bench: Bench,
    model: Path,
    env: dict[str, str],
    args: tuple[str, ...],
    tokens: int,
    **cache: int,
) -> None:
    for mode in ("lru", "active"):
        if bench.store.cell(bench.part, mode) is not None:
            continue
        progress(f"{bench.part}: starting two engines, mode {mode}")
        server = EmbeddedServer(
            model,
            mode,
            bench.fleet.folder / f"{bench.part}-{mode}.log",
            env=env,
            args=("--data-parallel-size", "2", *args),
            **cache,
        )
        with server:
            first = int(server.policy_metrics_url.rsplit(":", 1)[1].split("/")[0])
            urls = _policy_urls(first, engines=2)
            pools = {e: {"pools": policy_state(fetch(url))["pools"]} for e, url in urls.items()}
            reports = {
                str(rank): await _press_rank(server.base_url, urls, rank, tokens)
                for rank in range(2)
            }
        data = {"ready_s": server.ready_s, "endpoints": pools, "engines": reports}
        bench.store.add(bench.part, mode, data)
        progress(
            f"{bench.part} {mode}: "
            + ", ".join(
                f"engine {rank} kept {report['post_flood_cached_tokens']} of "
                f"{report['warm_prefix_cached_tokens']}"
                for rank, report in reports.items()
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


async def _press_rank(base_url: str, urls: dict[str, str], rank: int, tokens: int) -> dict:
    """Run the drill on one engine; what each engine's policy decided meanwhile is in the answer."""

    def decisions() -> dict[str, int]:
        return {e: policy_state(fetch(u))["counters"]["decisions"] for e, u in urls.items()}

    asked = options(
        hot_tokens=tokens, flood_tokens=tokens, flood_requests=6, repetitions=2, seed=rank
    )
    before = decisions()
    async with Client(base_url, data_parallel_rank=rank) as client:
        report = await press(client, asked, lambda: read_policy([urls[str(rank)]]))
    after = decisions()
    return {
        "decisions": {engine: after[engine] - before[engine] for engine in after},
        **kept(report),
    }
