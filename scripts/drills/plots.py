# SPDX-License-Identifier: Apache-2.0
"""The pictures of a canary report, each a string of SVG that needs nothing else."""

from __future__ import annotations

import io

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from drills.checks import JUDGED_KINDS
from drills.visit import Visit

COLORS = {"lru": "#6b7280", "candidate": "#0f766e"}
STYLE: dict[RcKeyType, object] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.figsize": (5.2, 3.1),
    "font.size": 11,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "computecache",
}


def _side(visit: Visit) -> str:
    return "candidate" if visit.role == "candidate" else "lru"


def _label(side: str, candidate_mode: str) -> str:
    return "lru" if side == "lru" else f"candidate ({candidate_mode})"


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def survival(visits: list[Visit], candidate_mode: str) -> str | None:
    """Hot tokens still cached over the one-use prompts since the last use; None without data."""
    points: dict[str, dict[int, list[int]]] = {"lru": {}, "candidate": {}}
    for visit in visits:
        for replay in visit.report["replays"] if visit.report else []:
            if replay["cached_tokens"] is not None:
                of_side = points[_side(visit)]
                of_side.setdefault(replay["flood_requests"], []).append(replay["cached_tokens"])
    if not any(points.values()):
        return None
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots()
        for side, found in points.items():
            floods = sorted(found)
            if floods:
                means = [np.mean(found[flood]) for flood in floods]
                style = "o-" if side == "candidate" else "s--"
                label = _label(side, candidate_mode)
                axes.plot(floods, means, style, color=COLORS[side], label=label)
        axes.set(xlabel="one-use prompts since last use", ylabel="hot tokens still cached")
        axes.set_ylim(bottom=-5)
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False)
        return _svg(figure)


def _ttft_ms(visits: list[Visit]) -> dict[tuple[str, str], list[float]]:
    """Return the times to first token by kind and side."""
    samples: dict[tuple[str, str], list[float]] = {}
    for visit in visits:
        for result in visit.report["results"] if visit.report else []:
            if result["kind"] in JUDGED_KINDS and result["ttft_ms"] is not None:
                key = (result["kind"], _side(visit))
                samples.setdefault(key, []).append(result["ttft_ms"])
    return samples


def ttft(visits: list[Visit], candidate_mode: str) -> str | None:
    """Share of requests answered within a time to first token, one panel a kind."""
    samples = _ttft_ms(visits)
    kinds = [kind for kind in JUDGED_KINDS if any(key[0] == kind for key in samples)]
    if not kinds:
        return None
    with plt.rc_context(STYLE):
        size = (5.2, 2.2 * len(kinds))
        figure, panels = plt.subplots(len(kinds), 1, squeeze=False, sharex=True, figsize=size)
        for kind, axes in zip(kinds, panels[:, 0], strict=True):
            for side in COLORS:
                if values := samples.get((kind, side)):
                    line = "-" if side == "candidate" else "--"
                    axes.ecdf(
                        values, color=COLORS[side], ls=line, label=_label(side, candidate_mode)
                    )
            axes.set_title(JUDGED_KINDS[kind], fontsize=11, loc="left")
            axes.set_ylabel("share")
        panels[0, 0].legend(frameon=False)
        panels[-1, 0].set_xlabel("time to first token, ms")
        figure.tight_layout()
        return _svg(figure)


def hit_ratio(visits: list[Visit]) -> str | None:
    """Share of prompt tokens found in the cache, one bar a visit."""
    bars = [
        (f"{number}. {visit.role}", counters["hit_ratio"], _side(visit))
        for number, visit in enumerate(visits, 1)
        if visit.report
        and (counters := visit.report.get("counters"))
        and counters["hit_ratio"] is not None  # nothing was looked up
    ]
    if not bars:
        return None
    names, values, sides = zip(*bars, strict=True)
    with plt.rc_context({**STYLE, "figure.figsize": (5.2, 0.7 + 0.45 * len(bars))}):
        figure, axes = plt.subplots()
        drawn = axes.barh(names, values, color=[COLORS[side] for side in sides])
        axes.bar_label(drawn, fmt="{:.1%}", padding=4)
        axes.invert_yaxis()
        axes.set_xlim(0, max(0.01, 1.25 * max(values)))
        axes.set_xlabel("share of prompt tokens served from the cache")
        return _svg(figure)
