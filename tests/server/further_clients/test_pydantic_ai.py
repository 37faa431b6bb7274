"""Pydantic AI: agents with tools and typed answers over several turns, by chat completions and by responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import CALL, call_of, turns
from tests.support.scripted_server import ScriptedServer

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed")

MODELS = ("OpenAIChatModel", "OpenAIResponsesModel")


class Answer(BaseModel):
    total: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def agent(fake: ScriptedServer, model: str, **fields: Any) -> Any:
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{fake.url}/v1", api_key="none")
    return pydantic_ai.Agent(getattr(openai, model)("fake", provider=provider), **fields)


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_over_several_turns(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, model: str) -> None:
    fake.script = turns(smollm2_tokenizer, CALL, "It is 5.")
    adder = agent(fake, model, tools=[add], system_prompt="Be brief.")
    result = adder.run_sync("What is 2 + 3?")
    for _ in range(2):
        assert result.output == "It is 5."
        result = adder.run_sync("Are you sure?", message_history=result.all_messages())
    assert result.usage.output_tokens > 0 if not callable(result.usage) else result.usage().output_tokens > 0


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_after_a_tool(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, model: str) -> None:
    fake.script = turns(smollm2_tokenizer, CALL, "It is 5.")

    async def ask() -> str:
        async with agent(fake, model, tools=[add]).run_stream("What is 2 + 3?") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(ask()) == "It is 5."


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_typed_answers(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, model: str, kind: str) -> None:
    last = call_of("final_result", '{"total": 5}') if kind == "ToolOutput" else '{"total": 5}'
    fake.script = turns(smollm2_tokenizer, CALL, last)
    typed = agent(fake, model, tools=[add], output_type=getattr(pydantic_ai, kind)(Answer))
    assert typed.run_sync("What is 2 + 3?").output == Answer(total=5)
