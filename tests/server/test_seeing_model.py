"""A tiny model that sees, served by a real process: the answer over HTTP is that of the engine in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.pictures import encoded, noise
from tests.support.seeing import data_url
from tests.support.server import running_server
from tests.support.tiny_vision import save, tiny_model

PICTURES = [encoded(noise(60, 44, seed), "PNG") for seed in (1, 2)]


def ask(client: Any, *pictures: bytes, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in pictures]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        **fields,
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_pictures_are_seen_over_http(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3_vl"), tmp_path / "model", "qwen3_vl")
    with running_server(folder, "--max-model-len", "512") as server, server.client as client:
        assert client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
        first, second = (ask(client, data) for data in PICTURES)
        again, both = ask(client, PICTURES[0]), ask(client, *PICTURES)

    def said(answer: dict[str, Any]) -> Any:
        return answer["choices"][0]["logprobs"]["content"]

    assert said(first) == said(again)
    assert said(first) != said(second)
    images = first["usage"]["prompt_tokens_details"]["image_tokens"]
    assert both["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * images > 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
