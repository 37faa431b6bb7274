"""A model with an encoder and a decoder in the server: the prompt is what the encoder reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.support.server import RunningServer, running_server
from tests.support.tiny_encoder_decoders import TEXTS, save_encoder_decoder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("t5")
    save_encoder_decoder("t5", directory)
    return directory


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[RunningServer]:
    with running_server(str(path)) as running:
        yield running


def posted(served: RunningServer, route: str, status: int = 200, **body: Any) -> Any:
    with served.client as client:
        answer = client.post(route, json=body)
    assert answer.status_code == status, answer.text
    return answer


def test_completions_and_what_is_refused(served: RunningServer, path: Path) -> None:
    with LLM(str(path)) as llm:
        outputs = llm.generate(TEXTS[:2], SamplingParams(max_tokens=12, temperature=0))
        texts, lengths = [output.outputs[0].text for output in outputs], [len(llm.encode(text)) for text in TEXTS[:2]]
    body = {"max_tokens": 12, "temperature": 0}
    answer = posted(served, "/v1/completions", prompt=TEXTS[:2], **body).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    stream = posted(served, "/v1/completions", prompt=TEXTS[0], stream=True, **body).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == texts[0]
    messages = [{"role": "user", "content": "a text"}]
    assert "template" in posted(served, "/v1/chat/completions", 400, messages=messages).json()["error"]["message"]
    refused = posted(served, "/v1/embeddings", 400, input="a text").json()["error"]
    assert "an encoder and a decoder" in refused["message"]
    assert "128" in posted(served, "/v1/completions", 400, prompt=[5] * 200).json()["error"]["message"]
