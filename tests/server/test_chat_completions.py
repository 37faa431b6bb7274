"""The answers of `/v1/chat/completions` in OpenAI's shapes, over an engine that answers by script."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.errors import EngineDeadError, NumericalError, OverloadedError
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.event_stream import DONE, post_stream
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template
from tests.support.waiting import wait_until

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def scripted(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", config=ServerConfig(keep_alive=0.05)) as server:
        yield server


@pytest.fixture(scope="module")
def engine(scripted: ScriptedServer) -> FakeClient:
    return scripted.client


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=20) as client:
        yield client


def wait_aborted(engine: FakeClient) -> None:
    wait_until(lambda: engine.streams[-1].was_aborted, seconds=5)


def test_the_whole_answer(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["Hel", "lo"], num_cached_tokens=2)
    answer = client.post(URL, json=BODY).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer.pop("system_fingerprint").startswith("fp_")
    usage = answer.pop("usage")
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "service_tier": None,
        "choices": [
            {
                "index": 0,
                "message": {
                    **dict.fromkeys(("refusal", "audio", "function_call", "reasoning", "reasoning_content")),
                    **{"role": "assistant", "content": "Hello", "annotations": []},
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert usage["completion_tokens_details"] == details


def test_the_chunks(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["Hel", "lo"], finish_reason="length")
    *chunks, last = post_stream(client, URL, BODY)
    assert last == DONE
    keys = {"id", "object", "created", "model", "system_fingerprint", "service_tier", "choices"}
    assert all(set(chunk) == keys for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    ]


def test_usage_of_a_stream(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["a", "b"], finish_reason="length")
    *chunks, usage, last = post_stream(client, URL, {**BODY, "stream_options": {"include_usage": True}})
    assert last == DONE
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == client.post(URL, json=BODY).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = post_stream(client, URL, {**BODY, "stream_options": options})[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2, 2]


def folded(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The content of a stream as a client joins it, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"content": "", "reasoning_content": "", "calls": [], "tokens": []}
            )
            delta = part["delta"]
            choice["content"] += delta.get("content") or ""
            choice["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["type"] == "function"
                    choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            choice["tokens"] += (part["logprobs"] or {"content": []})["content"]
            choice["finish_reason"] = part["finish_reason"] or choice.get("finish_reason")
    return choices


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "tools": {"tools": TOOLS, "logprobs": True},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_the_whole_answer_is_the_fold_of_the_stream(
    client: httpx.Client, engine: FakeClient, fields: dict[str, Any]
) -> None:
    engine.script = Script(["Well. ", CALL[:13], CALL[13:30], CALL[30:]])
    body = {**BODY, **fields}
    streamed = folded(post_stream(client, URL, body)[:-1])
    for choice in client.post(URL, json=body).json()["choices"]:
        other = streamed[choice["index"]]
        assert (choice["message"]["content"] or "") == other["content"]
        calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
        assert calls == other["calls"]
        assert (choice["logprobs"] or {"content": []})["content"] == other["tokens"]
        assert choice["finish_reason"] == other["finish_reason"]


def test_a_tool_call(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script([CALL])
    (choice,) = client.post(URL, json={**BODY, "tools": TOOLS}).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert message["tool_calls"][0]["type"] == "function"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    # The answer can be sent back as it is, with the result.
    turn = [
        *BODY["messages"],
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"},
    ]
    assert client.post(URL, json={"messages": turn, "tools": TOOLS}).status_code == 200


def test_log_probabilities(client: httpx.Client, engine: FakeClient, smollm2_tokenizer: Tokenizer) -> None:
    """The bytes are reported even where they are no text."""
    euro = "\u20ac".encode()
    half = next(i for i in range(smollm2_tokenizer.vocab_size) if smollm2_tokenizer.token_bytes(i) == euro[:1])
    engine.script = Script([("a\ufffd", [64, half])], finish_reason="length")
    (choice,) = client.post(URL, json={**BODY, "logprobs": True, "top_logprobs": 2}).json()["choices"]
    assert choice["message"]["content"] == "a\ufffd"
    content = choice["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [list(smollm2_tokenizer.token_bytes(64)), list(euro[:1])]
    assert content[1]["token"] == "\ufffd"
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    (choice,) = client.post(URL, json={**BODY, "logprobs": True}).json()["choices"]
    assert all(token["top_logprobs"] == [] for token in choice["logprobs"]["content"])


def test_a_stop_string_is_named(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["a"], stop_reason="END")
    assert client.post(URL, json={**BODY, "stop": "END"}).json()["choices"][0]["stop_reason"] == "END"
    chunks = post_stream(client, URL, {**BODY, "stop": "END"})
    assert chunks[-2]["choices"][0]["stop_reason"] == "END"


def test_token_ids(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script([("a", [5]), ("", [6]), ("b", [7])])
    body = {**BODY, "return_token_ids": True}
    whole = client.post(URL, json=body).json()
    assert whole["choices"][0]["token_ids"] == [5, 6, 7]
    assert whole["prompt_token_ids"] == list(engine.requests[-1].prompt.token_ids)
    chunks = post_stream(client, URL, body)[:-1]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == [5, 6, 7]


def test_timings_and_prompt_logprobs(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["a"], num_cached_tokens=1)
    answer = client.post(URL, json={**BODY, "timings": True, "prompt_logprobs": 1}).json()
    assert answer["timings"]["cache_n"] == 1
    assert answer["timings"]["prompt_n"] == answer["usage"]["prompt_tokens"] - 1
    assert answer["timings"]["prompt_ms"] == pytest.approx(2)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert set(next(iter(answer["prompt_logprobs"][1].values()))) == {"logprob", "rank", "decoded_token"}
    chunks = post_stream(client, URL, {**BODY, "timings": True})
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["timings"]["predicted_n"] == 1
    assert "usage" not in chunks[-2]


@pytest.mark.parametrize(
    "prediction",
    [
        "Hello",
        {"type": "content", "content": "Hello"},
        {"type": "content", "content": [{"type": "text", "text": "Hello"}]},
    ],
)
def test_a_prediction_reaches_the_engine_and_its_tokens_are_counted(
    client: httpx.Client, engine: FakeClient, prediction: Any
) -> None:
    engine.script = Script(num_drafts=(9, 6, 5, 4))
    answer = client.post(URL, json={**BODY, "prediction": prediction, "timings": True})
    assert "x-octavo-ignored-fields" not in answer.headers
    assert engine.requests[-1].options.prediction == "Hello"
    details = answer.json()["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 1)
    assert (answer.json()["timings"]["draft_n"], answer.json()["timings"]["draft_n_accepted"]) == (9, 6)
    chunks = post_stream(client, URL, {**BODY, "prediction": prediction, "stream_options": {"include_usage": True}})
    assert chunks[-2]["usage"]["completion_tokens_details"] == details


def test_an_empty_prediction_is_none(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script()
    assert client.post(URL, json={**BODY, "prediction": {"type": "content", "content": ""}}).status_code == 200
    assert engine.requests[-1].options.prediction == ""


def test_thinking(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(smollm2_tokenizer, THINKING_TEMPLATE)
    with (
        scripted_server(tokenizer, "openai") as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        server.script = Script(["<think>\nhm", "m\n</think>\n\n", "Fine"])
        answer = client.post(URL, json=BODY).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hmm", "Fine")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        streamed = folded(post_stream(client, URL, BODY)[:-1])[0]
        assert (streamed["reasoning_content"], streamed["content"]) == ("hmm", "Fine")
        # OpenAI's way to switch it off, in the words of this template.
        assert client.post(URL, json={**BODY, "reasoning_effort": "none"}).status_code == 200
        prompt = tokenizer.decode(server.last_request.prompt.token_ids, skip_special_tokens=False)
        assert prompt.endswith("</think>\n\n")
        answer = client.post(URL, json={**BODY, "reasoning_effort": "high"})
        assert answer.headers["x-octavo-ignored-fields"] == "reasoning_effort"


def test_refusals_keep_their_status_on_streams(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(refusal=OverloadedError("it restarts", code="engine_restarting", retry_after_s=3))
    for stream in (False, True):
        answer = client.post(URL, json={**BODY, "stream": stream})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "engine_restarting"


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDeadError("died of /secret"), "engine_restarting"), (NumericalError("nan"), "numerical_error")],
)
def test_an_error_in_mid_stream(client: httpx.Client, engine: FakeClient, error: Exception, code: str) -> None:
    engine.script = Script(["a"], error=error)  # type: ignore[arg-type]
    *chunks, failure, last = post_stream(client, URL, BODY)
    assert last == DONE
    assert failure["error"]["code"] == code
    assert failure["error"]["type"] == "server_error"
    assert "secret" not in failure["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    answer = client.post(URL, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, code)


def test_a_silent_stream_is_kept_alive(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["a"], delay_s=0.3)
    with client.stream("POST", URL, json={**BODY, "stream": True}) as answer:
        raw = b"".join(answer.iter_bytes())
    assert raw.startswith(b": keep-alive")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [["a"], []], ids=["decode", "prefill"])
def test_a_client_that_leaves(client: httpx.Client, engine: FakeClient, stream: bool, pieces: list[str]) -> None:
    engine.script = Script([("a", [5])] * len(pieces), never_ends=True)
    with pytest.raises(httpx.ReadTimeout):
        client.post(URL, json={**BODY, "stream": stream}, timeout=httpx.Timeout(20, read=0.02 if stream else 0.3))
    wait_aborted(engine)


def test_what_is_asked_for_reaches_the_engine(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["a"])
    fields = {"top_k": 7, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "max_completion_tokens": 9, "seed": 4}
    client.post(URL, json={**BODY, **fields, "logit_bias": {"5": 3}, "priority": -2, "stop": ["x", "y"]})
    request = engine.requests[-1]
    params: Any = request.params
    assert (params.top_k, params.min_p, params.min_tokens, params.ignore_eos) == (7, 0.1, 2, True)
    assert (params.max_tokens, params.seed, params.logit_bias, params.stop) == (9, 4, {5: 3.0}, ("x", "y"))
    assert request.options.priority == -2
    client.post(URL, json=BODY)
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, None)


@pytest.mark.parametrize(("name", "value"), [("name", 3), ("description", []), ("strict", "yes")])
def test_members_of_a_json_schema_have_their_types(client: httpx.Client, name: str, value: object) -> None:
    json_schema = {"name": "x", "schema": {"type": "object"}, name: value}
    body = {**BODY, "response_format": {"type": "json_schema", "json_schema": json_schema}}
    error = client.post(URL, json=body).json()["error"]
    assert (error["param"], error["code"]) == (f"response_format.json_schema.{name}", "invalid_type")


def test_strict_tools_are_enforced_where_calls_are_free(
    client: httpx.Client, engine: FakeClient, smollm2_tokenizer: Tokenizer
) -> None:
    engine.script = Script(["Hi"])
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": ["Qxz"]}}}}
    prompts = []
    for strict in (True, False, None):
        tool = {"type": "function", "function": {**function, "strict": strict}}
        assert client.post(URL, json={**BODY, "tools": [tool]}).status_code == 200
        params: Any = engine.requests[-1].params
        assert (params.structured_outputs is not None) == bool(strict)
        if strict:
            assert "Qxz" in params.structured_outputs.grammar
        prompts.append(engine.requests[-1].prompt.token_ids)
    assert prompts[0] == prompts[1] == prompts[2]
    assert "strict" not in smollm2_tokenizer.decode(prompts[0])
    function["parameters"] = {"type": "object", "properties": {"a/b": {"not": {}}}}
    tool = {"type": "function", "function": {**function, "strict": True}}
    error = client.post(URL, json={**BODY, "tools": [tool]}).json()["error"]
    assert (error["param"], error["code"]) == ("tools[0].function.parameters", "invalid_json_schema")
    assert "/properties/a~1b/not" in error["message"]


FORMATS: dict[str, tuple[dict[str, Any], str, object]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, "json_object", True),
    "TGI's": ({"response_format": {"type": "json_object", "value": {"type": "object"}}}, "json", '{"type": "object"}'),
    "regex": ({"guided_regex": "a+"}, "regex", "a+"),
    "choice": ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
    "grammar": ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    "vLLM's": ({"structured_outputs": {"choice": ["a"]}}, "choice", ("a",)),
}


@pytest.mark.parametrize(("fields", "name", "value"), FORMATS.values(), ids=FORMATS.keys())
def test_formats_of_the_answer(
    client: httpx.Client, engine: FakeClient, fields: dict[str, Any], name: str, value: object
) -> None:
    engine.script = Script(["a"])
    assert client.post(URL, json={**BODY, **fields}).status_code == 200
    params: Any = engine.requests[-1].params
    assert getattr(params.structured_outputs, name) == value
    assert client.post(URL, json={**BODY, "response_format": {"type": "text"}}).status_code == 200
    params = engine.requests[-1].params
    assert params.structured_outputs is None


def test_the_last_message_is_continued(client: httpx.Client, engine: FakeClient, smollm2_tokenizer: Tokenizer) -> None:
    engine.script = Script(["a"])
    for content, end in (("It is ", "It is "), ("<|im_end|>", "<|im_end|>"), ("yes", "yes")):
        messages = [*BODY["messages"], {"role": "assistant", "content": content}]
        body = {"messages": messages, "continue_final_message": True}
        assert client.post(URL, json=body).status_code == 200
        token_ids = engine.requests[-1].prompt.token_ids
        assert smollm2_tokenizer.decode(token_ids, skip_special_tokens=False).endswith(f"assistant\n{end}")
        assert token_ids[-1] not in smollm2_tokenizer.special_token_ids
