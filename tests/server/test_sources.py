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


def test_the_longest_source_leaves_room_for_the_first_token_and_one_more(served: RunningServer) -> None:
    """The decoder's first token is no part of the text: 128 tokens are 126 of a source, it and one of an answer."""
    answer = posted(served, "/v1/completions", prompt=[5] * 126, max_tokens=9).json()
    assert answer["usage"] == {"prompt_tokens": 126, "completion_tokens": 1, "total_tokens": 127} | {
        key: answer["usage"][key] for key in answer["usage"] if key.endswith("details")
    }
    cut = posted(served, "/v1/completions", prompt=[5] * 140, truncate_prompt_tokens=-1, max_tokens=1).json()
    assert cut["usage"]["prompt_tokens"] == 126
    for length in (127, 200):
        error = posted(served, "/v1/completions", 400, prompt=[5] * length).json()["error"]
        assert f"has {length} tokens" in error["message"]
        assert "has 128 for prompt and answer; at most 126 leave room" in error["message"]
        assert error["code"] == "context_length_exceeded"
