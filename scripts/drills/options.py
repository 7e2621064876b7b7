# SPDX-License-Identifier: Apache-2.0
"""The options that say where a drill runs and what the candidate is held to; and the target."""

from __future__ import annotations

import argparse
from pathlib import Path

from drills.checks import Limits
from drills.compose import ComposeTarget
from drills.record import RecordError
from drills.targets import EmbeddedTarget, Save, Target, TargetError, UrlTarget
from servers.embedded import BLOCK_SIZE
from servers.tiny_model import make_model
from serving.files import REPO
from serving.options import above_zero, positive
from serving.requests import WorkloadError
from serving.secret import read_env_file


def limits(options: argparse.Namespace) -> Limits:
    """Return what the candidate is held to; a CPU that also runs the client is noisy."""
    regression = options.ttft_regression
    if regression is None:
        regression = 2.0 if options.target == "embedded" else 0.05
    return Limits(regression, options.ttft_p95_budget_ms, options.min_samples)


def share(text: str) -> float:
    """Parse "5%" or "0.05"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a share such as 5% or 0.05")
    return value


def add_drill_options(parser: argparse.ArgumentParser, targets: tuple[str, ...]) -> None:
    """Add the options that say where a drill runs and what the candidate is held to."""
    add = parser.add_argument
    add("--target", choices=targets, required=True)
    add("--out", type=Path, default=REPO / "out")
    add("--model", help="served model name (default: what the server lists first)")
    add("--project", type=Path, default=REPO, help="folder of compose.yaml and .env")
    add("--ready-timeout", type=positive, default=1800, help="compose: seconds to become healthy")
    add("--scan-limit", type=positive, default=64, help="embedded: COMPUTECACHE_SCAN_LIMIT")
    add("--blocks", type=positive, default=64, help="embedded: blocks of 32 tokens in the pool")
    add("--max-model-len", type=positive, default=1024, help="embedded: longest request in tokens")
    add("--ttft-regression", type=share, help="p95 TTFT allowed above lru's (5%%; embedded 200%%)")
    add("--ttft-p95-budget-ms", type=above_zero, help="instead: no p95 TTFT above this")
    add("--min-samples", type=positive, default=5, help="pairs of repetitions needed")


def block_tokens(options: argparse.Namespace) -> int | None:
    """Return the tokens of a block of the target's server, None for a server that is not ours.

    WorkloadError: `.env` cannot be read, or its BLOCK_SIZE is no size.
    """
    if options.target == "embedded":
        return BLOCK_SIZE
    if options.target != "compose":
        return None
    text = (read_env_file(options.project / ".env").get("BLOCK_SIZE") or "16").strip()
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= 4096):
        raise WorkloadError(
            f"BLOCK_SIZE={text[:20]} in {options.project / '.env'}: write 16, or the engine's size"
        )
    return int(text)  # without the line: the default of compose.yaml


def refuse_short_prefix(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with 2 where the hot prefix holds no whole block, which is all that a cache keeps."""
    try:
        block = block_tokens(options)
    except WorkloadError as error:
        parser.error(str(error))
    # Of the hot prompt alone the last token is always computed.
    need = block and block + (options.shape == "pressure")
    if need and options.shape in ("pressure", "zipf") and options.hot_tokens < need:
        parser.error(
            f"--hot-tokens {options.hot_tokens}: blocks hold {block} tokens here and only whole "
            f"ones are cached, so that it can never be found there: give at least {need}"
        )


def make_target(options: argparse.Namespace, save: Save) -> Target:
    """Return the target that the options name.

    TargetError when they do not say enough, RecordError when its model cannot be written.
    """
    if options.target == "embedded":
        try:
            model = make_model(options.out / "model")
        except OSError as error:
            raise RecordError(options.out / "model", error) from error
        return EmbeddedTarget(
            model,
            options.out,
            save,
            scan_limit=options.scan_limit,
            blocks=options.blocks,
            max_model_len=options.max_model_len,
        )
    if options.target == "compose":
        return ComposeTarget(options.project, save, ready_timeout_s=options.ready_timeout)
    if not (options.baseline_url and options.candidate_url):
        raise TargetError("--target url needs --baseline-url and --candidate-url")
    if not (options.baseline_policy_url and options.candidate_policy_url):
        raise TargetError("--target url needs --baseline-policy-url and --candidate-policy-url")
    return UrlTarget(
        (options.baseline_url, options.baseline_policy_url),
        (options.candidate_url, options.candidate_policy_url),
    )
