# SPDX-License-Identifier: Apache-2.0
"""One server with the OpenAI completions API: a request, its stream, the counters around it.

Nothing here depends on the device that serves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from serving import http, replies
from serving.metrics import MetricsError, PrefixCounters, prefix_counters
from serving.replies import ReplyError
from serving.requests import Request, Result, WorkloadError
from serving.secret import API_KEY_NAME

COUNTER_TIMEOUT_S = 10


class Client:
    """One server. `headers` go with every request (never printed: one holds the API key).

    Raises WorkloadError when the address or the proxy settings cannot be used.
    """

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
        self._http = http.async_client(self.base_url, headers=headers, timeout_s=timeout_s)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Return the served model's name, asked once when it was not given."""
        if self._model is None:
            answer = await self._json("GET", "/v1/models")
            with self._answering("/v1/models"):
                self._model = replies.model_name(answer)
        return self._model

    async def version(self) -> str | None:
        """Return the server's own version, None when it does not say."""
        try:
            version = (await self._json("GET", "/version")).get("version")
        except WorkloadError:
            return None
        return version if isinstance(version, str) else None

    async def token_pool(self) -> tuple[list[int], int]:
        """Return ordinary token ids of the server's tokenizer, and its max-model-len in tokens."""
        syllables = [c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"]
        text = " ".join(a + b for a in syllables for b in syllables[::7])
        body = {"model": await self.model(), "prompt": text, "add_special_tokens": False}
        answer = await self._json("POST", "/tokenize", body)
        with self._answering("/tokenize"):
            return replies.token_pool(answer)

    async def counters(self) -> PrefixCounters:
        """Read the server's prefix-cache counters now. MetricsError when they are not there."""
        url = f"{self.base_url}/metrics"
        try:
            response = await self._http.get("/metrics")
        except http.FAILURES as error:
            raise MetricsError(f"{url}: {http.text_of(error)}") from error
        if fault := replies.status_fault(response):
            raise MetricsError(f"{url}: {fault}")
        try:
            return prefix_counters(response.text)
        except MetricsError as error:
            raise MetricsError(f"{url}: {error}") from error

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
        """Stream one completion at temperature 0. A failure is in the result, not raised.

        Raises WorkloadError when what came is no answer of vLLM's.
        """
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
        started = time.perf_counter()
        with self._answering("/v1/completions"):
            usage: object = None
            try:
                async with self._http.stream("POST", "/v1/completions", json=body) as response:
                    usage = await _read_stream(response, result, started)
            except httpx.DecodingError as error:
                raise ReplyError(f"the body cannot be decoded ({error})") from error
            except http.FAILURES as error:
                result.error = http.text_of(error)
            if result.error is None:
                result.total_ms = (time.perf_counter() - started) * 1000
                _take_usage(result, usage)
        return result

    async def send_alone(self, request: Request) -> Result:
        """Send with the counters read before and after; they stand in for usage without details.

        Usage counts what a KV connector's tier served as cached too: that is taken off again.
        """
        try:
            before = await self.counters()
            result = await self.send(request)
            if result.error is None:
                moved = (await self.counters_after(before, len(request.prompt))) - before
                if moved.queries_tokens == len(request.prompt):
                    result.counter_cached_tokens = moved.hits_tokens
                    if moved.external_tokens:
                        result.external_tokens = moved.external_tokens
                if result.cached_tokens is not None:
                    result.cached_tokens -= result.external_tokens or 0
                else:
                    result.cached_tokens = result.counter_cached_tokens
        except MetricsError as error:
            return Result(request, error=str(error))
        return result

    async def _json(self, method: str, path: str, body: dict | None = None) -> dict[str, Any]:
        url = f"{self.base_url}{path}"
        try:
            response = await self._http.request(method, path, json=body)
        except http.FAILURES as error:
            raise WorkloadError(f"{url}: {http.text_of(error)}") from error
        if fault := replies.status_fault(response):
            hint = f" (set {API_KEY_NAME})" if response.status_code == 401 else ""
            raise WorkloadError(f"{url}: {fault}{hint}")
        with self._answering(path):
            return replies.json_object(response)

    @contextmanager
    def _answering(self, path: str) -> Iterator[None]:
        """Name the address at which an answer was not what it should be."""
        try:
            yield
        except ReplyError as error:
            raise WorkloadError(f"{self.base_url}{path}: {error}") from error


async def _read_stream(response: httpx.Response, result: Result, started: float) -> object:
    """Put a stream's text, its TTFT since `started` and its error into `result`; return its usage.

    `started` is a time.perf_counter(). Raises ReplyError, and what the connection raises.
    """
    if response.is_error:
        detail = (await response.aread()).decode(errors="replace")[:300]
        result.error = f"HTTP {response.status_code}: {detail}"
        return None
    if fault := replies.status_fault(response):
        raise ReplyError(fault)
    usage: object = None
    async for event in replies.events(response):
        if error := event.get("error"):
            result.error = f"error in the stream: {replies.shown(json.dumps(error))}"
            return None
        text = replies.first_choice_text(event)
        if text is not None:
            if result.ttft_ms is None:
                result.ttft_ms = (time.perf_counter() - started) * 1000
            result.text += text
        usage = event.get("usage") or usage
    return usage


def _take_usage(result: Result, usage: object) -> None:
    """Take the cached tokens from a stream's usage record, or say what the record finds wrong."""
    if usage is None or result.ttft_ms is None:
        # A server that dies cuts the connection, which is another error: this one ended in order.
        raise ReplyError("the stream ended before its usage record: is a proxy in between?")
    completion_tokens, cached_tokens = replies.usage_numbers(usage)
    if completion_tokens != result.request.max_tokens:
        asked = result.request.max_tokens
        result.error = f"{completion_tokens} of {asked} tokens came"
    else:
        result.cached_tokens = cached_tokens
