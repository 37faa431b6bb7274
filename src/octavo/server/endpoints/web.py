"""`/` and `/dashboard`: the web pages. They contain no user's data and need no key; their requests do."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.errors import ApiError
from octavo.server.http.web_files import respond, web_files

router = APIRouter(include_in_schema=False)
PUBLIC_PATHS = ("/", "/dashboard", "/web/")


@router.get("/")
async def get_chat_page(request: Request) -> Response:
    """The chat page."""
    return respond(request, web_files()["chat.html"])


@router.get("/dashboard")
async def get_dashboard_page(request: Request) -> Response:
    """The dashboard."""
    return respond(request, web_files()["dashboard.html"])


@router.get("/web/{name}")
async def get_web_file(request: Request, name: str) -> Response:
    """A style sheet, script or picture of the pages."""
    file = web_files().get(name)
    if file is None:
        raise ApiError(404, "there is no such file")
    return respond(request, file)
