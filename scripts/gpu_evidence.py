# SPDX-License-Identifier: Apache-2.0
"""Measure ComputeCache on a GPU: unpatched, lru and active servers side by side, raw JSON out.

Parts, in the order in which they run: smoke starts an lru server of the middle and of the large
model, drill, long, ttft, cost, controls, trace; prestart leaves the large model's servers starting
for the next call; dp2 needs no GPU and dp2gpu two of them; tiers adds CPU tiers to the large
model's servers; agents gives them a pool that is a share of a trace's blocks. Each part writes
<part>.json after every cell, to --out and to --state, and goes on from there when it is called
again. docs/gpu.md says how to run it; tools/gpu_report.py turns the files into docs/results.md.

Exit 0: every part has all its cells. 1: a cell or a server failed (the JSON says which). 2: it
could not run, or the time was too short for all cells.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from evidence import plan
from evidence.bench import Bench, Full
from evidence.machine import machine, policy_sha256, prepare
from evidence.parts.agents import agents
from evidence.parts.controls import controls
from evidence.parts.cost import cost
from evidence.parts.engines import dp2, dp2gpu
from evidence.parts.press import drill, long
from evidence.parts.start import prestart, smoke
from evidence.parts.tiers import tiers
from evidence.parts.trace import trace
from evidence.parts.ttft import ttft
from evidence.store import Store
from servers.fleet import Fleet
from servers.tiny_model import make_model
from serving.command import run_command
from serving.console import now, progress
from serving.files import REPO
from serving.traces import trace_file

PARTS = {
    part.__name__: part
    for part in (
        *(smoke, drill, long, ttft, cost, controls, trace, prestart, dp2, dp2gpu, tiers, agents),
    )
}
DEFAULT_PARTS = "smoke,drill,long,ttft,cost,controls,trace"
STOPPING_S = 12.0


def write_logs(fleet: Fleet, folder: Path) -> None:
    """The end of every server's log, and its telling lines, in one file."""
    parts = []
    for log in sorted(fleet.folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        parts.append(f"===== {log.name}: {len(lines)} lines\n" + "\n".join(lines[-50:]))
    (folder / "logs.txt").write_text("\n\n".join(parts)[-8_000_000:])


def build(options: argparse.Namespace, sizes: plan.Sizes) -> tuple[Fleet, Path]:
    """Prepare packages and models; return the fleet and the folder of this policy's results."""
    state = options.state.resolve()
    folder = state / policy_sha256()[:12]
    unpatched = state / "site_unpatched"
    unpatched.mkdir(parents=True, exist_ok=True)
    for other in state.glob("*/servers.json"):
        if other.parent != folder:  # servers with another policy
            old = Fleet([], other.parent, {}, {}, 0)
            old.adopt()
            old.drop(*old.running)
    paths = prepare(options.site.resolve(), unpatched, options.on_cpu)
    if options.on_cpu:
        small = large = make_model(state / "model")
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    else:
        small = options.model
        large = plan.make_large_model(small, state / "model-8b")
        env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    taken = plan.agents_slice(sizes, options.trace.rows if options.trace else [])
    pool = plan.agents_pool_blocks(sizes, taken) if taken else 0
    specs = plan.specs(sizes, small, large, options.on_cpu, pool)
    budget = sizes.budget_gib
    fleet = Fleet(specs, folder, paths, env, budget, options.first_port)
    fleet.adopt()
    for one in fleet.running.values():
        progress(f"adopted {one.key} ({'ready' if one.ready_s else 'starting'})")
    return fleet, folder


async def run(options: argparse.Namespace, parts: list[str], deadline: float) -> int:
    """Run the parts that are not complete yet; returns the exit code."""
    sizes = plan.REHEARSAL if options.on_cpu else plan.GPU
    fleet, folder = build(options, sizes)
    meta = {
        "started": now(),
        "commit": options.commit,
        "policy_sha256": policy_sha256(),
        "rehearsal": options.rehearse,
        "trace": options.trace and options.trace.path.name,
        "sizes": asdict(sizes),
        **machine(),
    }
    store = Store(options.out, folder, meta, PARTS)
    rows = options.trace.rows if options.trace else []
    bench = Bench(fleet, store, sizes, deadline, rows, options.rehearse)
    in_time = True
    try:
        for name in parts:
            if store.part(name)["complete"]:
                progress(f"{name}: complete already")
                continue
            if name == "drill" and "long" in parts and not options.rehearse:
                fleet.start([*fleet.of("small"), *fleet.of("mid")])
            in_time &= await run_part(bench, name, options.stretch)
            if name == "smoke" and not fleet.running:
                break  # nothing starts on this machine
    finally:
        write_logs(fleet, options.out)
        if options.keep:
            fleet.save()
        else:
            fleet.drop(*fleet.running)
    summary = {
        name: {"cells": len(p["cells"]), "errors": len(p["errors"]), "complete": p["complete"]}
        for name, p in store.parts.items()
    }
    print(json.dumps({"out": str(options.out), "parts": summary}, indent=1))
    if any(part["errors"] for part in summary.values()):
        return 1
    return 0 if in_time else 2


async def run_part(bench: Bench, name: str, stretch: float) -> bool:
    """Run one part and record how it ended; returns whether its time was enough.

    A failure is in the part's JSON and is not raised: the other parts are worth having.
    """
    planned_s = dict(bench.sizes.planned_s)[name] * stretch
    bench.part, bench.part_deadline = name, time.monotonic() + planned_s
    progress(f"== {name}: {planned_s:.0f} s planned, {bench.left_s():.0f} s at most")
    complete, in_time = False, True
    try:
        await PARTS[name](bench)
        complete = not bench.store.failed(name)
    except Full as reason:
        in_time = False
        progress(f"{name} stops: {reason}")
    except Exception as error:
        bench.store.error(name, "part", f"{type(error).__name__}: {error}"[-6000:])
        progress(f"{name} FAILED: {error}")
    bench.store.end(name, complete, bench.fleet.history)
    return in_time


def site_of_vllm() -> Path | None:
    """Return the folder from which this Python would import vllm, None if it has none."""
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]).parent if places else None


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the parts; ends with usage and status 2 when one is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the JSON files and logs.txt")
    add("--state", type=Path, default=REPO / "out/gpu", help="kept between calls")
    add("--deadline-s", type=float, default=570, help="seconds after which this call is over")
    add("--stretch", type=float, default=1.0, help="multiplies the seconds planned for each part")
    add("--parts", default=DEFAULT_PARTS, help=f"comma-separated, of {', '.join(PARTS)}")
    add("--site", type=Path, help="folder that holds vllm/ (default: the one this Python imports)")
    add("--model", type=Path, help="folder with config.json and tokenizer of Qwen3-0.6B")
    add("--trace", type=trace_file, help="Mooncake-form trace, for the parts trace and agents")
    add("--commit", default="unknown", help="what is measured, for the JSON")
    add("--first-port", type=int, default=8200)
    add("--keep", action="store_true", help="leave the servers running for the next call")
    add("--rehearse", action="store_true", help="tiny sizes on the CPU server")
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    options.on_cpu = options.rehearse or parts == ["dp2"]
    options.site = options.site or site_of_vllm()
    if options.site is None or not (options.site / "vllm").is_dir():
        parser.error(f"--site {options.site}: name the folder that holds the vllm package")
    if not options.on_cpu:
        if options.model is None:
            parser.error("--model is missing: name a folder with Qwen3-0.6B's config and tokenizer")
        if not (options.model / "config.json").is_file():
            parser.error(f"--model {options.model}: there is no config.json")
    for name in ("trace", "agents"):
        if options.trace is None and name in parts:
            parser.error(f"--trace is missing: name a trace, or leave `{name}` out of --parts")
    options.out = options.out.resolve()
    return options, parts


def main(argv: list[str] | None = None) -> int:
    options, parts = parse(argv)
    deadline = time.monotonic() + options.deadline_s - STOPPING_S
    try:
        return asyncio.run(run(options, parts, deadline))
    except (RuntimeError, OSError) as error:
        print(f"gpu_evidence: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run_command(main, result="in --out"))
