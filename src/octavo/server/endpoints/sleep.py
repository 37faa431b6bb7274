"""`/sleep`, `/wake_up` and `/is_sleeping`, as in vLLM: free the memory of unused models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from octavo.server.server_state import state_of

router = APIRouter(tags=["Server"])


class SleepStatus(BaseModel):
    """The server's sleep state.

    is_sleeping: True if no model is ready; the next request wakes or loads its model
    """

    is_sleeping: bool


@router.post("/sleep")
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> SleepStatus:
    """Put all models to sleep once their requests have finished, and answer when their memory is free.

    level: 1 keeps the weights in main memory and frees GPU memory, 2 frees everything. Without a GPU, both unload the
    models.
    """
    sleeper = state_of(request).sleeper
    await sleeper.sleep(level)
    return SleepStatus(is_sleeping=sleeper.is_sleeping)


@router.post("/wake_up")
async def wake_up(request: Request) -> SleepStatus:
    """Load the first model. Answers when it is ready."""
    sleeper = state_of(request).sleeper
    await sleeper.wake_up()
    return SleepStatus(is_sleeping=sleeper.is_sleeping)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> SleepStatus:
    """Return whether no model is ready."""
    return SleepStatus(is_sleeping=state_of(request).sleeper.is_sleeping)
