"""The routes of the application: the error format of each path's protocol, and the paths that need no key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.routing import BaseRoute, Route

from octavo.server.errors import ApiError

Headers: TypeAlias = "list[tuple[bytes, bytes]]"


@dataclass(frozen=True, slots=True)
class Dialect:
    """error_body: makes the body from an error and the request's id. id_header: besides x-request-id, in lower case.

    root: the beginning of all paths of the protocol, known or not, if no other protocol has it.
    """

    error_body: Callable[[ApiError, str], dict[str, Any]] = lambda error, _request_id: error.body()
    id_header: bytes | None = None
    root: str | None = None

    def id_headers(self, request_id: str) -> Headers:
        """The headers that tell a client the id."""
        names = [b"x-request-id"] if self.id_header is None else [b"x-request-id", self.id_header]
        return [(name, request_id.encode()) for name in names]

    def error_answer(self, error: ApiError, request_id: str) -> tuple[Headers, bytes]:
        """(headers, body) of the answer to a request that failed, without `id_headers`."""
        body = json.dumps(self.error_body(error, request_id)).encode()
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
        return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers], body


DEFAULT_DIALECT = Dialect()


class RouteTable:
    """The paths of an application. Another spelling of a path is another path.

    public: paths that may be read without a key. One that ends in `/` stands for everything below it.
    bodiless: paths that answer without reading a body, whatever it is. with_images: paths whose bodies may hold images.
    """

    def __init__(
        self,
        routes: Iterable[BaseRoute],
        public: Iterable[str] = (),
        bodiless: Iterable[str] = (),
        with_images: Iterable[str] = (),
    ) -> None:
        self._fixed: set[str] = set()
        self._patterns: list[Route] = []
        self._dialects: dict[str, Dialect] = {}
        self._roots: dict[str, Dialect] = {}
        self._public, self._bodiless = frozenset(public), frozenset(bodiless)
        self._with_images = frozenset(with_images)
        self._public_folders = tuple(path for path in self._public if path.endswith("/") and path != "/")
        for route in routes:
            if not isinstance(route, Route):
                raise TypeError(f"{route!r} is not a plain route, so its access rules are unknown")
            if route.param_convertors:
                self._patterns.append(route)
            else:
                self._fixed.add(route.path)
            if isinstance(dialect := getattr(route, "dialect", None), Dialect):
                self._dialects[route.path] = dialect
                if dialect.root is not None:
                    self._roots[dialect.root] = dialect

    def find(self, path: str, raw_path: bytes) -> str | None:
        """The route's path, such as `/v1/models/{name}`.

        path: decoded; raw_path: as the client sent it.
        """
        if path in self._fixed:
            return path if raw_path == path.encode() else None
        for route in self._patterns:
            # The part before the first parameter must be spelled out: an encoded slash is not a separator.
            prefix = route.path.partition("{")[0].encode()
            if raw_path.startswith(prefix) and route.path_regex.match(path):
                return route.path
        return None

    def is_public(self, method: str, route: str | None) -> bool:
        """True if the route needs no key. Only reading is free: TGI's `POST /` beside the page at `/` is not."""
        is_listed = route is not None and (route in self._public or route.startswith(self._public_folders))
        return is_listed and method in ("GET", "HEAD")

    def reads_body(self, route: str) -> bool:
        """True if a body of this route is read before it answers."""
        return route not in self._bodiless

    def takes_images(self, route: str) -> bool:
        """True if a body of this route may hold images, which are large."""
        return route in self._with_images

    def dialect(self, path: str) -> Dialect:
        """The dialect of a path, known or not. A path below one that has its own dialect speaks the same."""
        if (dialect := self._dialects.get(path)) is not None:
            return dialect
        below = [dialect for known, dialect in self._dialects.items() if known != "/" and path.startswith(f"{known}/")]
        below += [dialect for root, dialect in self._roots.items() if path.startswith(root)]
        return below[0] if below else DEFAULT_DIALECT
