#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ideas that were tried on the policy, each one changed rule of it, measured against LRU.

Every experiment replays the same traces through the real BlockPool, in a process of its own
in which a constant or a method of the policy was replaced. Writes
docs/results/experiments.json and the table in docs/experiments.md.

    .venv/bin/python tools/experiments.py --variant NAME TRACE... [replay_trace.py's options]

replays one of them. Exit status 0; 2: a changed rule is not there any more or a replay failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import replay_trace
from lab.files import replace_file, replace_section
from lab.modules import load_module
from lab.pool import try_policy

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "vllm/v1/core/computecache_policy.py"
RECORDED = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")
CAPACITIES = "0.01,0.02,0.05,0.1,0.2"
HASH_SEEDS = (0, 1)  # samples of the same traces: one alone is mostly chance on the second


@dataclass(frozen=True)
class Experiment:
    name: str
    what: str
    predicted: str
    kept: bool
    change: Callable[[ModuleType], None]  # applied to the policy's module before a pool is made


def as_it_is(policy: ModuleType) -> None:
    """No change."""


def constant(name: str, value: float) -> Callable[[ModuleType], None]:
    """Give a constant of the policy another value."""

    def change(policy: ModuleType) -> None:
        if not hasattr(policy, name):
            raise ValueError(f"the policy has no {name}")
        setattr(policy, name, value)

    return change


def rule(class_name: str, method: str, make: Callable) -> Callable[[ModuleType], None]:
    """Replace one method of one class; `make(policy, old)` returns the new one."""

    def change(policy: ModuleType) -> None:
        old_class: Any = getattr(policy, class_name, None)
        old = getattr(old_class, method, None)
        if old is None:
            raise ValueError(f"the policy has no {class_name}.{method}")
        setattr(policy, class_name, type(class_name, (old_class,), {method: make(policy, old)}))

    return change


def at_once(policy, old):
    return lambda guard: policy.LRU


def always_demotion_first(policy, old):
    return lambda guard: policy.LRU if guard.state is policy.NO_DEMOTION else policy.NO_DEMOTION


def impatient(policy, old):
    def chance(guard):
        share = policy.GUARD_SHARE * guard._compared
        return share + (old(guard) - share) * policy.GUARD_POOLS / guard._lru_pools

    return chance


def oldest_first(policy, old):
    def ranked(order, fronts):
        ranks = old(order, fronts)
        oldest = min(stamp for _, stamp, _ in ranks)
        return sorted((k / 2 if stamp == oldest else k, stamp, place) for k, stamp, place in ranks)

    return ranked


def one_kind(policy, old):
    def tick(of, num_blocks):
        of._hit_since_decision = False
        old(of, num_blocks)

    return tick


EXPERIMENTS = (
    Experiment(
        "as_it_is",
        "the policy as it is",
        "-",
        True,
        as_it_is,
    ),
    Experiment(
        "never_demote",
        "never demote: lists only",
        "small caches lose what they gain by admitting less",
        False,
        rule("Ordering", "_eviction_cost", lambda policy, old: lambda order: 0.0),
    ),
    Experiment(
        "no_let_through",
        "no request is let through when its kind is demoted",
        "better on floods, worse where the estimate is wrong",
        False,
        constant("LET_THROUGH_SHARE", 0.0),
    ),
    Experiment(
        "no_guard",
        "no guard",
        "no difference where the model is right, a loss on mooncake_synthetic",
        False,
        rule("Guard", "settle", lambda policy, old: lambda guard, now: False),
    ),
    Experiment(
        "lru_at_once",
        "the guard goes to plain LRU at once, not to lists without demotion first",
        "fewer losses, and fewer wins where it trips by chance",
        False,
        rule("Guard", "_step_back", at_once),
    ),
    Experiment(
        "demotion_first",
        "the guard ends demotion first, even where nothing was demoted",
        "the loss goes on until the second trip",
        False,
        rule("Guard", "_step_back", always_demotion_first),
    ),
    Experiment(
        "impatient_guard",
        "the guard allows half the deviation each time that LRU had to take over",
        "smaller losses where the same mistake comes again; never patient again",
        False,
        rule("Guard", "_chance", impatient),
    ),
    Experiment(
        "no_prior",
        "the guard has no prior: the first hits lost are taken for what they show",
        "trips by chance at the start",
        False,
        constant("GUARD_PRIOR", 0.0),
    ),
    Experiment(
        "independent_blocks",
        "the guard takes the blocks of one request for independent",
        "the same or more trips",
        False,
        rule("Guard", "_surprise", lambda policy, old: lambda guard, lead: abs(lead)),
    ),
    Experiment(
        "shared_slots",
        "the guard does not know that hashes share slots",
        "LRU looks better than it is: trips where nothing is wrong",
        False,
        rule("ReuseModel", "_slots_of", lambda policy, old: lambda model, distinct: distinct),
    ),
    Experiment(
        "half_deviation",
        "a guard that trips at half the deviation",
        "worst cell nearer to LRU at a small price",
        False,
        constant("GUARD_SIGMAS", 0.5),
    ),
    Experiment(
        "two_percent",
        "a guard that allows 2 % of the hits",
        "later trips, larger losses before them",
        False,
        constant("GUARD_SHARE", 0.02),
    ),
    Experiment(
        "oldest_loses_ties",
        "the oldest list loses ties up to a factor of two in worth",
        "smaller losses, smaller wins",
        False,
        rule("Ordering", "_ranked", oldest_first),
    ),
    Experiment(
        "from_first_reuse",
        "measure from the first reuse on, no fixed order at first",
        "little: the first hits come fast",
        False,
        constant("MIN_REUSE_EVENTS", 1),
    ),
    Experiment(
        "pull_harder",
        "pull each kind four times as hard to the mean of all",
        "closer to LRU everywhere",
        False,
        constant("SHRINKAGE", 1024.0),
    ),
    Experiment(
        "no_pull",
        "no pull to the mean",
        "faster to learn, noise on short traces",
        False,
        constant("SHRINKAGE", 1.0),
    ),
    Experiment(
        "quarter_sample",
        "follow a quarter of the hashes in large pools",
        "noisier estimates, earlier trips",
        False,
        constant("SAMPLED_POOL", 256),
    ),
    Experiment(
        "little_belief",
        "believe a tenth as much that reused blocks come back",
        "old favourites fade sooner, hot sets are lost sooner",
        False,
        constant("PRIOR_HAZARD", 0.025),
    ),
    Experiment(
        "one_kind",
        "one kind for all never reused blocks",
        "loses what the prefix of a request tells about its tail",
        False,
        rule("ComputeCachePolicy", "_tick", one_kind),
    ),
    Experiment(
        "static_order",
        "always the static order: never reused, then reused",
        "good on floods, far below LRU where one-use blocks come back",
        False,
        constant("MIN_REUSE_EVENTS", 10**9),
    ),
)


def load(name: str, experiment: Experiment) -> ModuleType:
    """This repository's policy as module `name`, changed; ValueError if that does not fit."""
    policy = load_module(name, POLICY)
    experiment.change(policy)
    return policy


def replay_variant(experiment: Experiment, options: list[str]) -> int:
    """tools/replay_trace.py in this process, with the changed policy."""
    try_policy(POLICY)
    experiment.change(sys.modules["vllm.v1.core.computecache_policy"])
    return replay_trace.main(options)


def replay(experiment: Experiment, options: list[str], folder: Path) -> list[dict]:
    """The cells of a replay in a process of its own; RuntimeError if it fails.

    A process imports one policy, once.
    """
    cells = folder / "cells.json"
    command = [sys.executable, __file__, "--variant", experiment.name, *options]
    command += ["--json", str(cells)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return json.loads(cells.read_text())


def run(experiment: Experiment, traces: list[Path], scan_limit: int, folder: Path) -> dict:
    options = [*map(str, traces), "--capacity", CAPACITIES, "--mode", "lru,active"]
    options += ["--scan-limit", str(scan_limit)]
    points: dict[str, list[float]] = {}
    for seed in HASH_SEEDS:
        for cell in replay(experiment, [*options, "--hash-seed", str(seed)], folder):
            if cell["mode"] == "active":
                points.setdefault(cell["trace"], []).append(cell["points_over_lru"])
    return {
        "name": experiment.name,
        "what": experiment.what,
        "predicted": experiment.predicted,
        "kept": experiment.kept,
        "scan_limit": scan_limit,
        "points_over_lru": points,
    }


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
    names = {experiment.name: experiment for experiment in EXPERIMENTS}
    parser.add_argument(
        "--variant", choices=names, help="only replay this one; takes replay_trace.py's options"
    )
    arguments, options = parser.parse_known_args(argv)
    if arguments.variant:
        options += ["--scan-limit", str(arguments.scan_limit)]
        return replay_variant(names[arguments.variant], options)
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    rows = []
    try:
        for experiment in EXPERIMENTS:
            load("changed_policy", experiment)  # each fits, before the first minute is spent
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
