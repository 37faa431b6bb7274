"""The files of the web pages: read once, and sent with headers that allow nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

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


@dataclass(frozen=True, slots=True)
class WebFile:
    body: bytes
    content_type: str
    etag: str


@cache
def web_files() -> dict[str, WebFile]:
    """Every file that browsers may load, by its name."""
    files = {}
    for path in sorted(_DIRECTORY.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            files[path.name] = WebFile(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return files


def respond(request: Request, file: WebFile) -> Response:
    """The file, or 304 if the browser has it."""
    headers = {**_HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers={**headers, "Content-Type": file.content_type})
