# SPDX-License-Identifier: Apache-2.0
"""What a server's answers have to look like, and one line on each that does not.

A server that is not vLLM, a proxy's error page, a redirect, a body that was cut: each is a
ReplyError that says what came instead.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

SHOWN_CHARACTERS = 120


class ReplyError(RuntimeError):
    """An answer is not what vLLM sends; the message says what came, in one line."""


def shown(text: str) -> str:
    """Return the beginning of a text in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def status_fault(response: httpx.Response) -> str | None:
    """Say what is wrong with a status that is not 200, None when it is."""
    if response.status_code == 200:
        return None
    text = f"HTTP {response.status_code}"
    if response.has_redirect_location:
        to = shown(response.headers["location"])
        return f"{text}, a redirect to {to}: give the address that it leads to"
    return text


def json_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object that a response with status 200 holds."""
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise ReplyError(f"no JSON came but {_what(response)}: is this vLLM?") from error
    if not isinstance(answer, dict):
        raise ReplyError(f"no JSON object came but {shown(response.text)}: is this vLLM?")
    if answer.get("error"):
        raise ReplyError(f"an error came with HTTP 200: {shown(json.dumps(answer['error']))}")
    return answer


def model_name(answer: dict[str, Any]) -> str:
    """Return the first model of /v1/models."""
    models = answer.get("data")
    if models == []:
        raise ReplyError("the list of models is empty: start the server with a model")
    first = models[0] if isinstance(models, list) else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        raise ReplyError(
            f"no list of models came but {shown(json.dumps(answer))}: is this vLLM? Or give --model"
        )
    return name


def token_pool(answer: dict[str, Any]) -> tuple[list[int], int]:
    """Return the token ids of /tokenize and its max-model-len in tokens."""
    tokens, longest = answer.get("tokens"), answer.get("max_model_len")
    if not isinstance(tokens, list) or not all(_is_count(token) for token in tokens):
        raise ReplyError(f"no token ids came but {shown(json.dumps(answer))}: is this vLLM?")
    if not _is_count(longest) or not longest:
        raise ReplyError(f"max_model_len is {shown(json.dumps(longest))}: is this vLLM 0.32.0?")
    return tokens, longest


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE].

    By the standard: a blank after `data:` is optional, one event may have several such lines.
    """
    data: list[str] = []
    seen = ""
    async for line in response.aiter_lines():
        seen = seen or line
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            if data == ["[DONE]"]:
                return
            yield _event("\n".join(data))
            data = []
    if data and data != ["[DONE]"]:
        yield _event("\n".join(data))  # cut off before the empty line: it may be whole
    if seen and not seen.startswith(("data:", "event:", "id:", "retry:", ":")):
        raise ReplyError(f"no stream of events came but {shown(seen)}")


def first_choice_text(event: dict[str, Any]) -> str | None:
    """Return the text that an event adds, None when it holds no choice.

    vLLM sends a choice only with at least one token, even if its text is "".
    """
    choices = event.get("choices")
    if choices == []:
        return None
    first = choices[0] if isinstance(choices, list) else None
    text = first.get("text") if isinstance(first, dict) else None
    if not isinstance(text, str):
        raise ReplyError(f"an event has no text: {shown(json.dumps(event))}")
    return text


def usage_numbers(usage: object) -> tuple[int, int | None]:
    """Return completion_tokens of a usage record, and its cached tokens, None without details."""
    if not isinstance(usage, dict) or not _is_count(usage.get("completion_tokens")):
        raise ReplyError(f"the usage record has no completion_tokens: {shown(json.dumps(usage))}")
    details = usage.get("prompt_tokens_details")
    if not details:
        return usage["completion_tokens"], None
    cached = details.get("cached_tokens") if isinstance(details, dict) else details
    if cached is not None and not _is_count(cached):
        raise ReplyError(f"cached_tokens is no count: {shown(json.dumps(details))}")
    return usage["completion_tokens"], cached or 0


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReplyError(f"an event is no JSON: {shown(text)}") from error
    if not isinstance(event, dict):
        raise ReplyError(f"an event is no JSON object: {shown(text)}")
    return event


def _what(response: httpx.Response) -> str:
    kind = response.headers.get("content-type", "no content type").partition(";")[0]
    return f"{kind} ({shown(response.text) or 'empty'})"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
