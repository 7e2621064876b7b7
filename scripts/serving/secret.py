# SPDX-License-Identifier: Apache-2.0
"""Secrets: the one place that reads the API key, and the one that takes them out of texts.

What a command has seen here (`remember`) appears in nothing that it prints or writes.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values

from serving.requests import WorkloadError

API_KEY_NAME = "VLLM_API_KEY"
SECRET_NAME = re.compile(r"(KEY|SECRET|PASSWORD|TOKEN)$", re.IGNORECASE)
# Of the environment: what the stack's services and their clients are given.
IN_ENVIRONMENT = (
    API_KEY_NAME,
    "GRAFANA_ADMIN_PASSWORD",
    "GF_SECURITY_ADMIN_PASSWORD",
    "REDIS_PASSWORD",
    "LMCACHE_RESP_PASSWORD",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
)
# A shorter value is a part of ordinary words; scripts/check_env.py asks for 12 and more.
SHORTEST = 8
SHOWN = "[secret]"
_known: set[str] = set()


def read_env_file(path: Path) -> dict[str, str | None]:
    """Return the settings of a `.env` file, {} when there is none. WorkloadError: unreadable."""
    try:
        return dict(dotenv_values(path))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise WorkloadError(f"{path} cannot be read ({reason}): give read access") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path} is not UTF-8 (byte {error.start}): save it as plain UTF-8"
        ) from error


def read_api_key(env_file: Path = Path(".env")) -> str | None:
    """Return VLLM_API_KEY from the environment, else from `env_file`, else None.

    One line end at its end is not part of it: files and Kubernetes secrets often have one. Raises
    WorkloadError, which never shows the key, when it cannot be sent in a header.
    """
    of_env_file = read_env_file(env_file)
    remember_settings(of_env_file)
    remember_environment()
    for where, value in (
        ("in the environment", os.environ.get(API_KEY_NAME)),
        (f"in {env_file}", of_env_file.get(API_KEY_NAME)),
    ):
        key = value or ""
        key = key.removesuffix("\r\n" if key.endswith("\r\n") else "\n")
        if key:
            if fault := _fault(key):
                raise WorkloadError(
                    f"{API_KEY_NAME} {where} {fault}: a key is one word of printable ASCII, such "
                    "as `openssl rand -hex 32` gives; set it again, here and on the server"
                )
            return key
    return None


def remember_environment() -> None:
    """Remember the secrets of the environment, and the passwords of its proxies."""
    remember(*(os.environ.get(name, "") for name in IN_ENVIRONMENT))
    proxies = (value for name, value in os.environ.items() if name.lower().endswith("_proxy"))
    remember(*map(_password, proxies))


def remember_settings(values: Mapping[str, str | None]) -> None:
    """Remember those settings that are secrets by their names."""
    remember(*(value or "" for name, value in values.items() if SECRET_NAME.search(name)))


def remember_address(url: str) -> None:
    """Remember the password that an address holds, if it does."""
    remember(_password(url))


def remember(*values: str) -> None:
    """Take these out of every text from now on; one of several lines, line by line."""
    for value in values:
        for part in (value, *value.splitlines()):
            if len(part.strip()) >= SHORTEST:
                _known.update(_spellings(part.strip()))


def redacted(text: str) -> str:
    """Return the text without any secret that was remembered."""
    # The longest first: one spelling may be a part of another.
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, SHOWN)
    return text


def redacted_record(value: object) -> object:
    """Return a JSON value with every secret taken out of its strings; its names stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_record(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_record(item) for item in value]
    return value


def _fault(key: str) -> str | None:
    """Say what keeps a key out of a header, None when nothing does."""
    if any(ord(character) < 32 or ord(character) == 127 for character in key):
        return "has a control character in it (a line end, a tab)"
    if not key.isascii():
        return "has a character in it that is not ASCII"
    if key != key.strip():
        return "begins or ends with a blank"
    return None


def _spellings(secret: str) -> set[str]:
    """Return how a secret looks in an error's text, in JSON, in HTML and in an address."""
    coded = secret.encode(errors="surrogateescape")
    return {
        secret,
        repr(secret)[1:-1],
        repr(coded)[2:-1],
        ascii(secret)[1:-1],
        json.dumps(secret)[1:-1],
        html.escape(secret),
        urllib.parse.quote(coded),
        urllib.parse.quote(coded, safe=""),
    }


def _password(url: str) -> str:
    with contextlib.suppress(ValueError):
        return urllib.parse.unquote(urllib.parse.urlsplit(url).password or "")
    # No address at all: what is before the @ may still be a password.
    return url.rpartition("@")[0].rpartition("//")[2].partition(":")[2]
