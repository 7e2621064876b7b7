# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/results.md: the same JSON gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from page.stats import KIND, TTFT_MS, percentiles, server_name

COLORS = {
    "unpatched": "#9ca3af",
    "lru": "#6b7280",
    "active16": "#86c5bd",
    "active32": "#3f9d92",
    "active64": "#0f766e",
    "roomy": "#b45309",
}
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "computecache",
}


def _log_ms(axis) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def _save(figure, file: Path) -> None:
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    # Lines that end in a space would come back in every diff.
    lines = [line.rstrip() for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines) + "\n")


def after_floods(cells: list[dict], file: Path) -> None:
    """Hot TTFT after floods, one request at a time, against that of a hit with no flood."""
    hots = sorted({cell["hot_tokens"] for cell in cells})
    names = [n for n in COLORS if any(server_name(c) == n for c in cells)]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.4, 3.2))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            of_name = {c["hot_tokens"]: c for c in cells if server_name(c) == name}
            xs = [hots.index(hot) + (i - (len(names) - 1) / 2) * width for hot in of_name]
            middles = [percentiles(r[TTFT_MS] for r in c["replays"])[0] for c in of_name.values()]
            axis.bar(xs, middles, width, color=COLORS[name], label=name)
        for i, hot in enumerate(hots):
            limit = [r[TTFT_MS] for c in cells if c["hot_tokens"] == hot for r in c["limit"]]
            y = percentiles(limit)[0]
            axis.plot([i - 0.45, i + 0.45], [y, y], "k--", label="no flood" if i == 0 else None)
        axis.set_xticks(range(len(hots)), [f"{hot:,}" for hot in hots])
        _log_ms(axis)
        axis.set(xlabel="hot prefix, tokens", ylabel="TTFT after floods, p50, ms")
        axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25))
        _save(figure, file)


def under_load(cells: list[dict], limits: dict[int, float], file: Path) -> None:
    """TTFT of hot and one-use requests over the load: p50 as a line, up to p95 shaded."""
    hots = sorted({cell["hot_tokens"] for cell in cells})
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            2, len(hots), figsize=(3.4 * len(hots), 5), sharex=True, sharey="row", squeeze=False
        )
        for column, hot in enumerate(hots):
            for row, kind in enumerate(("hot", "flood")):
                panel = panels[row][column]
                for name, color in COLORS.items():
                    here = [c for c in cells if c["hot_tokens"] == hot and server_name(c) == name]
                    points = []
                    for load in sorted({c["load"] for c in here}):
                        values = [
                            s[TTFT_MS]
                            for c in here
                            if c["load"] == load
                            for s in c["samples"]
                            if s[KIND] == kind
                        ]
                        if values:
                            points.append((load, *percentiles(values)[:2]))
                    if points:
                        loads, middles, highs = np.array(points).T
                        panel.plot(loads, middles, marker="o", ms=4, color=color, label=name)
                        panel.fill_between(loads, middles, highs, color=color, alpha=0.15)
                if kind == "hot" and hot in limits:
                    panel.axhline(limits[hot], ls="--", color="k", label="no flood")
                _log_ms(panel)
            panels[0][column].set_title(f"{hot:,} hot tokens")
            panels[1][column].set_xlabel("arrivals, share of lru's capacity")
        panels[0][0].set_ylabel("hot TTFT, ms")
        panels[1][0].set_ylabel("one-use TTFT, ms")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
        _save(figure, file)
