"""`/sleep`, `/wake_up` and `/is_sleeping`, as vLLM has them: the memory of models that nobody uses is given back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from octavo.server.state import state_of

router = APIRouter(tags=["server"])


class SleepStatus(BaseModel):
    """is_sleeping: no model is in memory; the next request loads its own."""

    is_sleeping: bool


@router.post("/sleep")
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 2) -> SleepStatus:  # noqa: ARG001
    """Unloads all models once their requests are finished, and answers when their memory is free.

    level: 1 and 2 do the same: a model's files stay in the system's file cache as long as nobody needs the memory.
    """
    sleeper = state_of(request).sleeper
    await sleeper.sleep()
    return SleepStatus(is_sleeping=sleeper.is_sleeping)


@router.post("/wake_up")
async def wake_up(request: Request) -> SleepStatus:
    """Loads the first model; answers when it is ready."""
    sleeper = state_of(request).sleeper
    await sleeper.wake_up()
    return SleepStatus(is_sleeping=sleeper.is_sleeping)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> SleepStatus:
    """True while no model is in memory."""
    return SleepStatus(is_sleeping=state_of(request).sleeper.is_sleeping)
