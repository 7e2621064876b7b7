# SPDX-License-Identifier: Apache-2.0
"""The only place that makes HTTP clients: this machine's own addresses are never proxied.

HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY hold for every other address.
"""

from __future__ import annotations

import ipaddress
import os
import urllib.request

import httpx

from serving.requests import WorkloadError

CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
# What asking a server can end with, beside an answer. UnicodeError: a name that DNS cannot spell.
FAILURES = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, UnicodeError)
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


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
    here = on_this_machine(base_url)
    try:
        # A transport of its own is what keeps httpx from reading the proxy variables.
        transport = httpx.AsyncHTTPTransport(limits=CONNECTIONS) if here else None
        return httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=timeout_s,
            limits=CONNECTIONS,
            transport=transport,
        )
    except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        raise _refused(base_url, error) from error


def get(url: str, timeout_s: float) -> httpx.Response:
    """GET once. WorkloadError as for a client; httpx.TransportError when nothing answers."""
    here = on_this_machine(url)
    try:
        transport = httpx.HTTPTransport() if here else None
        client = httpx.Client(timeout=timeout_s, transport=transport)
    except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        raise _refused(url, error) from error
    with client:
        try:
            return client.get(url)
        except (OSError, UnicodeError) as error:
            raise httpx.TransportError(str(error)) from error


def check_address(url: str) -> None:
    """Raise WorkloadError when this cannot be the address of a server."""
    _parsed(url)


def text_of(error: Exception) -> str:
    """Return an error's kind and its text, if it has one, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _parsed(url: str) -> httpx.URL:
    remedy = "write http://HOST:PORT"
    try:
        parsed = httpx.URL(url)
        host, port = parsed.host, parsed.port
    except (httpx.InvalidURL, ValueError) as error:
        raise WorkloadError(f"{url!r} is no address: {error}; {remedy}") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise WorkloadError(f"{url!r} is no address: {remedy}")
    if port is not None and not 0 < port < 65536:
        raise WorkloadError(f"{url!r} is no address: {port} is no port (1 to 65535); {remedy}")
    return parsed


def _refused(url: str, error: Exception) -> WorkloadError:
    """Say which settings a client of `url` could not be made with; values may be secret."""
    if isinstance(error, OSError):  # ssl.SSLError is one: a file without a certificate
        names = " and ".join(name for name in CERTIFICATES if name in os.environ)
        return WorkloadError(
            f"{url}: the certificates cannot be read ({error.strerror or text_of(error)}): "
            f"unset or correct {names or ' and '.join(CERTIFICATES)}"
        )
    # urllib reads what httpx reads, in either case; "no" is NO_PROXY.
    names = ", ".join(sorted(f"{scheme.upper()}_PROXY" for scheme in urllib.request.getproxies()))
    return WorkloadError(
        f"{url}: the proxy settings cannot be used ({error}): unset or correct {names} "
        "(socks5:// needs `pip install 'httpx[socks]'`, NO_PROXY takes names and single addresses)"
    )
