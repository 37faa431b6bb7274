"""The ASGI application: every endpoint module, and one shape of error for whatever goes wrong."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import octavo.server.endpoints
from octavo import __version__
from octavo.errors import OctavoError
from octavo.server.disconnect import ClientGoneError
from octavo.server.errors import ApiError, bad_request, to_api_error
from octavo.server.json_body import quote
from octavo.server.sse import OpenStreams
from octavo.server.validation import to_bad_request

if TYPE_CHECKING:
    from octavo.server.state import ServerState

CLIENT_CLOSED_REQUEST = 499  # for the log; nobody receives it

logger = logging.getLogger(__name__)


def create_app(state: ServerState) -> FastAPI:
    """The application that serves `state`, with the routes of every module in `server/endpoints`."""
    app = FastAPI(title="Octavo", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.server = state
    app.state.keep_alive_s = state.config.keep_alive
    app.state.open_streams = OpenStreams()
    for module in endpoint_modules():
        app.include_router(module.router)
    add_error_handlers(app)
    return app


def endpoint_modules() -> Iterator[ModuleType]:
    """Every module of `octavo.server.endpoints`, by name."""
    package = octavo.server.endpoints
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        yield importlib.import_module(f"{package.__name__}.{info.name}")


def add_error_handlers(app: FastAPI) -> None:
    """Whatever goes wrong in `app` becomes the envelope."""
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(ApiError, _on_known)
    app.add_exception_handler(OctavoError, _on_known)


def error_response(error: ApiError) -> JSONResponse:
    """The envelope with its status and headers."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _on_known(request: Request, error: Exception) -> Response:
    request_id: str = getattr(request.state, "request_id", "")
    api_error = to_api_error(error, request_id)
    if api_error.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    return error_response(api_error)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(to_bad_request(error.errors(), error.body))


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(ApiError(404, f"Invalid URL ({request.method} {quote(request.url.path)[1:-1]})"))
    if error.status_code == 405:
        message = f"{request.method} is not supported here; use {(error.headers or {}).get('Allow')}"
        return error_response(ApiError(405, message, code="method_not_supported", headers=dict(error.headers or {})))
    if error.status_code == 400:
        return error_response(bad_request(str(error.detail)))
    return error_response(ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})))
