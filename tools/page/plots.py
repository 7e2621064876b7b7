# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/results.md: the same JSON gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import ticker

from lab.pictures import pyplot, styled, svg_of
from page.stats import median, percentiles, samples, server_name, ttfts_ms

COLORS = {
    "unpatched": "#9ca3af",
    "lru": "#6b7280",
    "active16": "#86c5bd",
    "active32": "#3f9d92",
    "active64": "#0f766e",
    "roomy": "#b45309",
}


def _log_ms(axis) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def after_floods(cells: list[dict], limits_ms: dict[int, float], file: Path) -> None:
    """Hot TTFT after floods, one request at a time, against that of a hit with no flood."""
    hots = list(limits_ms)
    names = [n for n in COLORS if any(server_name(c) == n for c in cells)]
    with styled():
        figure, axis = pyplot.subplots(figsize=(6.4, 3.2))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            shift = (i - (len(names) - 1) / 2) * width
            of_name = {c["hot_tokens"]: c for c in cells if server_name(c) == name}
            xs = [hots.index(hot) + shift for hot in of_name]
            heights = [median(ttfts_ms(samples(c, "replays"))) for c in of_name.values()]
            axis.bar(xs, heights, width, color=COLORS[name], label=name)
        for i, y in enumerate(limits_ms.values()):
            axis.plot([i - 0.45, i + 0.45], [y, y], "k--", label="no flood" if i == 0 else None)
        axis.set_xticks(range(len(hots)), [f"{hot:,}" for hot in hots])
        _log_ms(axis)
        axis.set(xlabel="hot prefix, tokens", ylabel="TTFT after floods, p50, ms")
        axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25))
        file.write_text(svg_of(figure))


def under_load(cells: list[dict], limits_ms: dict[int, float], file: Path) -> None:
    """TTFT of hot and one-use requests over the load: p50 as a line, up to p95 shaded."""
    hots = sorted({cell["hot_tokens"] for cell in cells})
    with styled():
        figure, panels = pyplot.subplots(
            2, len(hots), figsize=(3.4 * len(hots), 5), sharex=True, sharey="row", squeeze=False
        )
        for hot, (upper, lower) in zip(hots, panels.T, strict=True):
            here = [cell for cell in cells if cell["hot_tokens"] == hot]
            _draw_loads(upper, here, "hot")
            if hot in limits_ms:
                upper.axhline(limits_ms[hot], ls="--", color="k", label="no flood")
            _draw_loads(lower, here, "flood")
            upper.set_title(f"{hot:,} hot tokens")
            lower.set_xlabel("arrivals, share of lru's capacity")
            _log_ms(upper)
            _log_ms(lower)
        panels[0][0].set_ylabel("hot TTFT, ms")
        panels[1][0].set_ylabel("one-use TTFT, ms")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
        file.write_text(svg_of(figure))


def _draw_loads(panel, cells: list[dict], kind: str) -> None:
    """A line and a shade for each server, over the loads at which it was measured."""
    for name, color in COLORS.items():
        points = _load_points([c for c in cells if server_name(c) == name], kind)
        if points:
            loads, middles, highs = np.array(points).T
            panel.plot(loads, middles, marker="o", ms=4, color=color, label=name)
            panel.fill_between(loads, middles, highs, color=color, alpha=0.15)


def _load_points(cells: list[dict], kind: str) -> list[tuple[float, float, float]]:
    """Load, p50 and p95 in ms of one kind of requests, in order of the load."""
    points = []
    for load in sorted({cell["load"] for cell in cells}):
        rows = [row for cell in cells if cell["load"] == load for row in samples(cell)]
        if values := ttfts_ms(rows, kind):
            middle, high, _ = percentiles(values)
            points.append((load, middle, high))
    return points
