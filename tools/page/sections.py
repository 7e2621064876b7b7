# SPDX-License-Identifier: Apache-2.0
"""The chapters of docs/results.md, but for the one on time to first token."""

from __future__ import annotations

from page.stats import (
    kept,
    mean_ttft_ms,
    median,
    paired_ratio,
    percentile_ratios,
    percentiles,
    rounds,
    samples,
    server_name,
    ttfts_ms,
)
from page.text import SERVERS, named, ratio_text, table, yes


def by_pressure(cells: list[dict], servers: tuple[str, ...]) -> str:
    rows = []
    for hot, flood in sorted({(c["hot_tokens"], c["flood_tokens"]) for c in cells}):
        here = [c for c in cells if (c["hot_tokens"], c["flood_tokens"]) == (hot, flood)]
        row = [f"{hot:,}", f"{flood:,}", max(c["warm_prefix_cached_tokens"] or 0 for c in here)]
        for name in servers:
            of_name = [c for c in here if server_name(c) == name]
            row.append(" ".join(map(str, kept(of_name))) if of_name else "-")
        rows.append(row)
    return table(["hot", "one-use prompt", "cacheable", *map(named, servers)], rows)


def preserved(cells: list[dict], name: str) -> tuple[int, int]:
    """Return in how many of a server's cells all of the hot prefix was kept, and of how many."""
    of_name = [c for c in cells if server_name(c) == name]
    whole = [c for c in of_name if min(kept([c])) == c["warm_prefix_cached_tokens"]]
    return len(whole), len(of_name)


def drill(part: dict) -> str:
    cells = list(part["cells"].values())
    servers = tuple(n for n in SERVERS if any(server_name(c) == n for c in cells))
    sizes = part["calls"][-1]["sizes"]
    counts = {n: "{} of {}".format(*preserved(cells, n)) for n in servers}
    times = sizes["drill_floods"] // sizes["drill_step"]
    return (
        f"Qwen3-0.6B shape, {sizes['small_blocks']} blocks of {sizes['block_size']} tokens. "
        + _replays(times, sizes["drill_step"], [sizes["drill_floods"]], sizes["drill_seeds"])
        + f" `cacheable` is how many of them can be cached.\n\n{by_pressure(cells, servers)}\n\n"
        "All of them were still cached at every replay (a case is a hot size, a one-use size and "
        "a seed): " + ", ".join(f"{named(n)} in {count} cases" for n, count in counts.items()) + "."
    )


def _replays(times: int, step: int, alone: list[int], seeds: int) -> str:
    """What a cell of by_pressure lists: `times` replays every `step` prompts, then others."""
    often = "once after" if times == 1 else f"{times} times, each after"
    last = " and ".join(f"once after {floods}" for floods in alone)
    of_seeds = (
        "There was one seed." if seeds == 1 else f"Each number is the least of {seeds} seeds."
    )
    return (
        "Under each server: the hot tokens still cached when the hot prompt is replayed, "
        f"{often} {step} one-use prompts, then {last}. {of_seeds}"
    )


def long(part: dict) -> str:
    cells = list(part["cells"].values())
    servers = tuple(n for n in SERVERS if any(server_name(c) == n for c in cells))
    sizes = part["calls"][-1]["sizes"]
    times = sizes["long_floods"] // sizes["long_step"]
    text = (
        f"Qwen3-0.6B shape, {sizes['mid_blocks']:,} blocks of {sizes['block_size']} tokens. "
        + _replays(times, sizes["long_step"], sizes["long_survival"], sizes["long_seeds"])
        + f"\n\n{by_pressure(cells, servers)}"
    )
    active = [c for c in cells if server_name(c) == "active64"]
    if active:
        least = min(kept(active))
        block = sizes["block_size"]
        # The last block of a prompt is always computed, so that there is a token to sample from.
        goal = (sizes["long_hot_tokens"] - 1) // block * block
        text += (
            f"\n\nGoal: active 64 keeps all {goal:,} tokens that can hit. It kept {least:,}: "
            f"{yes(least >= goal)}."
        )
    return text


def cost(part: dict) -> str:
    cells = [c for key, c in part["cells"].items() if key.startswith("decode")]
    chapters = [_decoding(cells)] if cells else []
    if bench := part["cells"].get("get_new_blocks"):
        chapters.append(_calls(bench["rows"]))
    return "\n\n".join(chapters)


def _decoding(cells: list[dict]) -> str:
    def step_ms(cell: dict) -> float:
        return cell["step_ms"]

    def speed(cell: dict) -> float:
        return cell["output_tokens"] / cell["wall_s"]

    def decisions(cell: dict) -> float:
        return cell["decisions"]

    first = cells[0]
    lru_ms = _without_first(rounds(cells, "lru", step_ms))
    lru_speed = _without_first(rounds(cells, "lru", speed))
    rows = []
    for name in (n for n in SERVERS if any(server_name(c) == n for c in cells)):
        steps = _without_first(rounds(cells, name, step_ms))
        speeds = _without_first(rounds(cells, name, speed))
        low, middle, high = percentiles(steps.values(), (25, 50, 75))
        decided = median(rounds(cells, name, decisions).values()) / (first["max_tokens"] - 1)
        rows.append(
            [
                named(name),
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                "-" if name == "lru" else ratio_text(paired_ratio(steps, lru_ms)),
                f"{median(speeds.values()):,.0f}",
                "-" if name == "lru" else ratio_text(paired_ratio(speeds, lru_speed)),
                f"{decided:.1f}",
            ]
        )
    head = ["server", "ms a step, median (quartiles)", "over lru", "tokens/s", "over lru"]
    return (
        f"Qwen3-0.6B shape. {first['requests']} requests decode {first['max_tokens']} tokens each "
        "at the same time, and every block that they take evicts a cached one. The time of a step "
        "is from EngineCore's own clock (`vllm:request_decode_time_seconds`). The first round is "
        "dropped. Ratios compare equal rounds, with a 95 % bootstrap interval.\n\n"
        + table([*head, "decisions a step"], rows)
    )


def _calls(results: list[dict]) -> str:
    rows = [
        [
            f"{r['pool_blocks']:,}",
            r["victims"],
            r["variant"],
            f"{r['us_per_call']['median']:.2f}",
            f"{r['us_per_call']['q1']:.2f} to {r['us_per_call']['q3']:.2f}",
            f"{r['ratio_to_unpatched']['median']:.2f}",
        ]
        for r in results
    ]
    head = ["pool", "victims", "variant", "us a call", "quartiles", "x unpatched"]
    return "`get_new_blocks` alone, on that machine's CPU (`tools/bench_overhead.py`):\n\n" + table(
        head, rows
    )


def _without_first(values: dict[int, float]) -> dict[int, float]:
    return {key: value for key, value in values.items() if key > 0}


def controls(part: dict) -> str:
    text = {
        "zero-reuse": "one-use prompts, one at a time",
        "zero-reuse-busy": "one-use prompts, 16 at a time",
        "unpressured": "hot prefixes that all fit the pool",
    }
    measures = {
        "mean TTFT, ms": mean_ttft_ms,
        "requests/s": lambda c: len(c["samples"]) / c["elapsed_s"],
    }
    rows = []
    for kind, described in text.items():
        cells = [c for key, c in part["cells"].items() if key.split(" ")[0] == kind]
        for measured, value in measures.items():
            of = {n: _without_first(rounds(cells, n, value)) for n in SERVERS}
            if not of["lru"]:
                continue
            rows.append(
                [
                    described,
                    measured,
                    f"{median(of['lru'].values()):.2f}",
                    ratio_text(paired_ratio(of["active64"], of["lru"])),
                    ratio_text(paired_ratio(of["unpatched"], of["lru"])),
                ]
            )
    head = ["control", "measure", "lru, median", "active 64 over lru", "unpatched over lru"]
    return (
        "Qwen3-0.6B shape. In each round the servers get the same prompts, one server after the "
        "other; the first round is dropped. Ratios are geometric means over the rounds, with 95 % "
        "bootstrap intervals. unpatched and lru do the same work, so the last column shows how far "
        f"two equal servers differ by chance.\n\n{table(head, rows)}"
    )


def trace(part: dict) -> str:
    cells = [c for key, c in part["cells"].items() if key.startswith("run=")]
    if not cells:
        return "Not measured."
    first, sizes = cells[0], part["calls"][-1]["sizes"]
    tokens = first["block_tokens"]
    times = {}
    for cell in reversed(cells):  # the first run of each
        times[server_name(cell)] = dict(enumerate(ttfts_ms(samples(cell))))
    ratio = paired_ratio(times.get("active64", {}), times.get("lru", {}))
    return (
        f"The first {first['requests']:,} requests of {_trace_name(part, first)} that fit the "
        f"server, sent {first['speed']:.1f} times faster than recorded. Qwen3-0.6B shape, "
        f"{sizes['mid_blocks']:,} blocks of {sizes['block_size']} tokens. Each block of the trace "
        f"is sent as {tokens} tokens, whatever its size was, so the pool holds "
        f"{sizes['mid_blocks'] * sizes['block_size'] // tokens:,} of them. Runs are listed in the "
        f"order in which they were made.\n\n{_runs(cells)}"
        "\n\nTTFT of active 64 divided by that of lru, for equal requests in the first run of "
        f"each: {ratio_text(ratio)}."
    )


def _trace_name(part: dict, cell: dict) -> str:
    # JSON from before calls named their trace is of this one.
    return part["calls"][cell["call"]].get("trace") or "mooncake_conversation"


def _runs(cells: list[dict]) -> str:
    rows = []
    for cell in cells:
        values = percentiles(ttfts_ms(samples(cell)))
        rows.append(
            [
                named(server_name(cell)),
                f"{cell['requests']:,}",
                f"{100 * cell['cached_tokens'] / cell['prompt_tokens']:.2f}",
                " / ".join(f"{v:.1f}" for v in values),
                f"{cell['requests'] / cell['elapsed_s']:.1f}",
            ]
        )
    return table(["server", "requests", "hit %", "TTFT p50 / p95 / p99 ms", "requests/s"], rows)


def agents(part: dict) -> str:
    cells = [c for key, c in part["cells"].items() if key.startswith("run=")]
    if not cells:
        return "Not measured."
    first, sizes = cells[0], part["calls"][-1]["sizes"]
    times: dict[str, list[list[float]]] = {}
    for cell in cells:
        times.setdefault(server_name(cell), []).append(ttfts_ms(samples(cell)))
    ratios = ""
    if len(times.get("active64", [])) == len(times.get("lru", [])):
        found = percentile_ratios(times["active64"], times["lru"])
        shown = (f"{v:.2f} ({low:.2f} to {high:.2f})" for v, low, high in found)
        ratios = (
            "\n\nTTFT p50 / p95 / p99 of active 64 divided by lru's, of all runs, with 95 % "
            f"intervals over requests: {' / '.join(shown)}."
        )
    return (
        f"The first {first['requests']:,} requests of {_trace_name(part, first)} that fit the "
        f"server and {sizes['agents_tokens']:,} tokens. Qwen3-8B shape, "
        f"{first['pool_blocks']:,} blocks of {sizes['block_size']} tokens "
        f"({100 * sizes['agents_share']:g} % of the trace's). Arrivals as recorded, "
        f"{first['speed']:.1f} times as fast: {first['rate']:.1f} requests a second, "
        f"{sizes['agents_load']:g} of what lru served in a closed loop of "
        f"{sizes['agents_in_flight']}. Runs are listed in the order in which they were made.\n\n"
        f"{_runs(cells)}{ratios}"
    )


def dp2(part: dict) -> str:
    return _engines("The CPU server", part)


def dp2gpu(part: dict) -> str:
    return _engines("The 0.6B shape on two GPUs", part)


def _engines(what: str, part: dict) -> str:
    rows = []
    for mode, cell in part["cells"].items():
        for engine, report in cell["engines"].items():
            rows.append(
                [
                    mode,
                    engine,
                    "{post_flood_cached_tokens} of {warm_prefix_cached_tokens}".format(**report),
                    cell["endpoints"][engine]["pools"],
                    ", ".join(f"engine {e}: {n}" for e, n in report["decisions"].items()),
                    report["requests"]["failed"],
                ]
            )
    head = ["mode", "engine", "kept after floods", "policies at its endpoint"]
    head += ["decisions meanwhile", "failed"]
    return (
        f"{what} with `--data-parallel-size 2`. The drill ran on one engine and then on the other; "
        "each serves the counters of its own policy on a port of its own. In mode lru the "
        f"policy takes no decision.\n\n{table(head, rows)}"
    )
