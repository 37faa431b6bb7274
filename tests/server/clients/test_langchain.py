"""LangChain's `ChatOpenAI` and LangChain's own standard tests for chat models, against a real server.

The standard tests know no server that is smaller than GPT. What they demand of the model's wit is met here with the
client's own parameters (one call at a time, a penalty on repetition, a bias towards the end of a string), and what
is left of it is marked by name; everything else must pass. The `slow` class runs them with a model that can choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, scripted_server, with_template
from tests.support.server import RunningServer, running_server

STRING_ENDS = ('"', '."', '?"', '",', '"}', ' "', '!"')
CANNOT_CHOOSE = "a model of 135M parameters does not decide by itself to call a tool"

ASYNCIO = pytest.mark.asyncio(loop_scope="class")
# Of the tests themselves: one mark for all of them, a deprecated kind of model, two clients' views of one field.
QUIET = pytest.mark.filterwarnings(
    "ignore:.*is not an async function",
    "ignore:Received a Pydantic BaseModel V1",
    "ignore:Pydantic serializer warnings",
)


class StandardTests(ChatModelIntegrationTests):
    """url, bias: set by a fixture before each class."""

    url: str
    name: str
    bias: dict[str, int]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "model": self.name,
            "temperature": 0,
            "max_tokens": 96,
            "max_retries": 0,
            "stream_usage": True,
            "frequency_penalty": 1.5,
            "logit_bias": self.bias,
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        """Answers that nobody reads are short."""
        changes = getattr(request, "param", None) or {}
        if not any(word in request.node.name for word in ("tool", "structured", "json", "agent")):
            changes = {"max_tokens": 16, **changes}
        return self.chat_model_class(**{**self.standard_chat_model_params, **self.chat_model_params, **changes})

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return self.name


@ASYNCIO
@QUIET
class TestStandard(StandardTests):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, server: RunningServer, smollm2_tokenizer: Tokenizer) -> None:
        tokens = [smollm2_tokenizer.encode(text, add_special_tokens=False) for text in STRING_ENDS]
        cls.url, cls.name = server.url, "smollm2"
        cls.bias = {str(ids[0]): 5 for ids in tokens if len(ids) == 1}

    @pytest.mark.xfail(reason=CANNOT_CHOOSE, strict=False)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)


@pytest.mark.slow
@ASYNCIO
@QUIET
class TestStandardWithAModelThatCanChoose(StandardTests):
    """All of them, the agent's loop included, without exception."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, qwen_1_5b_path: Path) -> Iterator[None]:
        with running_server(f"qwen={qwen_1_5b_path}", "--kv-cache-memory", "1GiB") as running:
            cls.url, cls.name, cls.bias = running.url, "qwen", {}
            yield

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """A mild penalty: without any, two cats say the same to each other until the answer is full."""
        return {**super().chat_model_params, "max_tokens": 256, "frequency_penalty": 0.6}


def test_streamed_calls_and_thinking_become_one_message(smollm2_tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    tokenizer = with_template(smollm2_tokenizer, THINKING_TEMPLATE)
    with scripted_server(tokenizer, "openai") as scripted:
        scripted.script = Script(["<think>Well", ".</think>", "Here: ", call[:40], call[40:]])
        model = ChatOpenAI(base_url=f"{scripted.url}/v1", api_key="none", model="fake", max_retries=0)  # type: ignore[arg-type]
        chunks = list(model.bind_tools([tool]).stream("1 + 2?"))
        message = chunks[0]
        for chunk in chunks[1:]:
            message = message + chunk
        whole = model.bind_tools([tool]).invoke("1 + 2?")
    assert isinstance(message, AIMessageChunk)
    assert [(made["name"], made["args"]) for made in message.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert [(made["name"], made["args"]) for made in whole.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert message.text.strip() == whole.text.strip() == "Here:"


def test_embeddings(server: RunningServer) -> None:
    client = OpenAIEmbeddings(
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model="smollm2",
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    cat, kitten = client.embed_documents(["A cat sat on the mat.", "A kitten sat on the mat."])
    car = client.embed_query("Quarterly revenue rose by 4 percent.")
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, car, strict=True))
