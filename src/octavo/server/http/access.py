"""Access control: API keys, compared in constant time, and the web pages that may send requests to the server.

Browsers identify their page in the headers Host and Origin. A server on loopback may have no key. Other sites' pages in
the user's browser must not reach it, not even under a domain name that points to 127.0.0.1 (DNS rebinding).

A page can post a form without a preflight, but only with one of three content types, and JSON is not among them.
Programs may send JSON under these types too, as curl does by default. On loopback such a body is accepted, unless it
comes from a browser.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UsageError
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, bad_request
from octavo.server.http.json_body import quote
from octavo.server.http.route_table import Headers

_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://" + _HOST.pattern, re.IGNORECASE)
# All browsers send an Origin with every POST, and a Sec-Fetch-Site to this machine. The other headers catch old ones:
# every browser calls itself Mozilla.
_OF_PAGES = frozenset({b"origin", b"referer", b"cookie"})
_BROWSER = b"mozilla/"


def configured_keys(config: ServerConfig) -> list[str]:
    """Return all keys in the options, including administrators' keys. Raises UsageError."""
    return [*_keys("--api-key-file", config.api_key, config.api_key_file), *admin_keys(config)]


def admin_keys(config: ServerConfig) -> list[str]:
    """Return the administrators' keys. Raises UsageError."""
    return _keys("--admin-key-file", config.admin_key, config.admin_key_file)


def _keys(flag: str, given: Iterable[str], path: str | None) -> list[str]:
    """Return the keys given by an option, and those in a file with one key per line."""
    keys = list(given)
    if path is not None:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{flag} {path} is not text; write one key per line") from None
        from_file = [line.strip() for line in lines if line.strip()]
        if not from_file:
            raise UsageError(f"{flag} {path} contains no key; write one per line")
        keys += from_file
    for key in keys:
        if not key.isascii() or not key.isprintable() or not key.strip():
            raise UsageError("an API key must consist of visible ASCII characters, because it is sent in a header")
    return keys


class ApiKeys:
    """The server's keys, as digests. Without keys, every request is allowed.

    salt: salt for the tenants' names, which outlive the server if its responses are stored in a file
    """

    def __init__(self, keys: Iterable[str], salt: bytes, admins: Iterable[str] = ()) -> None:
        distinct = list(dict.fromkeys(keys))
        self._digests = [hashlib.sha256(key.encode()).digest() for key in distinct]
        # Keys cannot be guessed from their tenants' names, because each try takes 16 MiB and 50 ms.
        self._tenants = [
            hashlib.scrypt(key.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=8).hex() for key in distinct
        ]
        known = set(admins)
        self._admins = {tenant for key, tenant in zip(distinct, self._tenants, strict=True) if key in known}

    def __len__(self) -> int:
        """Return the number of different keys."""
        return len(self._digests)

    def is_admin(self, tenant: str) -> bool:
        """Return True if this is the tenant of an administrator's key."""
        return tenant in self._admins

    def tenant(self, headers: Headers) -> str:
        """Return the tenant of the request's key, or "" if the server has no keys. Raises ApiError 401 for a
        wrong key.
        """
        if not self._digests:
            return ""
        given = [key for name, value in headers if (key := _key(name, value)) is not None]
        if not given:
            message = "no API key: send it in the header 'Authorization: Bearer <key>'"
            raise ApiError(401, message, headers=_CHALLENGE)
        found = -1
        if len(set(given)) == 1:
            digest = hashlib.sha256(given[0]).digest()
            # All keys are compared, so that the time does not reveal which one came close.
            for i, expected in enumerate(self._digests):
                if hmac.compare_digest(digest, expected):
                    found = i
        if found < 0:
            raise ApiError(401, "the API key is wrong", code="invalid_api_key", headers=_CHALLENGE)
        return self._tenants[found]


def _key(name: bytes, value: bytes) -> bytes | None:
    if name == b"authorization":
        scheme, _, key = value.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else None
    return value if name == b"x-api-key" else None  # Anthropic's clients


def is_loopback(host: str) -> bool:
    """Return True if a host's name or address, without a port, refers to the loopback interface."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class OriginRules:
    """The rules for the browser pages that may send requests.

    host: the address that the server listens on
    has_keys: whether a key is required
    cors_origins: `*` allows all pages, `localhost` allows this machine's pages on any port
    """

    host: str
    has_keys: bool
    cors_origins: tuple[str, ...] = ()

    def check(self, headers: Headers, http_version: str) -> None:
        """Raise ApiError 400 for an invalid Host header or several Origin headers, and 403 for a host or a page that is
        not allowed.
        """
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and http_version != "1.0"):
            raise bad_request(f"{len(hosts)} Host headers; there must be one")
        match = _HOST.fullmatch(hosts[0].decode("latin-1")) if hosts else None
        if hosts and match is None:
            raise bad_request(f"the Host header is not a host: {quote(hosts[0].decode('latin-1'))}")
        host = match[1].lower() if match else ""
        listens_on_loopback = is_loopback(self.host)
        # With a key, a different name is harmless, for example a proxy's.
        if listens_on_loopback and not self.has_keys and host and not is_loopback(host) and host != self.host.lower():
            remedy = "call it as localhost, or require an --api-key behind a proxy"
            raise _forbidden(f"this server does not answer for host {quote(host)}; {remedy}")
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        if len(origins) > 1:
            raise bad_request(f"{len(origins)} Origin headers; there may be one")
        origin = origins[0] if origins else None
        if origin is None or self.allows(origin) or (self.has_keys and not listens_on_loopback):
            return
        match = _ORIGIN.fullmatch(origin)
        page = match[1].lower() if match else ""
        if not page or (page != host and not (listens_on_loopback and is_loopback(page))):
            raise _forbidden(f"pages of {quote(origin)} may not call this server; --cors-origin allows them")

    def is_program_here(self, headers: Headers) -> bool:
        """Return True if the server is on loopback, the request addresses it by a loopback name, and the request is not
        from a browser.
        """
        hosts = [_HOST.fullmatch(value.decode("latin-1")) for name, value in headers if name == b"host"]
        is_here = is_loopback(self.host) and all(match is not None and is_loopback(match[1]) for match in hosts)
        return is_here and not is_from_browser(headers)

    def allows(self, origin: str) -> bool:
        """Return True if `--cors-origin` lists this origin, or is `localhost` and the page is from this machine."""
        if "*" in self.cors_origins or origin in self.cors_origins:
            return True
        match = _ORIGIN.fullmatch(origin) if "localhost" in self.cors_origins else None
        return match is not None and origin.lower().startswith(("http://", "https://")) and is_loopback(match[1])

    def cors_headers(self, headers: Headers) -> Headers:
        """Return the headers that let a browser page read the answer. Without `--cors-origin` there are none."""
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
        """Return the headers of the answer to a preflight request, besides `cors_headers`, or None if this is not a
        preflight.
        """
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


def is_from_browser(headers: Headers) -> bool:
    """Return True if the request has a header that pages send but programs do not."""
    return any(
        name in _OF_PAGES
        or name.startswith(b"sec-fetch-")
        or (name == b"user-agent" and value.lower().startswith(_BROWSER))
        for name, value in headers
    )


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden_host")
