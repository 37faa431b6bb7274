"""Wrong prompts and hostile templates, with contexts and chat templates that SmolLM2 does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.realistic_tools import realistic_tools
from tests.support.scripted_server import ScriptedServer, scripted_server, with_template

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONTEXT = 32
USER = {"role": "user", "content": "Hi"}
INVALID = "invalid_request_error"


@pytest.fixture(scope="module")
def short(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", max_model_len=CONTEXT) as server:
        yield server


def error_of(answer: httpx.Response) -> tuple[int, str, str | None, str | None]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["type"], error["param"], error["code"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_at_the_end_of_the_context(short: ScriptedServer, stream: bool) -> None:
    """One token less than the context leaves room for one token. The status is the same for a stream."""
    short.script = Script([" a"], finish_reason="length")
    body = {"prompt": [5] * (CONTEXT - 1), "stream": stream}
    answer = short.post(COMPLETIONS, body)
    assert answer.status_code == 200
    assert '"finish_reason":"length"' in answer.text.replace(" ", "")
    assert short.last_request.params.max_tokens == 1
    for length in (CONTEXT, CONTEXT + 1):
        refused = short.post(COMPLETIONS, {**body, "prompt": [5] * length})
        assert error_of(refused) == (400, INVALID, "prompt", "context_length_exceeded")
    assert short.post(COMPLETIONS, {**body, "max_tokens": 2}).status_code == 200
    assert short.last_request.params.max_tokens == 1


TEMPLATES: dict[str, tuple[str, tuple[int, str, str | None, str | None]]] = {
    "nothing rendered": ("{# nothing #}", (400, INVALID, "messages", "invalid_value")),
    "attributes of Python objects": ("{{ messages.__class__.__mro__ }}", (500, "server_error", None, "internal_error")),
    "globals of lipsum": ("{{ lipsum.__globals__['os'].popen('id') }}", (500, "server_error", None, "internal_error")),
    "globals of cycler": ("{{ cycler.__init__.__globals__ }}", (500, "server_error", None, "internal_error")),
    "globals of self": ("{{ self.__init__.__globals__ }}", (500, "server_error", None, "internal_error")),
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        (500, "server_error", None, "internal_error"),
    ),
    "huge range": ("{% for a in range(10**9) %}a{% endfor %}", (500, "server_error", None, "internal_error")),
    "huge string": ("{{ 'a' * 10**9 }}", (500, "server_error", None, "internal_error")),
    "exception of the template": (
        "{{ raise_exception('roles must alternate') }}",
        (400, INVALID, "messages", "invalid_value"),
    ),
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates(
    smollm2_tokenizer: Tokenizer, template: str, expected: tuple[int, str, str | None, str | None]
) -> None:
    with scripted_server(with_template(smollm2_tokenizer, template), "openai") as server:
        server.script = Script(["a"])
        for stream in (False, True):
            answer = server.post(CHAT, {"messages": [USER], "stream": stream})
            assert error_of(answer) == expected, answer.text
            assert ("roles must alternate" in answer.text) == ("roles" in template)
            assert "Traceback" not in answer.text
        assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 200


def test_sixty_tools(smollm2_tokenizer: Tokenizer) -> None:
    """Many tools, as agents send them, are accepted."""
    with scripted_server(smollm2_tokenizer, "openai", max_model_len=1 << 17) as server:
        server.script = Script(["a"])
        body: dict[str, Any] = {"messages": [USER], "tools": realistic_tools(60)}
        assert len(str(body)) > 50_000
        for choice in ("auto", "required", "none"):
            answer = server.post(CHAT, {**body, "tool_choice": choice})
            assert answer.status_code == 200, answer.text
