"""Ollama's own client, unchanged, synchronous and not, on a real and on a scripted server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Literal

import httpx
import ollama
import pytest
from pydantic import BaseModel, ConfigDict

from octavo.errors import EngineDeadError
from octavo.generation_request import GenerationRequest
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template
from tests.support.server import RunningServer

MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["city", "river"]
    is_capital: bool


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def either(value: int | str | None = None) -> str:
    """Writes a value.

    Args:
        value: a number or a text
    """
    return str(value)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=60)


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "ollama") as running:
        yield running


@pytest.fixture
def scripted(fake: ScriptedServer) -> ollama.Client:
    fake.script = Script(["Hello", " world"])
    return ollama.Client(host=fake.url, timeout=20)


def rendered(fake: ScriptedServer) -> str:
    return fake.client.tokenizer.decode(fake.last_request.prompt.token_ids, skip_special_tokens=False)


# A real model


def test_a_conversation_of_several_turns_whole_and_streamed(client: ollama.Client) -> None:
    messages = [{"role": "system", "content": "You answer briefly."}, *QUESTION]
    for _ in range(2):
        whole = client.chat(MODEL, messages, options=GREEDY)
        parts = list(client.chat(MODEL, messages, options=GREEDY, stream=True))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert whole.done is True
        assert whole.done_reason == parts[-1].done_reason
        assert whole.eval_count == parts[-1].eval_count
        messages += [whole.message, {"role": "user", "content": "Are you sure?"}]
    assert "4" in (messages[2].content or "")  # type: ignore[attr-defined]


def test_a_prompt_and_its_context(client: ollama.Client) -> None:
    whole = client.generate(MODEL, "My name is Ada. Remember it.", options=GREEDY)
    parts = list(client.generate(MODEL, "My name is Ada. Remember it.", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == whole.response != ""
    assert parts[-1].context == whole.context
    assert len(whole.context) == whole.prompt_eval_count + whole.eval_count
    further = client.generate(MODEL, "What is my name?", context=whole.context, options=GREEDY)
    assert further.context[: len(whole.context)] == whole.context
    raw = client.generate(MODEL, "One, two, three,", raw=True, options={**GREEDY, "num_predict": 3})
    assert raw.response.startswith(" four")
    assert raw.context is None
    assert raw.done_reason == "length"


def test_the_durations_are_true(client: ollama.Client) -> None:
    began = time.monotonic_ns()
    answer = client.chat(MODEL, QUESTION, options={"num_predict": 40, "temperature": 0.7, "seed": 3, "stop": ["zzz"]})
    elapsed = time.monotonic_ns() - began
    parts = [answer.load_duration, answer.prompt_eval_duration, answer.eval_duration]
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert 0 < sum(parts) <= answer.total_duration <= elapsed
    assert answer.total_duration > 0.5 * elapsed
    assert answer.prompt_eval_duration > 100_000  # a tenth of a millisecond
    assert answer.eval_duration > 100_000
    created = datetime.fromisoformat(answer.created_at.replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - created).total_seconds()) < 60


def test_formats(client: ollama.Client) -> None:
    answer = client.chat(MODEL, QUESTION, format=Place.model_json_schema(), options={"num_predict": 60})
    assert isinstance(Place.model_validate_json(answer.message.content or ""), Place)
    text = "".join(
        part.response for part in client.generate(MODEL, "Paris?", format=Place.model_json_schema(), stream=True)
    )
    assert isinstance(Place.model_validate_json(text), Place)


def test_log_probabilities(client: ollama.Client) -> None:
    whole = client.chat(MODEL, QUESTION, options=GREEDY, logprobs=True, top_logprobs=2)
    parts = list(client.chat(MODEL, QUESTION, options=GREEDY, logprobs=True, top_logprobs=2, stream=True))
    assert whole.logprobs is not None
    assert [item.token for part in parts for item in part.logprobs or ()] == [item.token for item in whole.logprobs]
    assert len(whole.logprobs) == whole.eval_count
    assert all(len(item.top_logprobs or ()) == 2 and item.logprob <= 0 for item in whole.logprobs)
    assert "".join(item.token for item in whole.logprobs).startswith(whole.message.content or "")


def test_embeddings(client: ollama.Client) -> None:
    texts = ["A cat sat on the mat.", "A kitten sat on the mat.", "Revenue rose by 4 percent."]
    answer = client.embed(MODEL, texts, options={"num_ctx": 512})
    cat, kitten, revenue = answer.embeddings
    assert sum(x * x for x in cat) == pytest.approx(1, abs=1e-4)
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, revenue, strict=True))
    assert answer.prompt_eval_count is not None
    assert 0 < answer.prompt_eval_count < 40
    assert answer.total_duration is not None
    assert answer.total_duration > 0
    older = client.embeddings(MODEL, texts[0]).embedding
    length = sum(x * x for x in older) ** 0.5
    assert [x / length for x in older] == pytest.approx(cat, abs=1e-5)


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> None:
        client = ollama.AsyncClient(host=server.url)
        whole = await client.chat(MODEL, QUESTION, options=GREEDY)
        parts = [part async for part in await client.chat(MODEL, QUESTION, options=GREEDY, stream=True)]
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert (await client.generate(MODEL, "Hi", options=GREEDY)).response
        assert len((await client.embed(MODEL, ["a", "b"])).embeddings) == 2

    asyncio.run(ask())


# A scripted engine


def test_calls_and_their_results_over_several_turns(scripted: ollama.Client, fake: ScriptedServer) -> None:
    fake.script = Script(["I add. ", CALL[:30], CALL[30:]])
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    whole = scripted.chat("fake", messages, tools=[add, either], options={"num_predict": 200})
    assert whole.message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        ("add", {"a": 2, "b": 3})
    ]
    assert (whole.message.content or "").strip() == "I add."
    streamed = [
        call
        for part in scripted.chat("fake", messages, tools=[add], stream=True)
        for call in part.message.tool_calls or ()
    ]
    assert streamed == whole.message.tool_calls
    messages += [whole.message, {"role": "tool", "tool_name": "add", "content": "5"}]
    fake.script = Script(["It is 5."])
    answer = scripted.chat("fake", messages, tools=[add])
    assert answer.message.content == "It is 5."
    assert "<tool_response>\n5\n</tool_response>" in rendered(fake)
    assert '"arguments": {"a": 2, "b": 3}' in rendered(fake)
    messages += [answer.message, {"role": "user", "content": "And now?"}]
    assert scripted.chat("fake", messages, tools=[add]).message.content == "It is 5."


def test_results_belong_to_their_calls(scripted: ollama.Client, fake: ScriptedServer) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}}

    asked = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call("one"), call("two"), call("one")]}]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("two", "one")]
    scripted.chat("fake", [*asked, *results, {"role": "tool", "content": "last"}])
    assert rendered(fake).index("two\n") < rendered(fake).index("one\n</") < rendered(fake).index("last\n")
    unknown = {"role": "tool", "tool_name": "three", "content": ""}
    with pytest.raises(ollama.ResponseError, match=r"messages\[3\]"):
        scripted.chat("fake", [*asked, results[0], unknown])
    with pytest.raises(ollama.ResponseError, match="messages"):
        scripted.chat("fake", [*QUESTION, {"role": "tool", "content": "5"}])


def test_all_options(scripted: ollama.Client, fake: ScriptedServer) -> None:
    honoured = {
        **{"seed": 5, "num_predict": 7, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.7, "temperature": 0.6},
        **{"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["a", "b"]},
    }
    machinery = {"num_ctx": 512, "num_thread": 4, "num_gpu": 1, "use_mmap": True, "num_keep": 4, "low_vram": False}
    off = {"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "repeat_last_n": -1, "penalize_newline": True}
    body = {"model": "fake", "messages": QUESTION, "stream": False, "options": {**honoured, **machinery, **off}}
    answer = fake.http.post("/api/chat", json={**body, "keep_alive": "5m"})
    assert answer.status_code == 200, answer.text
    params = fake.last_request.params.sampling
    assert (params.seed, params.max_tokens, params.top_k, params.top_p, params.min_p) == (5, 7, 9, 0.8, 0.1)
    assert (params.typical_p, params.temperature, params.stop) == (0.7, 0.6, ("a", "b"))
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, 0.25)
    named = answer.headers["x-octavo-ignored-fields"].split(", ")
    assert sorted(named) == sorted([*(f"options.{name}" for name in machinery), "keep_alive"])
    assert scripted.chat("fake", QUESTION, options=ollama.Options(temperature=0.1, num_ctx=64)).message.content


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mirostat": 2}, "options.mirostat"),
        ({"tfs_z": 0.5}, "options.tfs_z"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n"),
        ({"penalize_newline": False, "presence_penalty": 1.0}, "options.penalize_newline"),
        ({"temperature": 3}, "options.temperature"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"top_q": 1}, "options.top_q"),
        ({"num_ctx": "many"}, "options.num_ctx"),
        ({"stop": [1]}, "options.stop"),
    ],
)
def test_options_that_are_wrong_or_missing_here_are_refused(
    scripted: ollama.Client, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=named) as refused:
        scripted.chat("fake", QUESTION, options=options)
    assert refused.value.status_code == 400


def test_values_that_mean_no_limit_no_seed_and_no_penalty(scripted: ollama.Client, fake: ScriptedServer) -> None:
    for num_predict in (-1, -2):
        scripted.chat("fake", QUESTION, options={"num_predict": num_predict, "seed": -1})
        assert (fake.last_request.params.max_tokens, fake.last_request.params.seed) == (None, None)
    scripted.chat("fake", QUESTION, options={"repeat_last_n": 0, "repeat_penalty": 1.3})
    assert fake.last_request.params.repetition_penalty == 1.0


def test_any_json(scripted: ollama.Client, fake: ScriptedServer) -> None:
    scripted.chat("fake", QUESTION, format="json")
    assert fake.last_request.params.structured_outputs.json_object
    scripted.generate("fake", "Hi", format="")
    assert fake.last_request.params.structured_outputs is None


def test_what_a_text_model_cannot_do_is_refused_by_name(scripted: ollama.Client) -> None:
    image = "aGVsbG8="
    refusals: list[tuple[str, Any]] = [
        (r"messages\[0\]\.images", lambda: scripted.chat("fake", [{**QUESTION[0], "images": [image]}])),
        ("images", lambda: scripted.generate("fake", "Hi", images=[image])),
        ("template", lambda: scripted.generate("fake", "Hi", template="{{ .Prompt }}")),
        ("suffix", lambda: scripted.generate("fake", "def f():", suffix="return 1")),
        ("context", lambda: scripted.generate("fake", "Hi", raw=True, context=[1])),
        ("context", lambda: scripted.generate("fake", "Hi", context=[10**6])),
        ("width", lambda: scripted.generate("fake", "Hi", width=64)),
        ("format", lambda: scripted.generate("fake", "Hi", format={"type": "banana"})),
        ("keep_alive", lambda: scripted.generate("fake", "Hi", keep_alive="soon")),
        ("top_logprobs", lambda: scripted.generate("fake", "Hi", top_logprobs=2)),
        ("create", lambda: scripted.create("other", from_="fake")),
        ("copy", lambda: scripted.copy("fake", "other")),
        ("delete", lambda: scripted.delete("fake")),
        ("push", lambda: scripted.push("fake")),
    ]
    for named, ask in refusals:
        with pytest.raises(ollama.ResponseError, match=named) as refused:
            ask()
        assert refused.value.status_code == 400


def test_a_text_to_embed_loses_its_end_beyond_the_context(scripted: ollama.Client, fake: ScriptedServer) -> None:
    text = "Begin " + "a " * 2000 + "end"
    answer = scripted.embed("fake", text)
    assert answer.prompt_eval_count == 1024
    assert rendered(fake).startswith("Begin a")
    with pytest.raises(ollama.ResponseError, match="input"):
        scripted.embed("fake", text, truncate=False)
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        scripted.embed("fake", "a", dimensions=7)
    assert len(scripted.embed("fake", ["a", "b"], dimensions=8).embeddings) == 2
    assert scripted.embed("fake", []).embeddings == []


def test_the_oldest_turns_of_a_long_conversation_are_left_out_if_asked(fake: ScriptedServer) -> None:
    """Ollama does so without being asked and without a word. Here the answer says how many tokens are missing."""
    turns = [{"role": "user", "content": f"turn{i} " + "word " * 300} for i in range(8)]
    long = {"messages": [part for turn in turns for part in (turn, {"role": "assistant", "content": "Yes."})]}
    long["messages"].append({"role": "user", "content": "Last?"})
    for fields in ({}, {"truncate": False}):
        answer = fake.post("/api/chat", {**long, **fields})
        assert (answer.status_code, "context" in answer.json()["error"]) == (400, True)
    figures = fake.post("/api/chat", {**long, "truncate": True, "stream": False}).json()
    assert figures["truncated_tokens"] > 1000
    prompt = fake.client.tokenizer.decode(fake.last_request.prompt.token_ids, skip_special_tokens=False)
    assert ("turn0" in prompt, "turn7" in prompt, "Last?" in prompt) == (False, True, True)
    body = {"prompt": "first " + "word " * 3000 + "last", "truncate": True, "stream": False}
    assert fake.post("/api/generate", body).json()["truncated_tokens"] > 1000
    prompt = fake.client.tokenizer.decode(fake.last_request.prompt.token_ids, skip_special_tokens=False)
    assert ("first" in prompt, "last" in prompt) == (True, True)


def test_the_bodies_of_ollamas_own_program(fake: ScriptedServer) -> None:
    """It sends most fields of Go's structures, also empty ones."""
    show = {"model": "", "system": "", "template": "", "verbose": False, "options": None, "name": "fake"}
    assert fake.post("/api/show", show).status_code == 200
    assert fake.post("/api/show", {**show, "system": "Be kind."}).status_code == 400
    pull = {"model": "fake", "username": "", "password": "", "name": ""}
    assert '"success"' in fake.post("/api/pull", pull).text
    empty: dict[str, Any] = {"model": "fake", "prompt": "", "suffix": "", "system": "", "template": "", "options": None}
    loaded = fake.post("/api/generate", {**empty, "context": None, "keep_alive": "5m", "stream": False}).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_a_model_that_is_not_there(scripted: ollama.Client) -> None:
    calls: list[Any] = [
        lambda: scripted.chat("nobody", QUESTION),
        lambda: list(scripted.chat("nobody", QUESTION, stream=True)),
        lambda: scripted.show("nobody"),
        lambda: scripted.pull("nobody"),
        lambda: scripted.embed("nobody", "Hi"),
    ]
    for call in calls:
        with pytest.raises(ollama.ResponseError, match="nobody") as missing:
            call()
        assert missing.value.status_code == 404


def test_thinking(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(with_template(smollm2_tokenizer, THINKING_TEMPLATE), "ollama") as running:
        running.script = Script(["<think>Hm", ".</think>", "Yes."])
        client = ollama.Client(host=running.url)
        whole = client.chat("fake", QUESTION, think=True)
        assert (whole.message.thinking, whole.message.content) == ("Hm.", "Yes.")
        parts = list(client.chat("fake", QUESTION, think=True, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == "Hm."
        assert "".join(part.message.content or "" for part in parts) == "Yes."
        made = client.generate("fake", "Hi?", think=True)
        assert (made.thinking, made.response) == ("Hm.", "Yes.")
        client.chat("fake", [*QUESTION, whole.message, *QUESTION], think=False)
        assert rendered(running).endswith("</think>\n\n")
        assert "<think>Hm.</think>" in rendered(running)
        assert client.show("fake").capabilities == ["completion", "tools", "thinking"]


def test_thinking_of_a_model_that_cannot_is_named_as_ignored(fake: ScriptedServer) -> None:
    for think in (True, "high"):
        answer = fake.post("/api/chat", {"messages": QUESTION, "stream": False, "think": think})
        assert answer.headers["x-octavo-ignored-fields"] == "think"


def test_lines_carry_no_signs_of_life(smollm2_tokenizer: Tokenizer) -> None:
    """Clients read every line as JSON, so a silent stream stays silent."""
    with scripted_server(smollm2_tokenizer, "ollama", config=ServerConfig(keep_alive=0.05)) as running:
        running.script = Script(["Hello", " world"], delay_s=0.3)
        with httpx.stream("POST", f"{running.url}/api/chat", json={"messages": QUESTION}) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            lines = answer.read().split(b"\n")
        assert lines.pop() == b""
        assert [json.loads(line)["done"] for line in lines] == [False, False, True]


def test_an_error_in_the_middle_of_a_stream(scripted: ollama.Client, fake: ScriptedServer) -> None:
    fake.script = Script(["Hel"], error=EngineDeadError("it fell"))
    parts = scripted.chat("fake", QUESTION, stream=True)
    assert next(parts).message.content == "Hel"
    with pytest.raises(ollama.ResponseError, match="engine"):
        list(parts)


def test_a_key(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, "ollama", config=ServerConfig(api_key=("secret",))) as running:
        with pytest.raises(ollama.ResponseError, match="API key") as refused:
            ollama.Client(host=running.url).list()
        assert refused.value.status_code == 401
        assert ollama.Client(host=running.url, headers={"Authorization": "Bearer secret"}).list().models


@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", {"messages": QUESTION}), ("/api/generate", {"prompt": "Hi"}), ("/api/show", {})]
)
def test_bodies_without_a_content_type(fake: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    fake.script = Script(["Hello", " world"])
    answer = httpx.post(fake.url + path, content=json.dumps({"model": "fake", **body}))
    assert "content-type" not in answer.request.headers
    assert answer.status_code == 200, answer.text
    curl = {"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "curl/8.5.0"}
    answer = httpx.post(fake.url + path, content=json.dumps({"model": "fake", **body}), headers=curl)
    assert answer.status_code == 200, answer.text
    for headers in ({"Origin": fake.url}, {**curl, "Sec-Fetch-Site": "cross-site"}):
        page = httpx.post(fake.url + path, content=json.dumps({"model": "fake", **body}), headers=headers)
        assert page.status_code == 415
        assert "content type" in page.json()["error"]


@pytest.mark.parametrize("nothing", [[], "", None])
def test_no_texts_have_no_vectors(fake: ScriptedServer, nothing: Any) -> None:
    answer = fake.post("/api/embed", {"model": "fake", "input": nothing})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["model"], body["embeddings"], body["prompt_eval_count"]) == ("fake", [], 0)
    unknown = fake.post("/api/embed", {"model": "other", "input": nothing})
    assert (unknown.status_code, unknown.json().keys()) == (404, {"error"})


def test_a_context_is_put_before_the_new_turn(scripted: ollama.Client, fake: ScriptedServer) -> None:
    def script(request: GenerationRequest) -> Script:
        return Script([str(len(request.prompt.token_ids))])

    fake.script = script
    first = scripted.generate("fake", "Hi", system="Be kind.")
    assert "Be kind." in rendered(fake)
    scripted.generate("fake", "And?", context=first.context)
    assert list(fake.last_request.prompt.token_ids[: len(first.context)]) == list(first.context)
