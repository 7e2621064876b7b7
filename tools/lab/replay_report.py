# SPDX-License-Identifier: Apache-2.0
"""Replayed cells side by side: points over LRU, the gap closed, a table, a chart."""

from rich.table import Table


def compare(rows: list[dict]) -> None:
    """Add ``points_over_lru`` and ``gap_closed`` (share of LRU to optimum), or None."""
    ratio = {(r["trace"], r["capacity"], r["mode"]): r["hit_ratio"] for r in rows}
    for row in rows:
        lru = ratio.get((row["trace"], row["capacity"], "lru"))
        best = ratio.get((row["trace"], row["capacity"], "optimum"))
        row["points_over_lru"] = None if lru is None else 100 * (row["hit_ratio"] - lru)
        row["gap_closed"] = None
        if lru is not None and best is not None and best > lru:
            row["gap_closed"] = (row["hit_ratio"] - lru) / (best - lru)


def mode_name(row: dict) -> str:
    """The mode with its scan limit, as tables and charts show it."""
    return row["mode"] if row["scan_limit"] is None else f"{row['mode']} {row['scan_limit']}"


def table_of(rows: list[dict]) -> Table:
    """The rows as a table for people."""
    table = Table()
    for name in ("trace", "capacity", "blocks", "mode", "hit %", "points over LRU", "gap closed %"):
        table.add_column(name, justify="left" if name in ("trace", "mode") else "right")
    for name in (
        "reference hit %",
        "inspected / decision",
        "us / decision",
        "fallbacks",
        "skipped",
    ):
        table.add_column(name, justify="right")

    def shown(value: float | None, digits: int, factor: int = 1) -> str:
        return "-" if value is None else f"{factor * value:.{digits}f}"

    for row in rows:
        table.add_row(
            row["trace"],
            f"{row['capacity']:g}",
            str(row["capacity_blocks"]),
            mode_name(row),
            shown(row["hit_ratio"], 2, 100),
            shown(row["points_over_lru"], 2),
            shown(row["gap_closed"], 1, 100),
            shown(row["reference_hit_ratio"], 2, 100),
            shown(row["inspected_per_decision"], 1),
            shown(row["us_per_decision"], 1),
            shown(row["counters"].get("fallbacks"), 0),
            str(row["skipped_requests"]),
        )
    return table


def chart_of(rows: list[dict]) -> str:
    """SVG text: hit ratio over capacity, a panel for each trace, a line for each mode."""
    from lab.pictures import pyplot, styled, svg_of  # matplotlib, for those who draw

    names = list(dict.fromkeys(row["trace"] for row in rows))
    with styled():
        figure, panels = pyplot.subplots(
            1, len(names), figsize=(4.5 * len(names), 4.2), squeeze=False, layout="constrained"
        )
        for name, panel in zip(names, panels[0], strict=True):
            _draw(panel, name, [row for row in rows if row["trace"] == name])
        handles, labels = panels[0][0].get_legend_handles_labels()
        columns = min(6, 3 * len(names))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
        return svg_of(figure)


def _draw(panel, trace: str, rows: list[dict]) -> None:
    """One trace's panel: a line for each mode."""
    for mode in dict.fromkeys(map(mode_name, rows)):
        points = sorted(
            (row["capacity_blocks"], row["hit_ratio"]) for row in rows if mode_name(row) == mode
        )
        line = {"lru": "k--", "optimum": "k:"}.get(mode, "-")
        panel.plot(*zip(*points, strict=True), line, marker=".", label=mode)
    panel.set(title=trace, xscale="log", xlabel="capacity, blocks", ylabel="hit ratio")
    sizes = sorted({row["capacity_blocks"] for row in rows})
    panel.set_xticks(sizes, labels=map(str, sizes), rotation=45)
    panel.minorticks_off()
