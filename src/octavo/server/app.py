"""The ASGI application: the routes of every protocol and of the server itself, all behind one guard."""

from __future__ import annotations

import importlib
import pkgutil
import secrets
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

import octavo.server.endpoints
import octavo.server.protocols
from octavo import __version__
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.http.access_log import record_of
from octavo.server.http.guard import Guard, RequestCounter
from octavo.server.http.json_body import to_bad_request
from octavo.server.http.route_table import RouteTable
from octavo.server.observability.tracing import trace_context
from octavo.server.openapi import describe

if TYPE_CHECKING:
    from octavo.server.server_state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """Make the application that serves `state`, with all routes."""
    app = build_app(
        state.config, route_modules(), state.metrics.http_request, state.batches.salt, lambda: state.models.may_see
    )
    if state.metrics.tracer is not None:
        app.add_middleware(trace_context)
    app.state.server = state
    return app


def build_app(
    config: ServerConfig,
    modules: Iterable[ModuleType],
    count: RequestCounter,
    salt: bytes | None = None,
    may_see: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Build an application with the routes of these modules.

    count: called with every answer
    salt: salt for the tenants' names, which are derived from API keys; a new one if None
    may_see: returns True if a model accepts images, or might once it is loaded
    """
    app = _Application(title="Octavo", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.keep_alive_s = config.keep_alive
    app.state.open_requests = set()
    public: set[str] = set() if config.protect_health else {"/health", "/health/live", "/health/ready"}
    bodiless: set[str] = set()
    with_images: set[str] = set()
    for module in modules:
        # One flat list, because the guard must know every route.
        app.router.routes.extend(module.router.routes)
        public.update(getattr(module, "PUBLIC_PATHS", ()))
        bodiless.update(getattr(module, "BODILESS_PATHS", ()))
        with_images.update(getattr(module, "IMAGE_PATHS", ()))
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    routes = app.state.routes = RouteTable(app.routes, public, bodiless, with_images)
    salt = salt or secrets.token_bytes(16)
    app.add_middleware(Guard, config=config, routes=routes, count=count, salt=salt, may_see=may_see)
    return app


def route_modules() -> Iterator[ModuleType]:
    """Yield every module that has a `router`: the modules in the folders of `octavo.server.protocols` by name, then the
    modules of `octavo.server.endpoints`.
    """
    protocols, endpoints = octavo.server.protocols, octavo.server.endpoints
    folders = [importlib.import_module(name) for name, is_folder in _submodules(protocols) if is_folder]
    for package in (*folders, endpoints):
        for name, _ in _submodules(package):
            if hasattr(module := importlib.import_module(name), "router"):
                yield module


def _submodules(package: ModuleType) -> list[tuple[str, bool]]:
    """Return (name, whether it is a folder) for everything in the package, sorted by name."""
    return sorted((f"{package.__name__}.{info.name}", info.ispkg) for info in pkgutil.iter_modules(package.__path__))


class _Application(FastAPI):
    """FastAPI with our own API description at `/openapi.json`."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(self)
        return self.openapi_schema


# starlette's and FastAPI's errors are raised as our ApiError, and the guard answers with it.


async def _on_invalid(_request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, RequestValidationError)
    raise to_bad_request(error.errors(), error.body) from None


async def _on_http_exception(request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = headers["Allow"] = headers.get("Allow", "").replace("GET", "GET, HEAD")
        message = f"{record_of(request).method} is not supported here; use {allowed}"
        raise ApiError(405, message, code="method_not_supported", headers=headers) from None
    raise ApiError(error.status_code, str(error.detail), headers=headers) from None
