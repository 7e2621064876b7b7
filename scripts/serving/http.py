# SPDX-License-Identifier: Apache-2.0
"""The only place that makes HTTP clients: this machine's own addresses are never proxied.

HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY hold for every other address.
"""

from __future__ import annotations

import ipaddress
import urllib.request

import httpx

from serving.requests import WorkloadError

CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


def on_this_machine(url: str) -> bool:
    """Tell whether an address leads to this machine: its names, 127.0.0.0/8, ::1, 0.0.0.0."""
    host = _parsed(url).host
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def async_client(
    base_url: str, *, timeout_s: float, headers: dict[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client of one server. WorkloadError: its address or the proxy settings are wrong."""
    # A transport of its own is what keeps httpx from reading the proxy variables.
    transport = httpx.AsyncHTTPTransport(limits=CONNECTIONS) if on_this_machine(base_url) else None
    try:
        return httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=timeout_s,
            limits=CONNECTIONS,
            transport=transport,
        )
    except (httpx.InvalidURL, ImportError, ValueError) as error:
        raise _refused(base_url, error) from error


def get(url: str, timeout_s: float) -> httpx.Response:
    """GET once. WorkloadError as for a client; else what httpx raises when nothing answers."""
    transport = httpx.HTTPTransport() if on_this_machine(url) else None
    try:
        client = httpx.Client(timeout=timeout_s, transport=transport)
    except (httpx.InvalidURL, ImportError, ValueError) as error:
        raise _refused(url, error) from error
    with client:
        return client.get(url)


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise WorkloadError(f"{url!r} is no address: {error}; write http://HOST:PORT") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise WorkloadError(f"{url!r} is no address: write http://HOST:PORT")
    return parsed


def _refused(url: str, error: Exception) -> WorkloadError:
    """Say which proxy settings a client of `url` could not be made with; values may be secret."""
    # urllib reads what httpx reads, in either case; "no" is NO_PROXY.
    names = ", ".join(sorted(f"{scheme.upper()}_PROXY" for scheme in urllib.request.getproxies()))
    return WorkloadError(
        f"{url}: the proxy settings cannot be used ({error}): unset or correct {names} "
        "(socks5:// needs `pip install 'httpx[socks]'`, NO_PROXY takes names and single addresses)"
    )
