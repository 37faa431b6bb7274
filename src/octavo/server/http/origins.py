"""The web pages that may talk to the server, by the Host and Origin that browsers send.

A server on loopback has no key. Foreign pages in the user's browser must not reach it, not even under a name that
their owner points to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from octavo.server.errors import ApiError, bad_request
from octavo.server.http.json_body import quote
from octavo.server.http.route_table import Headers

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """True if a host's name or address, without a port, is this machine's own."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class OriginRules:
    """host: the address that the server listens on. has_keys: a key is required. cors_origins: `*` allows all pages."""

    host: str
    has_keys: bool
    cors_origins: tuple[str, ...] = ()

    def check(self, headers: Headers, http_version: str) -> None:
        """Raises ApiError 400 for a broken Host header and 403 for a page that must not call."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and http_version != "1.0"):
            raise bad_request(f"{len(hosts)} Host headers; there must be one")
        match = _HOST.fullmatch(hosts[0].decode("latin-1")) if hosts else None
        if hosts and match is None:
            raise bad_request(f"the Host header is not a host: {quote(hosts[0].decode('latin-1'))}")
        host = match[1].lower() if match else ""
        listens_on_loopback = is_loopback(self.host)
        # With a key, another name is harmless, for example that of a proxy.
        if listens_on_loopback and not self.has_keys and host and not is_loopback(host) and host != self.host.lower():
            remedy = "call it as localhost, or ask for an --api-key behind a proxy"
            raise _forbidden(f"this server does not answer for host {quote(host)}; {remedy}")
        origin = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
        if origin is None or self.allows(origin) or (self.has_keys and not listens_on_loopback):
            return
        match = _ORIGIN.fullmatch(origin)
        page = match[1].lower() if match else ""
        if not page or (page != host and not (listens_on_loopback and is_loopback(page))):
            raise _forbidden(f"pages of {quote(origin)} may not call this server; --cors-origin allows them")

    def allows(self, origin: str) -> bool:
        """True if `--cors-origin` names this origin."""
        return "*" in self.cors_origins or origin in self.cors_origins

    def cors_headers(self, headers: Headers) -> Headers:
        """The headers that let a browser's page read the answer; none unless configured."""
        if not self.cors_origins:
            return []
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None or not self.allows(origin.decode("latin-1")):
            return [(b"vary", b"Origin")]
        return [
            (b"vary", b"Origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]

    def preflight_headers(self, headers: Headers) -> Headers | None:
        """The answer to a browser's preflight request, besides `cors_headers`; None if this is not one."""
        names = {name for name, _ in headers}
        if b"access-control-request-method" not in names or len(self.cors_headers(headers)) < 2:
            return None
        asked = next((value for name, value in headers if name == b"access-control-request-headers"), b"")
        if not re.fullmatch(rb"[A-Za-z0-9_, -]{0,1024}", asked):
            return None
        return [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", asked or b"authorization, content-type"),
            (b"access-control-max-age", b"600"),
        ]


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden_host")
