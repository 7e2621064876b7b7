# SPDX-License-Identifier: Apache-2.0
"""One server with the OpenAI completions API: a request, its stream, the counters around it.

Nothing here depends on the device that serves."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import httpx
from dotenv import dotenv_values

from serving import http
from serving.metrics import MetricsError, PrefixCounters, prefix_counters
from serving.requests import Request, Result, WorkloadError

API_KEY_NAME = "VLLM_API_KEY"
COUNTER_TIMEOUT_S = 10


def read_api_key(env_file: Path = Path(".env")) -> str | None:
    """Return VLLM_API_KEY from the environment, else from `env_file`, else None."""
    return os.environ.get(API_KEY_NAME) or dotenv_values(env_file).get(API_KEY_NAME) or None


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
        answer = await self._json("POST", "/tokenize", body)
        return answer["tokens"], answer["max_model_len"]

    async def counters(self) -> PrefixCounters:
        """Read the server's prefix-cache counters now."""
        try:
            response = await self._http.get("/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise MetricsError(f"{self.base_url}/metrics: {_text_of(error)}") from error
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
        usage: dict | None = None
        started = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                usage = await _read_stream(response, result, started)
        except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
            result.error = _text_of(error)
        if result.error is None:
            result.total_ms = (time.perf_counter() - started) * 1000
            _take_usage(result, usage)
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

    async def _json(self, method: str, path: str, body: dict | None = None) -> dict:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise WorkloadError(f"{self.base_url}{path}: {_text_of(error)}") from error
        if response.is_error:
            hint = f" (set {API_KEY_NAME})" if response.status_code == 401 else ""
            raise WorkloadError(f"{self.base_url}{path}: HTTP {response.status_code}{hint}")
        return response.json()


async def _read_stream(response: httpx.Response, result: Result, started: float) -> dict | None:
    """Put a stream's text, its TTFT since `started` and its error into `result`; return its usage.

    `started` is a time.perf_counter(). Raises what the connection or the stream's form raises.
    """
    if response.is_error:
        detail = (await response.aread()).decode(errors="replace")[:300]
        result.error = f"HTTP {response.status_code}: {detail}"
        return None
    usage = None
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            result.error = f"error in the stream: {str(event['error'])[:300]}"
            return None
        # vLLM sends a choice only with at least one token, even if its text is "".
        if event["choices"]:
            if result.ttft_ms is None:
                result.ttft_ms = (time.perf_counter() - started) * 1000
            result.text += event["choices"][0]["text"]
        usage = event.get("usage") or usage
    return usage


def _take_usage(result: Result, usage: dict | None) -> None:
    """Take the cached tokens from a stream's usage record, or say what the record finds wrong."""
    if usage is None or result.ttft_ms is None:
        result.error = "the stream ended before its usage record"
    elif usage["completion_tokens"] != result.request.max_tokens:
        asked = result.request.max_tokens
        result.error = f"{usage['completion_tokens']} of {asked} tokens came"
    elif details := usage.get("prompt_tokens_details"):
        result.cached_tokens = details.get("cached_tokens") or 0


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
