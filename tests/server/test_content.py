"""The parts of messages in every protocol: kept in their order, joined for templates, and refused in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.server.generation.content import ImagePlan, Media, MessageContent, PlainText, in_a_row, joined, plain
from octavo.server.protocols.anthropic.request import MessagesRequest
from octavo.server.protocols.ollama.request import ChatRequest, GenerateRequest
from octavo.server.protocols.openai.chat_request import ChatCompletionRequest
from octavo.server.protocols.responses.request import ResponsesRequest
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script, fake_model
from tests.support.scripted_server import ScriptedServer, scripted_server, with_template

PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    families = ("openai", "anthropic", "responses", "ollama", "llama_cpp", "tokenize")
    with scripted_server(with_template(smollm2_tokenizer, PLAIN), *families) as running:
        running.script = Script(["Hello"])
        yield running


def openai(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def item(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


A, B = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
TYPE = "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("model", "body", "content"),
    [
        (ChatCompletionRequest, openai(A, IMAGE_URL, B), (PlainText("a"), Media("image", TYPE), PlainText("b", "\n"))),
        (
            MessagesRequest,
            {"max_tokens": 1, **openai(A, IMAGE_BLOCK, B)},
            (PlainText("a"), Media("image", TYPE), PlainText("b", "\n")),
        ),
        (
            ResponsesRequest,
            item({"type": "input_text", "text": "a"}, INPUT_IMAGE, {"type": "input_text", "text": "b"}),
            (PlainText("a"), Media("image", "input[0].content[1].type"), PlainText("b")),
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "a", "images": ["x", "y"]}]},
            (Media("image", "messages[0].images[0]"), Media("image", "messages[0].images[1]"), PlainText("a")),
        ),
        (GenerateRequest, {"prompt": "a", "images": ["x"]}, (Media("image", "images[0]"), PlainText("a"))),
    ],
)
def test_a_parsed_message_keeps_its_parts_in_their_order(model: Any, body: Any, content: MessageContent) -> None:
    assert model.model_validate(body).to_spec("").messages[0]["content"] == content


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/v1/chat/completions", openai(A, B), "[user|a\nb]"),
        ("/v1/chat/completions", openai({**A, "text": ""}, B), "[user|\nb]"),
        ("/v1/messages", {"max_tokens": 9, **openai(A, B)}, "[user|a\nb]"),
        ("/v1/messages", {"max_tokens": 9, **openai({**A, "text": ""}, B)}, "[user|b]"),
        ("/v1/messages", {"max_tokens": 9, **openai(A), "system": [{**A, "text": ""}, B]}, "[system|\nb][user|a]"),
        (
            "/v1/responses",
            {
                "instructions": "s",
                "input": [
                    {"role": "system", "content": "t"},
                    {"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]},
                    {"role": "assistant", "content": [{"type": "output_text", "text": text} for text in "cd"]},
                    {"role": "assistant", "content": "e"},
                    {"role": "user", "content": "f"},
                ],
            },
            "[system|s\n\nt][user|ab][assistant|cde][user|f]",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "system"}, {"role": "user", "content": "a"}], "stream": False},
            "[system|][user|a]",
        ),
    ],
)
def test_templates_get_one_string(server: ScriptedServer, path: str, body: dict[str, Any], prompt: str) -> None:
    assert server.post(path, body).status_code == 200
    request = server.last_request
    assert server.client.tokenizer.decode(request.prompt.token_ids) == prompt


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", openai(A, IMAGE_URL), f"{TYPE} is an image"),
        ("/v1/chat/completions", openai(A, {"type": "image_embeds", "image_embeds": "x"}), f"{TYPE} is an image"),
        ("/v1/chat/completions", openai(A, {"type": "input_audio"}), f"{TYPE} is audio"),
        ("/v1/chat/completions", openai(A, {"type": "input_video"}), f"{TYPE} is a video"),
        ("/v1/chat/completions", openai(A, {"type": "file"}), f"{TYPE} is a file"),
        ("/apply-template", openai(A, IMAGE_URL), f"{TYPE} is an image"),
        ("/tokenize", openai(A, IMAGE_URL), f"{TYPE} is an image"),
        ("/v1/messages", {"max_tokens": 9, **openai(A, IMAGE_BLOCK)}, f"{TYPE} is an image"),
        ("/v1/messages", {"max_tokens": 9, **openai(A, {"type": "document"})}, f"{TYPE} is a file"),
        ("/v1/messages/count_tokens", openai(A, IMAGE_BLOCK), f"{TYPE} is an image"),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [{**RESULT, "content": [A, IMAGE_BLOCK]}]},
                ],
            },
            "messages[1].content[0].content[1].type is an image",
        ),
        ("/v1/responses", item(INPUT_IMAGE), "input[0].content[0].type is an image"),
        ("/v1/responses", {"store": True, **item({"type": "input_file"})}, "input[0].content[0].type is a file"),
        (
            "/v1/responses",
            {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}]},
            "input[1].output[0].type is an image",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            "messages[0].images[0] is an image",
        ),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images[0] is an image"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": ["aGk="]}, "images[0] is an image"),
        (
            "/completion",
            {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}},
            "prompt.multimodal_data[0] is an image",
        ),
    ],
)
def test_what_no_model_reads_is_refused_by_name(
    server: ScriptedServer, path: str, body: dict[str, Any], where: str
) -> None:
    before = len(server.client.requests)
    answer = server.post(path, body)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (answer.status_code, message) == (400, f"{where}, but fake reads text only")
    if isinstance(error, dict) and "param" in error:
        assert (error["param"], error["code"]) == (where.split(" is ")[0], "unsupported_value")
    assert len(server.client.requests) == before


def test_an_image_belongs_to_the_user(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [IMAGE_BLOCK]}]
    error = server.post("/v1/messages", {"max_tokens": 9, "messages": messages}).json()["error"]
    assert error["message"] == "messages[1].content[0].type belongs in a message of the user, not of the assistant"


def test_contents_in_a_row(smollm2_tokenizer: Tokenizer) -> None:
    image = Media("image", "here")
    assert joined((), plain("a"), "-") == plain("a")
    assert joined(plain(""), plain("a"), "-") == plain("a")
    assert joined(plain("a"), (), "-") == plain("a")
    assert joined((image,), plain("a"), "-") == (image, PlainText("a", "-"))
    assert joined(in_a_row(plain("") + plain(""), "\n"), plain("a"), "-")[-1] == PlainText("a", "-")
    plan = ImagePlan(fake_model(smollm2_tokenizer))
    assert plan.text(in_a_row(plain("a") + plain("b") + plain(""), "-")) == "a-b-"
    with pytest.raises(UsageError, match="here is an image, but fake reads text only"):
        plan.text((*plain("a"), image))


PARTS_ONLY = "{% for m in messages %}[{{ m.role }}|{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
NAMED = TemplateSet(PARTS_ONLY, {"tool_use": "<tool_call>{{ tools | length }} tools" + PLAIN})


def test_templates_get_their_form_of_content_and_their_tools(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = dataclasses.replace(smollm2_tokenizer, chat_template=NAMED)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with scripted_server(tokenizer, "llama_cpp") as server:
        rendered = {}
        for name, body in {"text": {"messages": [{"role": "user", "content": "a"}]}, "parts": openai(A, B)}.items():
            rendered[name] = server.post("/apply-template", body).json()["prompt"]
            rendered[f"{name}, tools"] = server.post("/apply-template", {**body, "tools": [tool]}).json()["prompt"]
    assert rendered == {
        "text": "[user|a]",
        "text, tools": "<tool_call>1 tools[user|a]",
        "parts": "[user|a\nb]",
        "parts, tools": "<tool_call>1 tools[user|a\nb]",
    }
