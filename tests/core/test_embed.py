"""Embeddings of an engine in a process and in a thread: the same vectors and errors, nothing left running."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.core.process_client import ProcessClient
from octavo.engine.client import EngineClient
from octavo.errors import UsageError
from octavo.generation_request import Pooling
from tests.support.engine_clients import embed, wait_until

PROMPTS = [[0, 2, 3], [2] * 100, [3, 4, 5, 2]]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_both_give_the_same_vectors(tiny_config: EngineConfig, pooling: Pooling) -> None:
    async def vectors(in_thread: bool) -> list[np.ndarray]:
        client = ProcessClient(tiny_config, in_thread=in_thread)
        try:
            await client.wait_ready()
            result = await embed(client, PROMPTS, pooling)
            with pytest.raises(UsageError) as caught:
                await embed(client, [[0], [1 << 20]], "mean")
            assert (caught.value.param, caught.value.code) == ("prompt", "token_out_of_range")
            assert all(vector.shape == (client.info.hidden_size,) for vector in result)
            return result
        finally:
            await client.close()

    one, other = asyncio.run(vectors(True)), asyncio.run(vectors(False))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({vector.tobytes() for vector in one}) == len(PROMPTS)


def texts_in(client: EngineClient) -> tuple[int, int]:
    """Running and waiting ones."""
    metrics = client.status().metrics
    return metrics.num_embedding, metrics.num_embedding_waiting


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_cancelled_call_leaves_no_work_and_no_blocks(tiny_config: EngineConfig, in_thread: bool) -> None:
    async def run() -> None:
        client = ProcessClient(tiny_config, in_thread=in_thread)
        try:
            await client.wait_ready()
            call = asyncio.ensure_future(embed(client, [[2] * 100_000] * 4, "mean"))
            await wait_until(lambda: client.status().metrics.num_used_blocks > 0, 10)
            await wait_until(lambda: sum(texts_in(client)) == 4, 10)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await wait_until(lambda: client.status().metrics.num_used_blocks == 0, 10)
            assert texts_in(client) == (0, 0)
            assert len((await embed(client, [[2]], "last"))[0]) == client.info.hidden_size
        finally:
            await client.close()

    asyncio.run(run())
