"""LlamaIndex's `OpenAILike`, synchronous and not, against a real server."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import scripted_server
from tests.support.server import RunningServer

MESSAGES = [
    ChatMessage(role=MessageRole.SYSTEM, content="You answer briefly."),
    ChatMessage(role=MessageRole.USER, content="What is 2 + 2?"),
]
PROMPT = "One, two, three,"


@pytest.fixture(scope="module")
def model(server: RunningServer) -> OpenAILike:
    return connect(server.url, "smollm2")


def connect(url: str, name: str, *, is_chat_model: bool = True) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=is_chat_model,
        is_function_calling_model=True,
        temperature=0.0,
        max_tokens=12,
        max_retries=0,
        context_window=8192,
        timeout=60,
    )


def test_chat_whole_and_streamed(model: OpenAILike) -> None:
    whole = model.chat(MESSAGES)
    assert whole.message.role == MessageRole.ASSISTANT
    assert whole.message.content
    pieces = list(model.stream_chat(MESSAGES))
    assert "".join(piece.delta or "" for piece in pieces) == whole.message.content
    assert pieces[-1].message.content == whole.message.content


def test_complete_by_text_and_by_chat(model: OpenAILike, server: RunningServer) -> None:
    text = connect(server.url, "smollm2", is_chat_model=False)
    whole = text.complete(PROMPT)
    assert whole.text.startswith(" four")
    assert "".join(piece.delta or "" for piece in text.stream_complete(PROMPT)) == whole.text
    assert model.complete("What is 2 + 2?").text


def test_it_is_asynchronous_too(server: RunningServer) -> None:
    async def ask() -> None:
        chat, text = connect(server.url, "smollm2"), connect(server.url, "smollm2", is_chat_model=False)
        whole = await chat.achat(MESSAGES)
        streamed = [piece.delta or "" async for piece in await chat.astream_chat(MESSAGES)]
        assert "".join(streamed) == whole.message.content != ""
        completion = await text.acomplete(PROMPT)
        pieces = [piece.delta or "" async for piece in await text.astream_complete(PROMPT)]
        assert "".join(pieces) == completion.text != ""

    asyncio.run(ask())


def test_a_tool_that_must_be_called(server: RunningServer) -> None:
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    model = connect(server.url, "smollm2")
    model.max_tokens = 60
    answer = model.chat_with_tools(
        [FunctionTool.from_defaults(add)],
        user_msg="What is 2 + 3?",
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "add"
    assert all(isinstance(value, int) for value in call.tool_kwargs.values())


def test_a_call_and_its_result_go_back(smollm2_tokenizer: Tokenizer) -> None:
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    with scripted_server(smollm2_tokenizer, "openai") as scripted:
        scripted.script = Script([call])
        model = connect(scripted.url, "fake")
        model.max_tokens = 200
        question = ChatMessage(role=MessageRole.USER, content="What is 2 + 3?")
        answer = model.chat_with_tools([FunctionTool.from_defaults(add)], chat_history=[question])
        (made,) = model.get_tool_calls_from_response(answer)
        assert made.tool_kwargs == {"a": 2, "b": 3}
        result = ChatMessage(role=MessageRole.TOOL, content="5", additional_kwargs={"tool_call_id": made.tool_id})
        scripted.script = Script(["It is 5."])
        last = model.chat([question, answer.message, result])
        token_ids = scripted.last_request.prompt.token_ids
    assert last.message.content == "It is 5."
    assert "<tool_response>\n5\n</tool_response>" in smollm2_tokenizer.decode(token_ids, skip_special_tokens=False)
