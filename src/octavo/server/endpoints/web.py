"""`/` and `/dashboard`: the web pages and their files, with headers that allow nothing from elsewhere.

They contain no user's data and need no key; their requests do.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.errors import ApiError

router = APIRouter(include_in_schema=False)
PUBLIC_PATHS = ("/", "/dashboard", "/web/")

_DIRECTORY = Path(__file__).parents[1] / "web"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline and nothing from other origins (Content Security Policy Level 3): a model's answer stays text even if
# the page's own code had a fault.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
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
    """The chat page."""
    return _respond(request, "chat.html")


@router.get("/dashboard")
async def get_dashboard_page(request: Request) -> Response:
    """The dashboard."""
    return _respond(request, "dashboard.html")


@router.get("/web/{name}")
async def get_web_file(request: Request, name: str) -> Response:
    """A style sheet, script or picture of the pages."""
    return _respond(request, name)


def _respond(request: Request, name: str) -> Response:
    """The file, or 304 if the browser has it."""
    if name not in _files():
        raise ApiError(404, "there is no such file")
    body, etag = _files()[name]
    headers = {**_HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "Content-Type": _TYPES[Path(name).suffix]})


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Content and ETag of every file that browsers may load, by its name."""
    contents = {path.name: path.read_bytes() for path in _DIRECTORY.iterdir() if path.suffix in _TYPES}
    return {name: (body, f'"{hashlib.sha256(body).hexdigest()[:16]}"') for name, body in contents.items()}
