# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a server: requests, exact prompts, and what came of them.

A prompt is a list of token ids drawn from what the server's own /tokenize returns, so its size
is exact for every tokenizer. A plan is a list of requests in the order in which they start."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

# Two prompts that differ within this many tokens share no block of any size vLLM offers.
DISTINCT_TOKENS = 8
SMALLEST_BLOCK = 16


class WorkloadError(RuntimeError):
    """The workload cannot be run as asked; the message names the setting and the remedy."""


@dataclass(frozen=True)
class Request:
    """One completion to ask for.

    kind: the class its time to first token is counted in.
    alone: starts after every earlier request has ended, and counters are read around it.
    gap_s: seconds after the start of the request before it in the plan (0: as soon as possible).
    lane: requests of one lane (a chat session) run one after another.
    think_s: seconds between the end of the lane's last request and this one's start.
    tag: what the caller wants to find again in the result.
    """

    kind: str
    prompt: list[int]
    max_tokens: int = 4
    alone: bool = False
    gap_s: float = 0.0
    lane: int | None = None
    think_s: float = 0.0
    tag: dict = field(default_factory=dict)


@dataclass
class Result:
    """What came of one request; `error` is None when it was answered completely.

    external_tokens: those that a KV connector's tier served, where counters were read around the
    request and moved; `cached_tokens` is then what the device alone served.
    """

    request: Request
    ttft_ms: float | None = None
    total_ms: float | None = None
    cached_tokens: int | None = None
    counter_cached_tokens: int | None = None
    external_tokens: int | None = None
    text: str = ""
    error: str | None = None


class Prompts:
    """Draws prompts of exact token counts; equal (seed, name) gives equal prompts.

    most_tokens: how many may be drawn in all, None for no bound.
    """

    def __init__(
        self, pool: Iterable[int], seed: str | int, most_tokens: int | None = None
    ) -> None:
        self._pool = sorted(set(pool))
        self._seed = seed
        self._left, self._most = most_tokens, most_tokens
        if len(self._pool) < 64:
            raise WorkloadError(f"/tokenize gave {len(self._pool)} distinct tokens, 64 are needed")

    def draw(self, name: str, tokens: int) -> list[int]:
        """Return `tokens` token ids that belong to `name`. WorkloadError: too many in all."""
        if self._left is not None:
            self._left -= tokens
            if self._left < 0:
                raise WorkloadError(
                    f"the plan has more than {self._most:,} tokens of prompts: ask for fewer "
                    "requests or shorter ones"
                )
        return random.Random(f"{self._seed}/{name}").choices(self._pool, k=tokens)


def check_plan(plan: list[Request], max_model_len: int) -> None:
    """Raise WorkloadError when a prompt does not fit, or different prompts share a first block.

    Sharing on purpose (same hot prefix, same session) is named by an equal tag["shares"].
    """
    first_seen: dict[tuple[int, ...], object] = {}
    for request in plan:
        size = len(request.prompt) + request.max_tokens
        if size > max_model_len:
            raise WorkloadError(
                f"a {request.kind} prompt of {len(request.prompt)} tokens and {request.max_tokens} "
                f"to generate exceed the server's max-model-len of {max_model_len}: ask for less"
            )
        owner = request.tag.get("shares", tuple(request.prompt))
        if first_seen.setdefault(tuple(request.prompt[:DISTINCT_TOKENS]), owner) != owner:
            raise WorkloadError(f"two prompts start alike ({request.kind}): use another seed")


def reusable_tokens(prompts: Iterable[list[int]]) -> int:
    """Count the tokens that a cache of any size could serve, in steps of SMALLEST_BLOCK tokens."""
    seen: set[int] = set()
    found = 0
    for prompt in prompts:
        chain, chains = 0, []
        for end in range(SMALLEST_BLOCK, len(prompt) + 1, SMALLEST_BLOCK):
            chain = hash((chain, *prompt[end - SMALLEST_BLOCK : end]))
            chains.append(chain)
        # vLLM always computes a prompt's last token.
        servable = chains[: (len(prompt) - 1) // SMALLEST_BLOCK]
        found += SMALLEST_BLOCK * sum(chain in seen for chain in servable)
        seen.update(chains)
    return found
