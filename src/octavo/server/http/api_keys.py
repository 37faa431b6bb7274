"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo.errors import UsageError
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


def configured_keys(config: ServerConfig) -> list[str]:
    """The keys of `--api-key` and of `--api-key-file`, which has one per line. Raises UsageError."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text("utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"--api-key-file {config.api_key_file}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise UsageError(f"--api-key-file {config.api_key_file} is not text; write one key per line") from None
        from_file = [line.strip() for line in lines if line.strip()]
        if not from_file:
            raise UsageError(f"--api-key-file {config.api_key_file} holds no key; write one a line")
        keys += from_file
    for key in keys:
        if not key.isascii() or not key.isprintable() or not key.strip():
            raise UsageError("an API key must be visible ASCII characters, as it is sent in a header")
    return keys


class ApiKeys:
    """The keys of a server, as digests. Without keys, every request is allowed."""

    def __init__(self, keys: Iterable[str]) -> None:
        distinct = list(dict.fromkeys(keys))
        self._digests = [hashlib.sha256(key.encode()).digest() for key in distinct]
        # A tenant's name leaves the process in no form that a key could be guessed from.
        salt = secrets.token_bytes(16)
        self._tenants = [hashlib.blake2b(key.encode(), key=salt, digest_size=8).hexdigest() for key in distinct]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """An identifier of the request's key, "" if the server has no keys. Raises ApiError 401 for a wrong key."""
        if not self._digests:
            return ""
        given = [key for name, value in headers if (key := _key(name, value)) is not None]
        if not given:
            message = "no API key: send it in the header 'Authorization: Bearer <key>'"
            raise ApiError(401, message, headers=_CHALLENGE)
        found = -1
        if len(set(given)) == 1:
            digest = hashlib.sha256(given[0]).digest()
            # All of them are compared, so that the time does not tell which one came close.
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
