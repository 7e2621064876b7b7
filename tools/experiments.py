#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ideas that were tried on the policy, each a small edit of it, measured against LRU.

Every experiment replays the same traces through the real BlockPool with a copy of the
policy in which its edit was made. Writes docs/results/experiments.json and the table in
docs/experiments.md. Exit status 0; 2: an edit no longer fits or a replay failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab.files import replace_file, replace_section

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "vllm/v1/core/computecache_policy.py"
RECORDED = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")
CAPACITIES = "0.01,0.02,0.05,0.1,0.2"
HASH_SEEDS = (0, 1)  # samples of the same traces: one alone is mostly chance on the second


@dataclass(frozen=True)
class Experiment:
    what: str
    predicted: str
    kept: bool
    edits: dict[str, str] = field(default_factory=dict)  # text in the policy: its replacement


EXPERIMENTS = (
    Experiment("the policy as it is", "-", True),
    Experiment(
        "never demote: lists only",
        "small caches lose what they gain by admitting less",
        False,
        {"if worth < self._eviction_cost():": "if False:"},
    ),
    Experiment(
        "no request is let through when its kind is demoted",
        "better on floods, worse where the estimate is wrong",
        False,
        {"kind != REUSED and not let_through and": "kind != REUSED and"},
    ),
    Experiment(
        "no guard",
        "no difference where the model is right, a loss on mooncake_synthetic",
        False,
        {"if self._compared <= GUARD_LEAST or": "if True or"},
    ),
    Experiment(
        "the guard goes to plain LRU at once, not to lists without demotion first",
        "fewer losses, and fewer wins where it trips by chance",
        False,
        {"if not self.demoted:  # demotion was not the reason": "if True:"},
    ),
    Experiment(
        "the guard ends demotion first, even where nothing was demoted",
        "the loss goes on until the second trip",
        False,
        {"if not self.demoted:  # demotion was not the reason": "if not self.demotes:"},
    ),
    Experiment(
        "the guard allows half the deviation each time that LRU had to take over",
        "smaller losses where the same mistake comes again; never patient again",
        False,
        {
            "noise = GUARD_SIGMAS * deviation": "noise = GUARD_SIGMAS * GUARD_POOLS "
            "/ self._guard_pools * deviation"
        },
    ),
    Experiment(
        "the guard has no prior: the first hits lost are taken for what they show",
        "trips by chance at the start",
        False,
        {"GUARD_LEAST = 1.0, 36.0, 0.002, 64": "GUARD_LEAST = 1.0, 0.0, 0.002, 64"},
    ),
    Experiment(
        "the guard takes the blocks of one request for independent",
        "the same or more trips",
        False,
        {"self._variance * decay + lead * lead": "self._variance * decay + abs(lead)"},
    ),
    Experiment(
        "the guard does not know that hashes share slots",
        "LRU looks better than it is: trips where nothing is wrong",
        False,
        {"enough = -slots * expm1(-distinct / slots)": "enough = distinct"},
    ),
    Experiment(
        "a guard that trips at half the deviation",
        "worst cell nearer to LRU at a small price",
        False,
        {"GUARD_LEAST = 1.0, 36.0, 0.002, 64": "GUARD_LEAST = 0.5, 36.0, 0.002, 64"},
    ),
    Experiment(
        "a guard that allows 2 % of the hits",
        "later trips, larger losses before them",
        False,
        {"GUARD_LEAST = 1.0, 36.0, 0.002, 64": "GUARD_LEAST = 1.0, 36.0, 0.02, 64"},
    ),
    Experiment(
        "the oldest list loses ties up to a factor of two in worth",
        "smaller losses, smaller wins",
        False,
        {
            "        ranked.sort()\n": "        oldest = min(stamp for _, stamp, _ in ranked)\n"
            "        ranked = [(k / 2 if s == oldest else k, s, p) for k, s, p in ranked]\n"
            "        ranked.sort()\n"
        },
    ),
    Experiment(
        "measure from the first reuse on, no fixed order at first",
        "little: the first hits come fast",
        False,
        {"MIN_REUSE_EVENTS = 48": "MIN_REUSE_EVENTS = 1"},
    ),
    Experiment(
        "pull each kind four times as hard to the mean of all",
        "closer to LRU everywhere",
        False,
        {"SHRINKAGE = 256.0": "SHRINKAGE = 1024.0"},
    ),
    Experiment(
        "no pull to the mean",
        "faster to learn, noise on short traces",
        False,
        {"SHRINKAGE = 256.0": "SHRINKAGE = 1.0"},
    ),
    Experiment(
        "follow a quarter of the hashes in large pools",
        "noisier estimates, earlier trips",
        False,
        {"SAMPLED_POOL = 1024": "SAMPLED_POOL = 256"},
    ),
    Experiment(
        "believe a tenth as much that reused blocks come back",
        "old favourites fade sooner, hot sets are lost sooner",
        False,
        {"PRIOR_HAZARD = 0.25": "PRIOR_HAZARD = 0.025"},
    ),
    Experiment(
        "one kind for all never reused blocks",
        "loses what the prefix of a request tells about its tail",
        False,
        {"fresh |= CONTINUING << KIND_SHIFT": "pass"},
    ),
    Experiment(
        "always the static order: never reused, then reused",
        "good on floods, far below LRU where one-use blocks come back",
        False,
        {"MIN_REUSE_EVENTS = 48": "MIN_REUSE_EVENTS = 10**9"},
    ),
)


def variant(experiment: Experiment) -> str:
    """The policy's source with the experiment's edits; each text must be there once."""
    source = POLICY.read_text()
    for old, new in experiment.edits.items():
        if source.count(old) != 1:
            raise ValueError(f"{experiment.what}: {old!r} is {source.count(old)} times in {POLICY}")
        source = source.replace(old, new)
    return source


def replay(options: list[str], folder: Path) -> list[dict]:
    """The cells of tools/replay_trace.py in a process of its own; RuntimeError if it fails.

    A process imports one policy, once.
    """
    cells = folder / "cells.json"
    command = [sys.executable, str(ROOT / "tools/replay_trace.py"), *options, "--json", str(cells)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return json.loads(cells.read_text())


def run(experiment: Experiment, traces: list[Path], scan_limit: int, folder: Path) -> dict:
    policy = folder / "policy.py"
    policy.write_text(variant(experiment))
    options = [*map(str, traces), "--capacity", CAPACITIES, "--mode", "lru,active"]
    options += ["--scan-limit", str(scan_limit), "--policy", str(policy)]
    points: dict[str, list[float]] = {}
    for seed in HASH_SEEDS:
        for cell in replay([*options, "--hash-seed", str(seed)], folder):
            if cell["mode"] == "active":
                points.setdefault(cell["trace"], []).append(cell["points_over_lru"])
    return {**asdict(experiment), "scan_limit": scan_limit, "points_over_lru": points}


def table(rows: list[dict]) -> str:
    names = list(rows[0]["points_over_lru"])
    lines = [
        "Generated by `tools/experiments.py` from `docs/results/experiments.json`: points of hit",
        f"ratio over LRU, mean (and worst) of caches of {CAPACITIES.replace(',', ', ')} of each",
        f"trace's unique blocks and {len(HASH_SEEDS)} samples of the hashes, scan limit "
        f"{rows[0]['scan_limit']}.",
        "",
        "| what | predicted | " + " | ".join(names) + " | mean | worst | kept |",
        "| --- | --- |" + " ---: |" * (len(names) + 2) + " --- |",
    ]
    for row in rows:
        points = row["points_over_lru"]
        cells = [f"{statistics.fmean(points[n]):+.2f} ({min(points[n]):+.2f})" for n in names]
        every = [value for values in points.values() for value in values]
        cells += [f"{statistics.fmean(every):+.2f}", f"{min(every):+.2f}"]
        kept = "yes" if row["kept"] else "no"
        lines.append(f"| {row['what']} | {row['predicted']} | {' | '.join(cells)} | {kept} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces-dir", type=Path, default=ROOT.parent / "shared/traces")
    parser.add_argument("--scan-limit", type=int, default=64)
    arguments = parser.parse_args(argv)
    rows = []
    try:
        for experiment in EXPERIMENTS:
            variant(experiment)  # every edit fits, before the first minute is spent
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            traces = [arguments.traces_dir / name for name in RECORDED]
            for experiment in EXPERIMENTS:
                print(experiment.what, file=sys.stderr)
                rows.append(run(experiment, traces, arguments.scan_limit, folder))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    page = ROOT / "docs/experiments.md"
    replace_file(
        ROOT / "docs/results/experiments.json", json.dumps(rows, indent=1).encode() + b"\n"
    )
    replace_file(
        page, replace_section(page.read_text(), table(rows) + "\n", "experiments").encode()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
