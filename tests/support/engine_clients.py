"""Engine clients for tests: started, awaited and closed, with the actions that tests need."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from octavo.batch import Float32
from octavo.config import EngineConfig
from octavo.core.process_client import ProcessClient
from octavo.engine.client import AnswerStream, EngineClient, EngineState
from octavo.generation_request import GenerationRequest, Params, Pooling, PoolingParams
from octavo.outputs import OutputDelta, PoolingOutput
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams
from tests.support.waiting import wait_until_async

SOON_S = 10.0  # on a machine with other work; engines that nobody ends give up after 30
# Runs until it is ended: the tiny model of tests/core never says that it is done.
ENDLESS = SamplingParams(max_tokens=100_000, temperature=1.0, seed=1, ignore_eos=True, detokenize=False)


@contextlib.asynccontextmanager
async def engine_process(config: EngineConfig, stall_timeout_s: float = 30.0) -> AsyncIterator[ProcessClient]:
    """Start a client with an engine in another process, and wait until it is ready."""
    client = ProcessClient(config, stall_timeout_s=stall_timeout_s)
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def engine_here(config: EngineConfig) -> AsyncIterator[ProcessClient]:
    """Start a client with an engine in this process, and wait until it is ready."""
    client = ProcessClient(config, in_thread=True)
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


def request(token_ids: list[int], params: Params | None = None, **options: Any) -> GenerationRequest:
    """Make a request with ENDLESS, or with these params."""
    return GenerationRequest(prompt=Prompt(token_ids), params=params or ENDLESS, **options)


async def embed(client: EngineClient, prompts: list[list[int]], pooling: Pooling) -> list[Float32]:
    """Return the vectors of prompts submitted at the same time. All requests end at the first error."""

    async def one(token_ids: list[int]) -> Float32:
        stream = await client.generate(request(token_ids, PoolingParams(pooling=pooling)))
        try:
            (output,) = [item async for item in stream]
        finally:
            await stream.aclose()
        assert isinstance(output, PoolingOutput)
        assert output.num_prompt_tokens == len(token_ids)
        return output.vector

    tasks = [asyncio.create_task(one(token_ids)) for token_ids in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def collect(stream: AnswerStream) -> list[OutputDelta]:
    """Return all outputs up to the end."""
    return [output async for output in stream]


def tokens(outputs: list[OutputDelta], index: int = 0) -> list[int]:
    """Return the joined tokens of one choice."""
    return [
        token_id
        for output in outputs
        for choice in output.outputs
        if choice.index == index
        for token_id in choice.token_ids
    ]


async def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for a condition, and return how long it took. Fails after `seconds`."""
    start = time.monotonic()
    await wait_until_async(condition, seconds=seconds)
    return time.monotonic() - start


async def wait_until_idle(client: EngineClient) -> None:
    """Wait until no request runs or holds a block."""

    async def is_idle() -> bool:
        now = await client.metrics()
        return not now.num_running and not now.num_used_blocks

    await wait_until_async(is_idle, seconds=SOON_S)


async def wait_for_state(client: ProcessClient, state: EngineState, seconds: float) -> float:
    """Wait until the client is in a state, and return how long it took."""
    return await wait_until(lambda: client.status().state is state, seconds)
