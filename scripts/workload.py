# SPDX-License-Identifier: Apache-2.0
"""Requests to a server with the OpenAI completions API: prompts, one request, a plan of many.

A prompt is a list of token ids drawn from what the server's own /tokenize returns, so its size
is exact for every tokenizer. A plan is a list of requests in the order in which they start.
Nothing here depends on the device that serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from dotenv import dotenv_values
from server_metrics import MetricsError, PrefixCounters, prefix_counters

API_KEY_NAME = "VLLM_API_KEY"
# Two prompts that differ within this many tokens share no block of any size vLLM offers.
DISTINCT_TOKENS = 8
SMALLEST_BLOCK = 16
COUNTER_TIMEOUT_S = 10


class WorkloadError(RuntimeError):
    """The workload cannot be run as asked; the message names the setting and the remedy."""


def read_api_key(env_file: Path = Path(".env")) -> str | None:
    """Return VLLM_API_KEY from the environment, else from `env_file`, else None."""
    return os.environ.get(API_KEY_NAME) or dotenv_values(env_file).get(API_KEY_NAME) or None


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
    """What came of one request; `error` is None when it was answered completely."""

    request: Request
    ttft_ms: float | None = None
    total_ms: float | None = None
    cached_tokens: int | None = None
    counter_cached_tokens: int | None = None
    text: str = ""
    error: str | None = None


class Prompts:
    """Draws prompts of exact token counts; equal (seed, name) gives equal prompts."""

    def __init__(self, pool: Iterable[int], seed: str | int) -> None:
        self._pool = sorted(set(pool))
        self._seed = seed
        if len(self._pool) < 64:
            raise WorkloadError(f"/tokenize gave {len(self._pool)} distinct tokens, 64 are needed")

    def draw(self, name: str, tokens: int) -> list[int]:
        """Return `tokens` token ids that belong to `name`."""
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


class Client:
    """One server. `headers` go with every request (never printed: one holds the API key)."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 120,
        data_parallel_rank: int | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if data_parallel_rank is not None:
            headers["X-data-parallel-rank"] = str(data_parallel_rank)
        self.base_url = base_url.rstrip("/")
        self._model = model
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Return the served model's name, asked once when it was not given."""
        if self._model is None:
            self._model = (await self._json("GET", "/v1/models"))["data"][0]["id"]
        return self._model

    async def version(self) -> str | None:
        """Return the server's own version, None when it does not say."""
        try:
            return (await self._json("GET", "/version"))["version"]
        except (WorkloadError, KeyError):
            return None

    async def token_pool(self) -> tuple[list[int], int]:
        """Return ordinary token ids of the server's tokenizer, and its max-model-len in tokens."""
        syllables = [c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"]
        text = " ".join(a + b for a in syllables for b in syllables[::7])
        body = {"model": await self.model(), "prompt": text, "add_special_tokens": False}
        answer = await self._json("POST", "/tokenize", json=body)
        return answer["tokens"], answer["max_model_len"]

    async def counters(self) -> PrefixCounters:
        """Read the server's prefix-cache counters now."""
        try:
            response = await self._http.get("/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise MetricsError(f"{self.base_url}/metrics: {_say(error)}") from error
        return prefix_counters(response.text)

    async def counters_after(self, earlier: PrefixCounters, queries_tokens: int) -> PrefixCounters:
        """Read the counters once they have moved by `queries_tokens`, or after some seconds."""
        deadline = time.monotonic() + COUNTER_TIMEOUT_S
        while True:
            now = await self.counters()
            if abs((now - earlier).queries_tokens) >= queries_tokens:
                return now
            if time.monotonic() > deadline:
                return now
            await asyncio.sleep(0.02)

    async def send(self, request: Request) -> Result:
        """Stream one completion at temperature 0. A failure is in the result, not raised."""
        result = Result(request)
        body = {
            "model": await self.model(),
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = None
        started = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    detail = (await response.aread()).decode(errors="replace")[:300]
                    result.error = f"HTTP {response.status_code}: {detail}"
                    return result
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        result.error = f"error in the stream: {str(event['error'])[:300]}"
                        return result
                    # vLLM sends a choice only with at least one token, even if its text is "".
                    if event["choices"]:
                        if result.ttft_ms is None:
                            result.ttft_ms = (time.perf_counter() - started) * 1000
                        result.text += event["choices"][0]["text"]
                    usage = event.get("usage") or usage
        except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
            result.error = _say(error)
            return result
        result.total_ms = (time.perf_counter() - started) * 1000
        if usage is None or result.ttft_ms is None:
            result.error = "the stream ended before its usage record"
        elif usage["completion_tokens"] != request.max_tokens:
            result.error = f"{usage['completion_tokens']} of {request.max_tokens} tokens came"
        elif details := usage.get("prompt_tokens_details"):
            result.cached_tokens = details.get("cached_tokens") or 0
        return result

    async def send_alone(self, request: Request) -> Result:
        """Send with the counters read before and after; they stand in for usage without details."""
        try:
            before = await self.counters()
            result = await self.send(request)
            if result.error is None:
                moved = (await self.counters_after(before, len(request.prompt))) - before
                if moved.queries_tokens == len(request.prompt):
                    result.counter_cached_tokens = moved.hits_tokens
                if result.cached_tokens is None:
                    result.cached_tokens = result.counter_cached_tokens
        except MetricsError as error:
            return Result(request, error=str(error))
        return result

    async def _json(self, method: str, path: str, **options: object) -> dict:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise WorkloadError(f"{self.base_url}{path}: {_say(error)}") from error
        if response.is_error:
            hint = f" (set {API_KEY_NAME})" if response.status_code == 401 else ""
            raise WorkloadError(f"{self.base_url}{path}: HTTP {response.status_code}{hint}")
        return response.json()


async def run_plan(
    client: Client,
    plan: list[Request],
    *,
    concurrency: int = 1,
    max_seconds: float = 600,
    max_failures: int = 5,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the requests in order, at most `concurrency` at once; return their results in order.

    After `max_seconds` or `max_failures` failed requests no more are started, so the answer can be
    shorter than the plan.
    """
    slots = asyncio.Semaphore(concurrency)
    deadline = time.monotonic() + max_seconds
    failures = 0
    tasks: list[asyncio.Task[Result | None]] = []
    last_of_lane: dict[int, asyncio.Task[Result | None]] = {}

    def over() -> bool:
        return time.monotonic() > deadline or failures >= max_failures

    async def one(request: Request, before: asyncio.Task[Result | None] | None) -> Result | None:
        nonlocal failures
        if before is not None:
            await before
            await asyncio.sleep(request.think_s)
        async with slots:
            if over():
                return None
            result = await (client.send_alone if request.alone else client.send)(request)
        failures += result.error is not None
        on_result(result)
        return result

    started = time.monotonic()
    for request in plan:
        if request.alone:
            await asyncio.gather(*tasks)
        if request.gap_s:
            await asyncio.sleep(max(0.0, started + request.gap_s - time.monotonic()))
        elif request.lane is None:
            async with slots:  # a closed loop starts the next request when there is room for it
                pass
        if over():
            break
        started = time.monotonic()
        tasks.append(asyncio.create_task(one(request, last_of_lane.get(request.lane))))
        if request.lane is not None:
            last_of_lane[request.lane] = tasks[-1]
        await asyncio.sleep(0)  # let it take its slot
        if request.alone:
            await tasks[-1]
    results = await asyncio.gather(*tasks)
    return [result for result in results if result is not None]


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
