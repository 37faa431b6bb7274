"""`/`, `/dashboard` and `/docs`: the web pages and their files, with headers that forbid content from other sites.

The pages contain no user data and need no API key. The requests that they send do need one.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)
PUBLIC_PATHS = ("/", "/dashboard", "/docs", "/web/")

mimetypes.add_type("text/javascript", ".mjs")
mimetypes.add_type("text/javascript", ".js")  # Python before 3.12 has a different type
_FILES = StaticFiles(directory=Path(__file__).parents[1] / "web")
# No inline code and nothing from other origins (Content Security Policy Level 3): a model's answer stays text even if
# the page's own code has a bug.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def get_chat_page(request: Request) -> Response:
    """Return the chat page."""
    return await _respond(request, "chat.html")


@router.get("/dashboard")
async def get_dashboard_page(request: Request) -> Response:
    """Return the dashboard page."""
    return await _respond(request, "dashboard.html")


@router.get("/docs")
async def get_api_page(request: Request) -> Response:
    """Return the page that shows `/openapi.json`."""
    return await _respond(request, "docs.html")


@router.get("/web/vendor/{name}")
async def get_vendored_file(request: Request, name: str) -> Response:
    """Return a script of a library that the pages use, or its licence."""
    return await _respond(request, f"vendor/{name}")


@router.get("/web/{name}")
async def get_web_file(request: Request, name: str) -> Response:
    """Return a style sheet, script or picture used by the pages."""
    return await _respond(request, name)


async def _respond(request: Request, name: str) -> Response:
    """Return the file, or 304 if the browser already has it."""
    response = await _FILES.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response
