"""OpenAI's Agents SDK: tools, typed answers, sessions, streams and handoffs, by chat completions and by responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import CALL, call_of, turns
from tests.support.scripted_server import ScriptedServer

agents = pytest.importorskip("agents", reason="openai-agents is not installed", exc_type=ImportError)
agents.set_tracing_disabled(True)

MODELS = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")


class Answer(BaseModel):
    total: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def agent(fake: ScriptedServer, model: str, name: str, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0)
    return agents.Agent(name=name, model=getattr(agents, model)("fake", openai_client=client), **fields)


def adder(fake: ScriptedServer, model: str, **fields: Any) -> Any:
    return agent(fake, model, "Adder", instructions="Be brief.", tools=[agents.function_tool(add)], **fields)


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_in_a_session_of_several_turns(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, model: str) -> None:
    fake.script = turns(smollm2_tokenizer, CALL, "It is 5.")

    async def ask() -> list[str]:
        session = agents.SQLiteSession("one")
        questions = ("What is 2 + 3?", "Are you sure?", "Really?")
        return [(await agents.Runner.run(adder(fake, model), text, session=session)).final_output for text in questions]

    assert asyncio.run(ask()) == ["It is 5."] * 3


@pytest.mark.parametrize("model", MODELS)
def test_streams_and_typed_answers_after_a_tool(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, model: str) -> None:
    async def ask() -> tuple[str, Answer]:
        fake.script = turns(smollm2_tokenizer, CALL, "It is 5.")
        streamed = agents.Runner.run_streamed(adder(fake, model), "What is 2 + 3?")
        names = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        assert {"tool_called", "tool_output", "message_output_created"} <= set(names)
        fake.script = turns(smollm2_tokenizer, CALL, '{"total": 5}')
        typed = await agents.Runner.run(adder(fake, model, output_type=Answer), "What is 2 + 3?")
        return streamed.final_output, typed.final_output

    assert asyncio.run(ask()) == ("It is 5.", Answer(total=5))


@pytest.mark.parametrize("model", MODELS)
def test_a_handoff(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, model: str) -> None:
    fake.script = turns(smollm2_tokenizer, call_of("transfer_to_adder", "{}"), "It is 5.")
    triage = agent(fake, model, "Triage", instructions="Hand over.", handoffs=[adder(fake, model)])
    result = asyncio.run(agents.Runner.run(triage, "What is 2 + 3?"))
    assert (result.final_output, result.last_agent.name) == ("It is 5.", "Adder")
