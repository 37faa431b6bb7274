"""A request takes few forms between the HTTP body and the engine, and a new option is one field in one place."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from octavo.batch import Batch, SamplingBatch, StepOutput
from octavo.config import EngineConfig
from octavo.core.wire import SentPrompt, Submit
from octavo.engine.speculation.draft_source import Draft
from octavo.generation_request import GenerationRequest
from octavo.outputs import CompletionOutput, OutputDelta, RequestOutput
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams, check_fields
from octavo.server.generation.content import PlainText
from octavo.server.generation.spec import ChatSpec
from octavo.server.protocols.openai.chat_request import Message
from octavo.server.protocols.openai.routes import ChatCompletionRequest
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.forms import Watch
from tests.support.wired import wired_app

ROOT = Path(__file__).resolve().parents[2]
SEED = 987_654_321_987
URL = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "Say something about the quokka."}],
    "seed": SEED,
    "max_tokens": 8,
    "temperature": 0.0,
}
# A part travels inside its whole and is counted with it.
PARTS: dict[type, type] = {
    Message: ChatCompletionRequest,
    PlainText: ChatSpec,
    SamplingParams: GenerationRequest,
    Prompt: GenerationRequest,
    SentPrompt: Submit,
    SamplingBatch: Batch,
    CompletionOutput: OutputDelta,
}
# A tokenizer holds all words there are; a draft guesses at tokens, some of which then are the answer's.
NO_FORMS = (Tokenizer, Draft)


class Needles:
    """Text and tokens of the prompt and the answer, and the seed of the parameters: what the forms hold."""

    def __init__(self, answer: dict[str, Any]) -> None:
        """answer: to the same request."""
        choice = answer["choices"][0]
        words = [word for word in choice["message"]["content"].split() if len(word) > 3]
        self.texts = ["quokka", *words]
        # Smaller numbers are those of many other things.
        tokens = {*answer["prompt_token_ids"], *choice["token_ids"]}
        self.numbers = [SEED, *(token_id for token_id in tokens if token_id > 300)]
        assert words
        assert any(token_id > 300 for token_id in choice["token_ids"])

    def are_in(self, value: object) -> bool:
        if isinstance(value, str):
            return any(text in value for text in self.texts)
        if isinstance(value, np.ndarray) and value.dtype.names:
            return any(self.are_in(np.ascontiguousarray(value[name])) for name in value.dtype.names)
        if isinstance(value, (int, list, tuple, np.ndarray)) and not isinstance(value, bool):
            return bool(np.isin(np.asarray(value, dtype=object), self.numbers).any())
        return False


def seen_classes(config: EngineConfig) -> list[type]:
    """Of one request, in their order."""

    async def run() -> list[type]:
        async with wired_app(config) as (http, _):
            needles = Needles((await http.post(URL, json={**BODY, "return_token_ids": True})).json())
        watch = Watch(needles.are_in, PARTS.keys())
        try:
            async with wired_app(config) as (http, _):
                with watch:
                    text = (await http.post(URL, json={**BODY, "stream": True})).text
        finally:
            watch.close()
        assert "data: [DONE]" in text
        assert any(word in text for word in needles.texts[1:])
        return watch.seen

    return asyncio.run(run())


def annotations_of(kind: Any) -> set[object]:
    """The types of a class's fields, and what is in those."""
    found: set[object] = set()
    waiting = list(get_type_hints(kind, include_extras=True).values())
    while waiting:
        hint = waiting.pop()
        found.add(hint)
        waiting += get_args(hint)
    return found


def test_a_chat_request_takes_few_forms(smollm2_path: Path) -> None:
    """At most 8 classes from the HTTP body to the engine's step, at most 12 with those of the way back."""
    seen = seen_classes(EngineConfig(model=str(smollm2_path), num_threads=1, kv_cache_memory="16MiB"))
    for part, whole in PARTS.items():
        assert part in annotations_of(whole), (part, whole)
        assert {part, whole} <= set(seen)
    forms = [kind for kind in seen if kind not in PARTS and kind not in NO_FORMS]
    end = forms.index(StepOutput)
    names = [kind.__name__ for kind in forms]
    assert forms[0] is ChatCompletionRequest
    assert {"ChatSpec", "GenerationRequest", "Submit", "Request", "Sequence", "Batch"} <= set(names[:end])
    assert names[end + 1 :] == ["Outcome", "OutputDelta", "Step", "TextDelta"]
    assert RequestOutput not in seen
    assert end <= 8, names
    assert len(names) <= 12, names


BODIES = {
    URL: BODY,
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/messages": {"messages": BODY["messages"], "max_tokens": 4, "model": "model"},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/completion": {"prompt": "a", "n_predict": 4},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 4}, "model": "model", "stream": False},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 4}},
}


def test_parameters_are_checked_once_in_the_server_and_once_in_the_engine(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every protocol, with defaults of the model, a limit that the context cuts, and the engine's own kind."""
    checked: list[object] = []

    def note(params: Any, prefix: str = "") -> None:
        if isinstance(params, SamplingParams):
            checked.append(params)
        check_fields(params, prefix)

    async def run() -> dict[str, int]:
        config = EngineConfig(model=str(smollm2_path), num_threads=1, kv_cache_memory="16MiB")
        counts = {}
        async with wired_app(config) as (http, client):
            monkeypatch.setattr("octavo.sampling_params.check_fields", note)
            for url, body in BODIES.items():
                checked.clear()
                client.requests.clear()
                answer = await http.post(url, json=body, headers={"anthropic-version": "2023-06-01"})
                assert answer.status_code == 200, (url, answer.text)
                counts[url] = len(checked) - len(client.requests)  # the test's client decodes each once more
        return counts

    assert asyncio.run(run()) == dict.fromkeys(BODIES, 2)


def test_a_new_option_reaches_the_engine_from_everywhere(smollm2_path: Path) -> None:
    """One line more in `RequestOptions`: every endpoint, the wire, the engine and the Python API have the option."""
    command = [sys.executable, "-m", "tests.support.new_option", str(smollm2_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == {"endpoints": 19, "calls": 7}
