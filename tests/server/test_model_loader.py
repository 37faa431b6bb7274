"""The steps of loading a model before it is ready."""

from __future__ import annotations

import asyncio
import time

import pytest

from octavo.errors import EngineDeadError, UsageError
from octavo.server.models.model_loader import warm_up
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script, fake_model


def warmed(tokenizer: Tokenizer, script: Script) -> tuple[FakeClient, float]:
    """The client afterwards, and the seconds it took."""
    client = FakeClient(tokenizer, script)
    model = fake_model(tokenizer, client)

    async def main() -> float:
        await asyncio.to_thread(model.prompts.encode_chat, [{"role": "user", "content": "Hello"}])
        began = time.monotonic()
        await warm_up(model.prompts, client)
        await asyncio.sleep(0.01)  # what was cancelled ends
        return time.monotonic() - began

    try:
        return client, asyncio.run(main())
    finally:
        model.prompts.close()


def test_the_engine_makes_its_first_token_before_anybody_asks(smollm2_tokenizer: Tokenizer) -> None:
    client, _ = warmed(smollm2_tokenizer, Script(["Hello"]))
    [request] = client.requests
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (1, 1)
    assert not request.is_measured
    assert [stream.is_closed for stream in client.streams] == [True]


def test_it_is_not_waited_for(smollm2_tokenizer: Tokenizer) -> None:
    client, seconds = warmed(smollm2_tokenizer, Script([], never_ends=True))
    assert seconds < 10
    assert [stream.is_closed for stream in client.streams] == [True]


@pytest.mark.parametrize(
    "script", [Script(refusal=UsageError("it only embeds")), Script([], error=EngineDeadError("it fell"))]
)
def test_an_engine_that_cannot_keeps_nobody_from_asking(smollm2_tokenizer: Tokenizer, script: Script) -> None:
    warmed(smollm2_tokenizer, script)
