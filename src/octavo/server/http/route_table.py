"""The application's routes: the error format of each path's protocol, and the paths that need no key."""

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
    """A protocol's error format and id header.

    error_body: makes the body from an error and the request's id
    id_header: header for the request id besides x-request-id, in lower case
    root: the start of all the protocol's paths, known or not, unless another protocol claims the path
    """

    error_body: Callable[[ApiError, str], dict[str, Any]] = lambda error, _request_id: error.body()
    id_header: bytes | None = None
    root: str | None = None

    def id_headers(self, request_id: str) -> Headers:
        """Return the headers that give the client its request id."""
        names = [b"x-request-id"] if self.id_header is None else [b"x-request-id", self.id_header]
        return [(name, request_id.encode()) for name in names]

    def error_answer(self, error: ApiError, request_id: str) -> tuple[Headers, bytes]:
        """Return (headers, body) of the answer to a failed request, without `id_headers`."""
        body = json.dumps(self.error_body(error, request_id)).encode()
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
        return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers], body


DEFAULT_DIALECT = Dialect()


class RouteTable:
    """The paths of an application. A different spelling of a path is a different path.

    public: paths that may be read without a key. A path that ends in `/` includes everything below it.
    bodiless: paths that answer without reading a body
    with_images: paths whose bodies may contain images
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
        """Return the route's path, such as `/v1/models/{name}`.

        path: the decoded path
        raw_path: the path as the client sent it
        """
        if path in self._fixed:
            return path if raw_path == path.encode() else None
        for route in self._patterns:
            # The part before the first parameter must be literal, because an encoded slash is not a separator.
            prefix = route.path.partition("{")[0].encode()
            if raw_path.startswith(prefix) and route.path_regex.match(path):
                return route.path
        return None

    def is_public(self, method: str, route: str | None) -> bool:
        """Return True if the route needs no key for this method. Only GET and HEAD requests are public: the page at `/`
        needs no key, but TGI's `POST /` does.
        """
        is_listed = route is not None and (route in self._public or route.startswith(self._public_folders))
        return is_listed and method in ("GET", "HEAD")

    def reads_body(self, route: str) -> bool:
        """Return True if the route reads its body before it answers."""
        return route not in self._bodiless

    def takes_images(self, route: str) -> bool:
        """Return True if the route's body may contain images, which are large."""
        return route in self._with_images

    def dialect(self, path: str) -> Dialect:
        """Return the dialect of a path, known or not. Paths below a known path have the same dialect, unless they have
        their own.
        """
        if (dialect := self._dialects.get(path)) is not None:
            return dialect
        below = [dialect for known, dialect in self._dialects.items() if known != "/" and path.startswith(f"{known}/")]
        below += [dialect for root, dialect in self._roots.items() if path.startswith(root)]
        return below[0] if below else DEFAULT_DIALECT
