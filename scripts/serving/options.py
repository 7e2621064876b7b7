# SPDX-License-Identifier: Apache-2.0
"""The options that say what a workload sends, and the plan they stand for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

from serving import shapes
from serving.requests import Prompts, Request, WorkloadError, check_plan
from serving.traces import TraceFile, trace_file

PARTS = 10
MOST = 10_000_000  # of anything that is counted
MOST_PLAN_TOKENS = 200_000_000  # about 2 GB of prompts


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to send; tokens are counted by the server's tokenizer."""
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--shape", choices=("pressure", "zipf", "sessions", "trace"), default="pressure")
    add("--hot-tokens", type=positive, default=640, help="size of a hot prefix or first turn")
    add("--flood-tokens", type=positive, default=640, help="size of a one-use prompt")
    add("--flood-requests", type=positive, default=6, help="one-use prompts before each replay")
    add("--replay-every", type=natural, default=0, help="also replay after this many (0: no)")
    add("--warm-requests", type=positive, default=3, help="times the hot prefix is sent first")
    add(
        "--repetitions", type=positive, default=1, help="floods with a replay, prompts of their own"
    )
    add("--control-requests", type=natural, default=0, help="zero-reuse prompts a repetition")
    add("--survival", type=numbers, default=[], help="then floods of these lengths, e.g. 1,2,4")
    add("--max-tokens", type=positive, default=4, help="tokens to generate for each prompt")
    add("--prefixes", type=positive, default=4, help="hot prefixes (zipf) or sessions")
    add("--zipf-exponent", type=within(0, 100), default=1.0)
    add("--hot-share", type=within(0, 1), default=0.5, help="share of zipf requests that are hot")
    add("--turns", type=positive, default=4, help="turns of a session")
    add("--turn-tokens", type=positive, default=32, help="tokens each turn or question adds")
    add("--think-s", type=not_negative, default=0.0, help="seconds between answer and next turn")
    add("--trace", type=trace_file, help="in the public Mooncake form (.jsonl or .jsonl.gz)")
    add(
        "--trace-speed",
        type=not_negative,
        default=1.0,
        help="times faster than recorded; 0: no waiting",
    )
    add("--trace-block-tokens", type=positive, default=512, help="tokens each hash id stands for")
    add("--concurrency", type=positive, default=1, help="requests in flight at most")
    add(
        "--arrivals",
        type=not_negative,
        help="one-use prompts a second, Poisson (default: no waiting)",
    )
    add("--max-requests", type=positive, help="cut the plan after this many")
    add("--max-seconds", type=above_zero, default=600.0, help="start no request after this time")
    add("--request-timeout", type=above_zero, default=120.0, help="seconds without a byte")
    add("--seed", type=int, default=0)


def parse_workload(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line with these options; what cannot be sent is refused before any server."""
    options = parser.parse_args(argv)
    if options.shape == "trace" and options.trace is None:
        parser.error("--shape trace needs --trace FILE")
    return options


def workload_settings(options: argparse.Namespace) -> dict:
    """Return the workload options as they were understood."""
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    names = vars(parser.parse_args([]))
    return {
        name: str(value.path) if isinstance(value, TraceFile) else value
        for name, value in vars(options).items()
        if name in names
    }


def positive(text: str) -> int:
    """Parse an integer from 1 to MOST."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Parse an integer from 0 to MOST."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{value} is above {MOST:,}")
    return value


def finite(text: str) -> float:
    """Parse a number that a record can hold: not inf, not nan."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a number: give a large one for no limit")
    return value


def above_zero(text: str) -> float:
    """Parse a number above 0."""
    if (value := finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    """Parse a number of at least 0."""
    if (value := finite(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def within(least: float, most: float) -> Callable[[str], float]:
    """Return an argparse type: a number between two bounds."""

    def number(text: str) -> float:
        if not least <= (value := finite(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    return number


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers of at least 1."""
    return [positive(part) for part in text.split(",") if part.strip()]


def make_plan(
    options: argparse.Namespace, pool: list[int], max_model_len: int
) -> tuple[list[Request], int]:
    """Build the plan that the options name; returns it and the trace requests that are too long.

    `pool` are the token ids that prompts are drawn from; a request may be `max_model_len` tokens
    long. Raises WorkloadError when that is no plan to run.
    """
    _check_sizes(options, max_model_len)
    prompts = Prompts(pool, options.seed, MOST_PLAN_TOKENS)
    left_out = 0
    if options.shape == "trace":
        plan, left_out = _trace(options, prompts, max_model_len)
    else:
        plan = SHAPES[options.shape](options, prompts)
    plan = plan[: options.max_requests]
    if not plan:
        raise WorkloadError("the plan holds no request: ask for more, or shorter ones")
    check_plan(plan, max_model_len)
    if options.shape != "pressure":
        # Parts of a stream that has no repetitions of its own, for the statistics.
        for index, request in enumerate(plan):
            part = index * PARTS // len(plan)
            request.tag.update(repetition=part, key=f"{options.shape}/{index}")
    return plan, left_out


def _check_sizes(options: argparse.Namespace, max_model_len: int) -> None:
    """Raise WorkloadError for a prompt that cannot fit, before one of that size is drawn."""
    sizes = {"--hot-tokens": options.hot_tokens, "--flood-tokens": options.flood_tokens}
    used = {"pressure": sizes, "zipf": sizes, "sessions": {"--hot-tokens": options.hot_tokens}}
    for name, tokens in used.get(options.shape, {}).items():
        if tokens + options.max_tokens > max_model_len:
            raise WorkloadError(
                f"{name} {tokens} and --max-tokens {options.max_tokens} exceed the server's "
                f"max-model-len of {max_model_len}: ask for less"
            )


def _gaps(options: argparse.Namespace) -> Iterable[float]:
    return shapes.poisson_gaps(options.arrivals, str(options.seed))


def _pressure(options: argparse.Namespace, prompts: Prompts) -> list[Request]:
    return shapes.pressure(
        prompts,
        hot_tokens=options.hot_tokens,
        flood_tokens=options.flood_tokens,
        flood_requests=options.flood_requests,
        replay_every=options.replay_every,
        warm_requests=options.warm_requests,
        repetitions=options.repetitions,
        control_requests=options.control_requests,
        survival_gaps=options.survival,
        max_tokens=options.max_tokens,
        gaps=_gaps(options),
    )


def _zipf(options: argparse.Namespace, prompts: Prompts) -> list[Request]:
    return shapes.zipf(
        prompts,
        str(options.seed),
        prefixes=options.prefixes,
        prefix_tokens=options.hot_tokens,
        question_tokens=options.turn_tokens,
        flood_tokens=options.flood_tokens,
        requests=options.max_requests or 200,
        exponent=options.zipf_exponent,
        hot_share=options.hot_share,
        max_tokens=options.max_tokens,
        gaps=_gaps(options),
    )


def _sessions(options: argparse.Namespace, prompts: Prompts) -> list[Request]:
    return shapes.sessions(
        prompts,
        count=options.prefixes,
        turns=options.turns,
        first_tokens=options.hot_tokens,
        turn_tokens=options.turn_tokens,
        think_s=options.think_s,
        max_tokens=options.max_tokens,
        gaps=_gaps(options),
    )


SHAPES = {"pressure": _pressure, "zipf": _zipf, "sessions": _sessions}


def _trace(
    options: argparse.Namespace, prompts: Prompts, max_model_len: int
) -> tuple[list[Request], int]:
    return shapes.trace(
        prompts,
        options.trace.rows,
        block_tokens=options.trace_block_tokens,
        speed=options.trace_speed,
        max_model_len=max_model_len,
        max_tokens=options.max_tokens,
        max_requests=options.max_requests,
    )
