"""Fetches images from the web for requests, only from listed domains and public addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urljoin, urlsplit

import httpx

from octavo.errors import UsageError

_CONNECT_S, _TOTAL_S = 5.0, 10.0
_MAX_REDIRECTS = 3
_PORTS = {"https": 443, "http": 80}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Return True for a public internet address: not loopback, private, link-local, multicast or reserved in any
    form.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class MediaFetcher:
    """Fetches files by URL.

    domains: allowed domains, or `*` for all; a domain that begins with http:// may also be fetched without encryption
    max_bytes: maximum size of a file
    resolve: the resolver of host names
    is_allowed: decides which addresses may be contacted
    ports: ports by URL scheme
    """

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        *,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
        ports: dict[str, int] | None = None,
    ) -> None:
        self._domains = frozenset(domain.removeprefix("https://") for domain in domains)
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._ports = ports or _PORTS

    async def fetch(self, url: str, where: str) -> bytes:
        """Fetch the bytes at this URL.

        Raises UsageError naming `where`. The error reveals nothing about the content at the address.
        """
        if not self._domains:
            scheme = urlsplit(url).scheme
            raise UsageError(
                f"{where} is an {scheme} URL, but this server fetches no images; send the image as "
                "data:image/png;base64,... or start the server with --allowed-media-domains",
                param=where,
                code="invalid_value",
            )
        try:
            return await asyncio.wait_for(self._follow(url), _TOTAL_S)
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, asyncio.TimeoutError, UnicodeError):
            # The message is the same for every failure. Otherwise the server could be used to scan its network.
            raise UsageError(f"{where}: fetching the image failed", param=where, code="invalid_image_url") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            data, location = await self._get(url)
            if location is None:
                return data
            url = urljoin(url, location)
        raise ValueError("too many redirects")

    async def _get(self, url: str) -> tuple[bytes, str | None]:
        """Return the bytes, or the address to which the server redirects. Raises ValueError for a URL that is not
        allowed.
        """
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".").lower()
        port = parts.port or self._ports.get(scheme, 0)
        if parts.username is not None or parts.password is not None or port != self._ports.get(scheme):
            raise ValueError("a URL with credentials or another port")
        spellings = {f"http://{host}", "http://*"} if scheme == "http" else {host, "*", f"http://{host}", "http://*"}
        if not host or not spellings & self._domains:
            raise ValueError("a domain that is not allowed")
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise ValueError("an address that is not allowed")
        address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        name = parts.netloc.rpartition("@")[2]
        target = parts._replace(netloc=f"{address}:{port}", fragment="").geturl()
        timeout = httpx.Timeout(_TOTAL_S, connect=_CONNECT_S)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=timeout, follow_redirects=False) as client,
            client.stream(
                "GET",
                target,
                headers={"host": name, "accept": "image/*", "accept-encoding": "identity"},
                extensions={"sni_hostname": host},
            ) as answer,
        ):
            if answer.status_code in _REDIRECTS:
                return b"", answer.headers.get("location", "")
            if answer.status_code != 200:
                raise ValueError("no image")
            return await self._read(answer), None

    async def _read(self, answer: httpx.Response) -> bytes:
        data = bytearray()
        async for chunk in answer.aiter_raw():
            data += chunk
            if len(data) > self._max_bytes:
                raise ValueError("too large")
        return bytes(data)
