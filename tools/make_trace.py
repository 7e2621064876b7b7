#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make request traces in the Mooncake form, the same bytes for the same seed.

Kinds: flood (one-use prompts over a hot prefix), drift (a hot set retires for a new
one), chat (turns with think time), agents (loops with growing context), mix (all four
at once). Times are milliseconds, lengths tokens; blocks hold ``--block-size`` tokens.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

from lab.files import replace_file
from lab.options import file_to_write

BLOCK_SIZE = 16  # tokens, vLLM's default on a GPU
REQUESTS = 4000


class Prompt:
    """A growing chain of blocks. Every id stands for a block and all before it."""

    def __init__(self, ids: Iterator[int], block_size: int, tokens: int = 0) -> None:
        self._ids = ids
        self._block_size = block_size
        self._blocks: list[int] = []
        self.tokens = 0
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        """Append tokens; blocks that they fill get ids of their own."""
        self.tokens += tokens
        while len(self._blocks) < self.tokens // self._block_size:
            self._blocks.append(next(self._ids))

    def fork(self, tokens: int = 0) -> "Prompt":
        """A prompt that shares the full blocks so far and grows on its own."""
        copy = Prompt(self._ids, self._block_size)
        copy._blocks = self._blocks[:]
        copy.tokens = self.tokens
        copy.grow(tokens)
        return copy

    def request(self, at_ms: float, output_tokens: int) -> dict:
        """One trace line; a last block that is not full has an id of its own."""
        partial = [next(self._ids)] if self.tokens % self._block_size else []
        return {
            "timestamp_ms": int(at_ms),
            "input_length": self.tokens,
            "output_length": output_tokens,
            "hash_ids": self._blocks + partial,
            "block_size": self._block_size,
        }


Source = Iterator[dict]  # requests in order of time for as long as they are taken
NewPrompt = Callable[[int], Prompt]  # tokens -> a prompt that shares nothing


def _tokens(random: Random, median: float, spread: float, most: int) -> int:
    """A log-normal length in tokens, 1 .. most."""
    return max(1, min(most, int(median * random.lognormvariate(0, spread))))


def flood(random: Random, new: NewPrompt) -> Source:
    """A few system prompts in steady use; now and then a burst of one-use prompts."""
    system = [new(random.randint(800, 6000)) for _ in range(8)]
    at_ms = 0.0
    while True:
        for _ in range(random.randint(20, 60)):
            at_ms += random.expovariate(1 / 400)
            prompt = random.choices(system, range(len(system), 0, -1))[0]
            yield prompt.fork(_tokens(random, 120, 0.8, 2000)).request(at_ms, 100)
        for _ in range(random.randint(10, 120)):
            at_ms += random.expovariate(1 / 60)
            yield new(random.randint(160, 1920)).request(at_ms, 20)


def drift(random: Random, new: NewPrompt) -> Source:
    """Documents asked about over and over; every 600 requests a new set replaces them."""
    at_ms = 0.0
    while True:
        documents = [new(random.randint(500, 4000)) for _ in range(40)]
        weights = [1 / rank for rank in range(1, len(documents) + 1)]
        for _ in range(600):
            at_ms += random.expovariate(1 / 300)
            if random.random() < 0.15:
                prompt = new(random.randint(200, 3000))
            else:
                question = _tokens(random, 40, 0.7, 400)
                prompt = random.choices(documents, weights)[0].fork(question)
            yield prompt.request(at_ms, 80)


def _sessions(
    random: Random, every_ms: float, session: Callable[[float], Iterator[tuple[float, dict]]]
) -> Source:
    """Sessions that start at random and overlap, their requests merged by time."""
    next_start_ms = 0.0
    live: list[tuple[float, int, dict, Iterator]] = []
    for number in count():
        while live and min(live)[0] <= next_start_ms:
            first = min(live)
            live.remove(first)
            yield first[2]
            if (step := next(first[3], None)) is not None:
                live.append((step[0], first[1], step[1], first[3]))
        steps = session(next_start_ms)
        at_ms, request = next(steps)
        live.append((at_ms, number, request, steps))
        next_start_ms += random.expovariate(1 / every_ms)


def chat(random: Random, new: NewPrompt) -> Source:
    """Conversations: short questions, longer answers, half a minute to think."""
    system = [new(random.randint(200, 1500)) for _ in range(5)]

    def conversation(at_ms: float) -> Iterator[tuple[float, dict]]:
        prompt = random.choice(system).fork()
        while True:
            prompt.grow(_tokens(random, 90, 1.0, 3000))
            answer = _tokens(random, 250, 0.7, 1500)
            yield at_ms, prompt.request(at_ms, answer)
            if random.random() < 0.25:
                return
            prompt.grow(answer)
            at_ms += 25 * answer + 30_000 * random.lognormvariate(0, 0.9)

    return _sessions(random, 2_000, conversation)


def agents(random: Random, new: NewPrompt) -> Source:
    """Tool loops on a shared preamble: seconds between steps, some helpers, some long waits."""
    preamble = [new(random.randint(1000, 3500)) for _ in range(3)]

    def loop(at_ms: float) -> Iterator[tuple[float, dict]]:
        prompt = random.choice(preamble).fork(_tokens(random, 400, 0.8, 3000))
        for _ in range(random.randint(3, 16)):
            call = _tokens(random, 80, 0.6, 600)
            yield at_ms, prompt.request(at_ms, call)
            at_ms += 20 * call + 4_000 * random.lognormvariate(0, 0.8)
            if random.random() < 0.05:
                helper = prompt.fork(_tokens(random, 200, 0.5, 1000))
                yield at_ms, helper.request(at_ms, 200)
                at_ms += 6_000
            if random.random() < 0.1:  # a person has to agree first
                at_ms += 120_000 * random.lognormvariate(0, 0.8)
            prompt.grow(call + _tokens(random, 250, 1.0, 3000))

    return _sessions(random, 6_000, loop)


def mix(random: Random, new: NewPrompt) -> Source:
    """All four kinds side by side, merged by time."""
    sources = [kind(random, new) for kind in (flood, drift, chat, agents)]
    heads = [next(source) for source in sources]
    while True:
        first = min(range(len(heads)), key=lambda i: heads[i]["timestamp_ms"])
        yield heads[first]
        heads[first] = next(sources[first])


KINDS = {kind.__name__: kind for kind in (flood, drift, chat, agents, mix)}


def make_trace(kind: str, seed: int, requests: int, block_size: int = BLOCK_SIZE) -> list[dict]:
    """The first ``requests`` trace lines of a kind (one of KINDS)."""
    ids = count()
    source = KINDS[kind](Random(seed), lambda tokens: Prompt(ids, block_size, tokens))
    return [next(source) for _ in range(requests)]


def to_jsonl(rows: list[dict]) -> bytes:
    """The lines of a trace file."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="default 4000")
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, help="tokens (default 16)")
    parser.add_argument("--out", type=file_to_write, required=True, help=".jsonl or .jsonl.gz")
    arguments = parser.parse_args(argv)
    for name in ("requests", "block_size"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected an integer >= 1")

    rows = make_trace(arguments.kind, arguments.seed, arguments.requests, arguments.block_size)
    text = to_jsonl(rows)
    content = gzip.compress(text, mtime=0) if arguments.out.suffix == ".gz" else text
    try:
        replace_file(arguments.out, content)
    except OSError as error:
        print(f"make_trace: --out {arguments.out}: {error.strerror}", file=sys.stderr)
        return 2
    summary = {"kind": arguments.kind, "seed": arguments.seed, "requests": len(rows)}
    print(json.dumps(summary | {"span_s": rows[-1]["timestamp_ms"] / 1000}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
