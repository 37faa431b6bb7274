"""`/version`: the version of Octavo."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from octavo import __version__

router = APIRouter(tags=["server"])


class Version(BaseModel):
    version: str


@router.get("/version")
async def get_version() -> Version:
    """The version of the server."""
    return Version(version=__version__)
