"""Finds the route of a request before any of its content is trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Route


class RouteTable:
    """The paths of an application. Only the exact spelling of a route matches."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._fixed: set[str] = set()
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for route in routes:
            if not isinstance(route, Route):
                raise TypeError(f"{route!r} is no plain route, so nobody knows who may call it")
            if "{" in route.path:
                self._patterns.append((route.path_regex, route.path))
            else:
                self._fixed.add(route.path)

    def find(self, path: str, raw_path: bytes) -> str | None:
        """The route's path, such as `/v1/models/{name}`. path: decoded; raw_path: as the client sent it."""
        if path in self._fixed:
            return path if raw_path == path.encode() else None
        for pattern, template in self._patterns:
            # The part before the first parameter must be spelled out: an encoded slash is no separator.
            prefix = template.partition("{")[0].encode()
            if raw_path.startswith(prefix) and pattern.match(path):
                return template
        return None
