"""Hugging Face's smolagents: agents that call tools and agents that write code, over several steps and turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import CALL, call_of, turns
from tests.support.scripted_server import ScriptedServer, scripted_server

smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", max_model_len=16384) as running:
        yield running


def agent(fake: ScriptedServer, kind: str, **fields: Any) -> Any:
    class Adder(smolagents.Tool):  # type: ignore[name-defined,misc]
        name, description, output_type = "add", "Adds two numbers.", "integer"
        inputs = {name: {"type": "integer", "description": "a number"} for name in ("a", "b")}  # noqa: RUF012

        def forward(self, a: int, b: int) -> int:
            return a + b

    model = smolagents.OpenAIServerModel(model_id="fake", api_base=f"{fake.url}/v1", api_key="none")
    return getattr(smolagents, kind)(tools=[Adder()], model=model, verbosity_level=0, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_the_answer(fake: ScriptedServer, smollm2_tokenizer: Tokenizer, stream: bool) -> None:
    last = call_of("final_answer", '{"answer": "5"}')
    fake.script = turns(smollm2_tokenizer, CALL, last, result="Observation:\n5")
    assert agent(fake, "ToolCallingAgent", stream_outputs=stream).run("What is 2 + 3?", max_steps=3) == "5"


def test_code_over_several_turns(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    coder = agent(fake, "CodeAgent")
    fake.script = turns(smollm2_tokenizer, "Thought: I add.\n<code>\nfinal_answer(add(2, 3))\n</code>")
    assert coder.run("What is 2 + 3?", max_steps=2) == 5
    assert coder.run("And again?", reset=False, max_steps=2) == 5


def test_code_in_a_schema(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    fake.script = turns(smollm2_tokenizer, '{"thought": "I add.", "code": "final_answer(add(2, 3))"}')
    coder = agent(fake, "CodeAgent", use_structured_outputs_internally=True)
    assert coder.run("What is 2 + 3?", max_steps=2) == 5
    assert fake.last_request.params.structured_outputs is not None
