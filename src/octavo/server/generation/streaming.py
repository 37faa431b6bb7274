"""Streams that hold something until they are closed, whether they were ever read or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any


class ChunkStream(AsyncGenerator[bytes, None]):
    """`chunks`, with what must be given back when it ends: the running request, the model in use.

    A generator that was never started does not run its `finally`; a client can leave before it is.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], resources: AsyncExitStack) -> None:
        self._chunks = chunks
        self._resources = resources

    async def __anext__(self) -> bytes:
        return await self._chunks.__anext__()

    async def asend(self, value: None) -> bytes:
        return await self._chunks.asend(value)

    async def athrow(self, *details: Any) -> bytes:
        return await self._chunks.athrow(*details)

    async def aclose(self) -> None:
        """Gives everything back. May be called twice."""
        try:
            await self._chunks.aclose()
        finally:
            await self._resources.aclose()
