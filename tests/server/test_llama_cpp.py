"""Routes of llama.cpp's server. Its README describes them; no client library of its own has a release to judge them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from octavo.engine.metrics import EngineMetrics
from octavo.loader.generation_config import SamplingDefaults
from octavo.server.config import ServerConfig
from octavo.server.generation.chat_plan import plan_chat
from octavo.server.protocols.llama_cpp.embedding_routes import normalized
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script, read_tokenizer
from tests.support.scripted_server import ScriptedServer, scripted_server, with_infill
from tests.support.server import RunningServer, running_server

MODULES = ("llama_cpp", "tokenize", "openai")
HI = [{"role": "user", "content": "Hi there"}]


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, *MODULES) as running:
        yield running


@pytest.fixture(autouse=True)
def _script(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello", " world"])
    fake.client.sampling_defaults = SamplingDefaults()


def events(fake: ScriptedServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = fake.post(path, {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def complete(fake: ScriptedServer, **fields: Any) -> Any:
    answer = fake.post("/completion", {"prompt": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(fake: ScriptedServer, path: str, body: dict[str, Any]) -> str:
    answer = fake.post(path, body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


# A real model


def test_a_completion_whole_and_streamed(server: RunningServer) -> None:
    body = {"prompt": "One, two, three,", "n_predict": 5, "temperature": 0, "n_probs": 2, "return_tokens": True}
    with server.client as client:
        whole = client.post("/completion", json=body).json()
        text = client.post("/completion", json={**body, "stream": True}).text
        openai = client.post(
            "/v1/completions", json={"prompt": body["prompt"], "max_tokens": 5, "temperature": 0}
        ).json()
    parts = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: ")]
    assert whole["content"] == openai["choices"][0]["text"] == "".join(part["content"] for part in parts)
    assert whole["content"].startswith(" four")
    assert [token for part in parts[:-1] for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (whole["tokens_predicted"], whole["stop_type"], whole["truncated"]) == (5, "limit", False)
    assert whole["tokens_evaluated"] == openai["usage"]["prompt_tokens"]
    assert whole["prompt"] == body["prompt"]
    probabilities = whole["completion_probabilities"]
    assert [item["id"] for item in probabilities] == whole["tokens"]
    assert all(item["top_logprobs"][0]["id"] == item["id"] and len(item["top_logprobs"]) == 2 for item in probabilities)
    assert [item for part in parts[:-1] for item in part["completion_probabilities"]] == probabilities
    timings = whole["timings"]
    assert timings["predicted_n"] == 5
    assert timings["prompt_n"] + timings["cache_n"] == whole["tokens_evaluated"]
    assert timings["predicted_per_second"] == pytest.approx(4e3 / timings["predicted_ms"])


def test_probabilities_after_sampling(server: RunningServer) -> None:
    body = {"prompt": "Once upon a", "n_predict": 4, "n_probs": 5, "seed": 1, "temperature": 0.7, "top_k": 3}
    body |= {"top_p": 1.0}  # the model's own is less
    with server.client as client:
        raw = client.post("/completion", json={**body, "return_tokens": True}).json()
        after = {**body, "post_sampling_probs": True, "return_tokens": True}
        whole = client.post("/completion", json=after).json()
        streamed = chunks_of(client, "/completion", after)
        greedy = client.post("/completion", json={**after, "temperature": 0}).json()
    assert whole["tokens"] == raw["tokens"]  # nothing else is drawn
    assert [one for part in streamed[:-1] for one in part["completion_probabilities"]] == whole[
        "completion_probabilities"
    ]
    for one, before in zip(whole["completion_probabilities"], raw["completion_probabilities"], strict=True):
        assert one.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        weights = [math.exp(token["logprob"] / 0.7) for token in before["top_logprobs"][:3]]
        assert [token["id"] for token in one["top_probs"]] == [token["id"] for token in before["top_logprobs"][:3]]
        probs = [token["prob"] for token in one["top_probs"]]
        assert probs == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-3)
        assert one["prob"] in probs
    for one in greedy["completion_probabilities"]:
        assert one["prob"] == 1.0
        assert [(token["id"], token["prob"]) for token in one["top_probs"]] == [(one["id"], 1.0)]


def chunks_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = client.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_the_progress_of_a_prompt_and_the_times_so_far(server: RunningServer, path: str) -> None:
    text = f"{path} " + "word " * 1200
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    # A salt of its own: other tests have put the beginning of every chat into the cache.
    body = {**prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "cache_salt": f"progress {path}"}
    with server.client as client:
        followed = chunks_of(client, path, {**body, "return_progress": True, "timings_per_token": True})
        again = chunks_of(client, path, {**body, "return_progress": True})
        plain = chunks_of(client, path, body)
        whole = client.post(path, json={**body, "return_progress": True, "timings_per_token": True}).json()
    for chunks, is_cached in ((followed, False), (again, True)):
        steps = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert chunks[: len(steps)] == [chunk for chunk in chunks if "prompt_progress" in chunk]
        processed = [step["processed"] for step in steps]
        assert processed == sorted(set(processed))
        assert processed[0] == steps[0]["cache"]
        assert (steps[0]["cache"] > 0) == is_cached
        assert processed[-1] == steps[0]["total"] > 1200
        assert {(step["total"], step["cache"]) for step in steps} == {(steps[0]["total"], steps[0]["cache"])}
        times = [step["time_ms"] for step in steps]
        assert times == sorted(times)
        assert times[0] == 0 < times[-1]
        assert len(steps) >= 2  # those between may be merged on their way
    timed = [chunk["timings"] for chunk in followed if "prompt_progress" not in chunk]
    counts = [each["predicted_n"] for each in timed]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert all(each["prompt_n"] + each["cache_n"] == steps[0]["total"] for each in timed)
    assert timed[-1]["predicted_ms"] > 0
    assert not any("prompt_progress" in chunk for chunk in plain)
    assert sum("timings" in chunk for chunk in plain) == (path == "/completion")
    assert whole["timings"]["predicted_n"] == 3


def test_grammars_schemas_and_stops(server: RunningServer) -> None:
    with server.client as client:

        def ask(**fields: Any) -> Any:
            return client.post("/completion", json={"prompt": "Paris is", "n_predict": 40, **fields}).json()

        assert ask(grammar='root ::= "yes" | "no"')["content"] in ("yes", "no")
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        closed = {**schema, "additionalProperties": False}
        assert isinstance(json.loads(ask(json_schema=closed)["content"])["a"], bool)
        stopped = ask(prompt="One, two, three,", stop=[" five"], temperature=0)
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", " five")
        assert stopped["content"] == " four,"
        banned = ask(temperature=0, n_predict=1)["content"]
        assert ask(temperature=0, n_predict=1, logit_bias=[[banned, False]])["content"] != banned


@pytest.mark.slow
def test_infill_by_a_model_that_was_trained_for_it(qwen_0_5b_path: Path) -> None:
    prefix, suffix = "def add(a, b):\n    ", "\n\nprint(add(2, 3))\n"
    tokenizer = read_tokenizer(qwen_0_5b_path)
    text = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
    with running_server(f"qwen={qwen_0_5b_path}", "--kv-cache-memory", "256MiB") as server, server.client as client:
        body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 24, "temperature": 0}
        answer = client.post("/infill", json=body).json()
        assert answer["content"].strip().startswith("return a + b")
        assert answer["prompt"] == text
        assert answer["tokens_evaluated"] == len(tokenizer.encode(text, parse_special=True))
        ollama = {"prompt": prefix, "suffix": suffix, "stream": False, "options": {"temperature": 0, "num_predict": 24}}
        assert client.post("/api/generate", json=ollama).json()["response"] == answer["content"]
        assert "insert" in client.post("/api/show", json={"model": "qwen"}).json()["capabilities"]


# A scripted engine


def test_prompts_of_every_kind(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    hi, ho = (smollm2_tokenizer.encode(text) for text in ("Hi", "Ho"))
    for prompt in ("Hi", hi, {"prompt_string": "Hi"}):
        assert complete(fake, prompt=prompt)["content"] == "Hello world"
        assert list(fake.last_request.prompt.token_ids) == hi
    complete(fake, prompt=["Hi", *ho, "Hi"])
    assert list(fake.last_request.prompt.token_ids) == [*hi, *ho, *hi]
    for prompts in (["Hi", "Ho"], [hi, ho], [hi, "Ho"], ["Hi", [*ho]], [[*hi], ["Ho"]], [hi, {"prompt_string": "Ho"}]):
        answers = complete(fake, prompt=prompts)
        assert [answer["prompt"] for answer in answers] == ["Hi", "Ho"]
        assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["index"] for answer in complete(fake, n_cmpl=3)] == [0, 1, 2]
    streamed = events(fake, "/completion", {"prompt": ["Hi", "Ho"]})
    for index in (0, 1):
        mine = [event for event in streamed if event["index"] == index]
        assert "".join(event["content"] for event in mine) == "Hello world"
        assert mine[-1]["stop"]


@pytest.mark.parametrize(
    "prompt",
    [
        1,
        [],
        {},
        [[]],
        [1.5],
        {"prompt_string": "Hi", "multimodal_data": ["aGk="]},
        [-1],
        ["Hi", {"a": 1}],
        ["Hi", None],
    ],
)
def test_wrong_prompts(fake: ScriptedServer, prompt: Any) -> None:
    assert refused(fake, "/completion", {"prompt": prompt}).startswith("prompt")


def test_lengths(fake: ScriptedServer) -> None:
    for fields, limit in (({}, None), ({"n_predict": -1}, None), ({"n_predict": 7}, 7), ({"max_tokens": 7}, 7)):
        complete(fake, **fields)
        assert fake.last_request.params.max_tokens == limit
    only_prompt = complete(fake, n_predict=0)
    assert (only_prompt["content"], only_prompt["tokens_predicted"], only_prompt["stop_type"]) == ("", 0, "limit")
    assert [event["content"] for event in events(fake, "/completion", {"prompt": "Hi", "n_predict": 0})] == [""]
    fake.script = Script(["Hi"], finish_reason="length")
    assert complete(fake, prompt=[5] * 1023)["truncated"]


def test_the_end_of_text(fake: ScriptedServer) -> None:
    answer = complete(fake)
    assert (answer["stop_type"], answer["stopping_word"], answer["has_new_line"]) == ("eos", "", False)
    fake.script = Script(["a\n"], stop_reason="b")
    answer = complete(fake, stop=["b"])
    assert (answer["stop_type"], answer["stopping_word"], answer["has_new_line"]) == ("word", "b", True)


def test_the_settings_of_an_answer(fake: ScriptedServer) -> None:
    fake.client.sampling_defaults = SamplingDefaults({"repetition_penalty": 1.5, "top_k": 7}, "test")
    settings = complete(fake, temperature=0.5, repeat_penalty=1.25, min_p=0.1, seed=3, n_predict=4)[
        "generation_settings"
    ]
    wanted = {"temperature": 0.5, "repeat_penalty": 1.25, "min_p": 0.1, "seed": 3, "n_predict": 4, "top_k": 7}
    assert wanted.items() <= settings.items()
    params = fake.last_request.params.sampling
    assert (params.repetition_penalty, params.top_k, params.seed) == (1.25, 7, 3)


def test_logit_bias_in_every_form(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    words = smollm2_tokenizer.encode("Hello, World!", add_special_tokens=False)
    for bias, wanted in (
        ([[5, 1.5], [6, False]], {5: 1.5, 6: -100.0}),
        ({"5": 1.5, "6": False}, {5: 1.5, 6: -100.0}),
        ([["Hello, World!", -0.5]], dict.fromkeys(words, -0.5)),
        ([], None),
    ):
        complete(fake, logit_bias=bias)
        assert fake.last_request.params.logit_bias == wanted
    for wrong in ([[5]], [[5, "x"]], [[True, 1]], [[5, 101]], [5], [[-1, 1]]):
        assert refused(fake, "/completion", {"prompt": "Hi", "logit_bias": wrong}) == "logit_bias"


def test_only_the_wanted_fields(fake: ScriptedServer) -> None:
    """A path is the name of its field, as with llama.cpp, so that two paths with the same end are two fields."""
    paths = ["content", "generation_settings/n_ctx", "generation_settings/json_schema", "timings/predicted_n"]
    answer = complete(fake, response_fields=[*paths, "nothing/here", "content/here", ""])
    assert answer == dict(zip(paths, ("Hello world", 1024, None, 2), strict=True))
    assert complete(fake, response_fields=[]).keys() == complete(fake).keys()
    last = events(fake, "/completion", {"prompt": "Hi", "response_fields": ["timings/prompt_n"]})[-1]
    assert last.keys() == {"timings/prompt_n"}
    assert [one["prompt"] for one in complete(fake, prompt=["Hi", "Ho"], response_fields=["prompt"])] == ["Hi", "Ho"]


def test_what_is_not_here_is_refused_or_named(fake: ScriptedServer) -> None:
    for fields in (
        {"mirostat": 2},
        {"xtc_probability": 0.5},
        {"dry_multiplier": 0.8},
        {"samplers": ["top_k"]},
        {"lora": [{"id": 0, "scale": 1}]},
        {"t_max_predict_ms": 100},
        {"n_predict": -2},
        {"n_probs": 21},
        {"grammar": "root ::= nowhere"},
        {"json_schema": {"type": "banana"}},
        {"image_data": []},
    ):
        assert refused(fake, "/completion", {"prompt": "Hi", **fields}) == next(iter(fields))
    fields = {"cache_prompt": True, "id_slot": 3, "n_keep": 4, "mirostat": 0}
    answer = fake.post("/completion", {"prompt": "Hi", **fields})
    assert answer.headers["x-octavo-ignored-fields"] == "cache_prompt, n_keep"
    assert fake.last_request.options.id_slot == answer.json()["id_slot"] == 3


def test_infill_prompts(smollm2_tokenizer: Tokenizer) -> None:
    coder = with_infill(smollm2_tokenizer)
    tokens = list(coder.tokens)
    with scripted_server(coder, "llama_cpp") as running:
        body = {"input_prefix": "a = <fim_middle>", "input_suffix": "\n", "prompt": "1"}
        files = [{"filename": "b.py", "text": "b = 1"}]
        assert running.post("/infill", {**body, "input_extra": files}).status_code == 200
        token_ids = list(running.last_request.prompt.token_ids)
        assert coder.decode(token_ids, skip_special_tokens=False) == (
            "<repo_name>myproject\n<file_sep>b.py\nb = 1\n<file_sep>filename\n"
            "<fim_prefix>a = <fim_middle><fim_suffix>\n<fim_middle>1"
        )
        assert token_ids.count(tokens.index("<fim_middle>")) == 1  # the caller's text is text
        ends = {tokens.index(name) for name in ("<repo_name>", "<file_sep>")}
        assert set(running.last_request.params.stop_token_ids) == ends
        assert refused(running, "/infill", {"input_prefix": "a"}) == "input_suffix"


def test_infill_without_its_tokens_is_refused_by_name(fake: ScriptedServer) -> None:
    assert refused(fake, "/infill", {"input_prefix": "a", "input_suffix": "b"}) == "input_suffix"


def test_templates_are_applied(fake: ScriptedServer) -> None:
    prompt = fake.post("/apply-template", {"messages": HI}).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n")
    complete(fake, prompt=prompt)
    tokens = fake.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert list(fake.last_request.prompt.token_ids) == tokens
    open_end = {"messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True}
    assert fake.post("/apply-template", open_end).json()["prompt"].endswith("assistant\nWell")
    assert refused(fake, "/apply-template", {"messages": []}) == "messages"


def test_conversations_are_planned_beside_the_event_loop(fake: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []

    def plan(*args: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return plan_chat(*args)

    monkeypatch.setattr("octavo.server.generation.prompt.plan_chat", plan)
    for path in ("/apply-template", "/tokenize"):
        assert fake.post(path, {"messages": HI}).status_code == 200
    assert on_loop == [False, False]


def test_tokens_in_llama_cpp_s_shape(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("Hi <|im_end|>", add_special_tokens=False, parse_special=True)
    assert fake.post("/tokenize", {"content": "Hi <|im_end|>"}).json() == {"tokens": ids}
    plain = smollm2_tokenizer.encode("Hi <|im_end|>", add_special_tokens=False)
    assert fake.post("/tokenize", {"content": "Hi <|im_end|>", "parse_special": False}).json() == {"tokens": plain}
    pieces = fake.post("/tokenize", {"content": "Hi 世", "with_pieces": True, "add_special": True}).json()["tokens"]
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw.decode() == "Hi 世"
    assert fake.post("/detokenize", {"tokens": ids}).json()["content"] == "Hi <|im_end|>"
    assert refused(fake, "/tokenize", {"content": "Hi", "prompt": "Hi"}) == "prompt"
    assert refused(fake, "/tokenize", {"prompt": "Hi", "with_pieces": True}) == "with_pieces"


def test_props_and_slots(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    props = fake.get("/props").json()
    assert props["total_slots"] == 16
    assert props["chat_template"] == smollm2_tokenizer.template_source()
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert fake.get("/props?model=nobody").status_code == 404
    assert [slot["is_processing"] for slot in fake.get("/slots").json()] == [False] * 16
    fake.script = Script(["Hello"], never_ends=True)
    with httpx.stream("POST", f"{fake.url}/completion", json={"prompt": "Hi", "stream": True}) as running:
        chunks = running.iter_bytes()  # kept: its end would close the connection
        next(chunks)
        assert [slot["is_processing"] for slot in fake.get("/slots?fail_on_no_slot=1").json()] == [True] + [False] * 15


def test_slots_are_saved_restored_and_erased(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(slot_save_path=str(tmp_path))
    with scripted_server(smollm2_tokenizer, "llama_cpp", config=config) as fake:
        saved = fake.post("/slots/3?action=save", {"filename": "talk.bin"})
        counts = {"n_saved": 48, "n_written": 1000, "timings": {"save_ms": 250.0}}
        assert saved.json() == {"id_slot": 3, "filename": "talk.bin", **counts}
        restored = fake.post("/slots/0?action=restore", {"filename": "talk.bin", "cache_salt": "s"})
        counts = {"n_restored": 48, "n_read": 1000, "timings": {"restore_ms": 250.0}}
        assert restored.json() == {"id_slot": 0, "filename": "talk.bin", **counts}
        assert httpx.post(f"{fake.url}/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": 48}
        actions = fake.client.slot_actions
        path = str(tmp_path / "talk.bin")
        assert [(each.kind, each.slot, each.path) for each in actions] == [
            ("save", 3, path),
            ("restore", 0, path),
            ("erase", 1, ""),
        ]
        assert actions[0].salt != actions[1].salt
        for name in (
            "../a",
            "a/b",
            "/etc/passwd",
            "",
            ".",
            "..",
            ".hidden",
            "a\\b",
            "a\0",
            "x" * 300,
            "C:a",
            "a.",
            " ",
        ):
            answer = fake.post("/slots/0?action=save", {"filename": name})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "filename"), name
        for path, body in (
            ("/slots/16?action=save", {"filename": "a"}),
            ("/slots/-1?action=erase", {}),
            ("/slots/0?action=save", {}),
            ("/slots/0?action=save", {"filename": 3}),
            ("/slots/0?action=save", {"file": "a"}),
            ("/slots/0?action=destroy", {}),
            ("/slots/0", {}),
            ("/slots/x?action=erase", {}),
        ):
            assert fake.post(path, body).status_code in (400, 404, 422), path
        answer = fake.post("/slots/0?action=save", {"filename": 3})
        assert answer.json()["error"]["message"] == "filename must be a string, not 3"
        assert len(actions) == 3


def test_slots_need_a_folder(fake: ScriptedServer) -> None:
    answer = fake.post("/slots/0?action=save", {"filename": "a"})
    assert answer.status_code == 501
    assert "--slot-save-path" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": HI}),
    ],
)
def test_limits_of_drafts_reach_the_engine(fake: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    limits = {"speculative.n_max": 3, "speculative.n_min": 2, "speculative.p_min": 0.5}
    assert fake.post(path, {**body, **limits}).status_code == 200
    options = fake.client.requests[-1].options
    assert (options.num_speculative_tokens, options.min_speculative_tokens, options.speculative_p_min) == (3, 2, 0.5)
    assert refused(fake, path, {**body, **limits, "num_speculative_tokens": 4}) == "num_speculative_tokens"


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_timings_have_the_drafts_whole_and_streamed(fake: ScriptedServer, path: str) -> None:
    fake.script = Script(["Hello", " world"], num_drafts=(9, 6, 0, 0))
    body = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
    body |= {"timings_per_token": True}
    whole = fake.post(path, body).json()["timings"]
    assert (whole["draft_n"], whole["draft_n_accepted"]) == (9, 6)
    lines = fake.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}).text.split("\n\n")
    if path == "/completion":
        lines = fake.post(path, {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["timings"] | {"draft_n": 9, "draft_n_accepted": 6} == chunks[-1]["timings"]


def test_props_say_whether_there_are_drafts_and_why_not(server: RunningServer, smollm2_tokenizer: Tokenizer) -> None:
    with server.client as client:
        props = client.get("/props").json()
        assert client.get("/slots").json()[0]["speculative"]
        settings = client.post("/completion", json={"prompt": "Hi", "n_predict": 1, "speculative.n_max": 2}).json()
        metrics = client.get("/metrics").text
    assert props["speculation"] == {"sources": ["prediction", "ngram"], "max_drafts": 15, "reason": ""}
    assert props["default_generation_settings"]["params"]["speculative.n_max"] == 15
    assert settings["generation_settings"]["speculative.n_max"] == 2
    assert 'source="ngram"} 1.0' in metrics
    figures = EngineMetrics(num_lost_draft_models=1)
    info = {"draft_sources": ("ngram", "draft_model"), "max_drafts": 4}
    with scripted_server(smollm2_tokenizer, "llama_cpp", draft_info=info, figures=figures) as fake:
        assert fake.get("/props").json()["speculation"] == {
            "sources": ["ngram"],
            "max_drafts": 4,
            "reason": "the draft model has failed; see the log",
        }
    with scripted_server(smollm2_tokenizer, "llama_cpp", draft_info={"no_drafts": "speculation is off"}) as fake:
        assert fake.get("/props").json()["speculation"]["reason"] == "speculation is off"
        assert not fake.get("/slots").json()[0]["speculative"]


def test_embeddings_in_llama_cpp_s_shape(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    hi = smollm2_tokenizer.encode("Hi")
    (one,) = fake.post("/embedding", {"content": "Hi"}).json()
    assert one["index"] == 0
    assert np.linalg.norm(one["embedding"][0]) == pytest.approx(1, abs=1e-5)
    many = fake.post("/embedding", {"content": ["Hi", "Ho"], "embd_normalize": -1}).json()
    assert [item["index"] for item in many] == [0, 1]
    assert many[0]["embedding"][0] / np.linalg.norm(many[0]["embedding"][0]) == pytest.approx(
        one["embedding"][0], abs=1e-5
    )
    assert fake.post("/embedding", {"input": ["Hi", [*hi]]}).json() == [one, {**one, "index": 1}]
    for wrong in ({"content": []}, {}, {"content": "Hi", "input": "Hi"}):
        assert refused(fake, "/embedding", wrong) == "content"
    assert refused(fake, "/embedding", {"content": "Hi", "embd_normalize": -2}) == "embd_normalize"


@pytest.mark.parametrize("order", [1, 2, 3, 64])
def test_norms(order: int) -> None:
    vector = np.array([3e30, -4e30, 0, 1e30], np.float32)
    norm = (np.abs(vector.astype(np.float64)) ** order).sum() ** (1 / order) if order < 8 else 4e30
    assert normalized(vector, order) == pytest.approx(vector / norm, rel=1e-5)
    assert not normalized(np.zeros(3, np.float32), order).any()
    assert np.abs(normalized(vector, 0)).max() == pytest.approx(32760)
    assert (normalized(vector, -1) == vector).all()


def test_a_key_is_asked_for(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, *MODULES, config=ServerConfig(api_key=("secret",))) as running:
        for path in ("/props", "/slots"):
            assert running.get(path).status_code == 401
