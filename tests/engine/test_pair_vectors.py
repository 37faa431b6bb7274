"""Vectors of texts and images by CLIP, SigLIP and SigLIP 2, against transformers; and refusals."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedModel

from octavo import LLM, UsageError
from tests.support.pictures import encoded
from tests.support.seeing import data_url
from tests.support.server import running_server
from tests.support.tiny_vision import pairs, picture

PICTURES = [picture(0, 40, 24), picture(1, 24, 56), picture(2, 24, 24)]
TEXTS = ["a", "two Words", "a photo of a cat"]
TOLERANCE = 5e-3


@cache
def model(name: str) -> PreTrainedModel:
    return pairs.pair_model(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    return {name: pairs.save_pair(model(name), root / name, name) for name in pairs.PAIRS}


def loaded(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"backend": "cpu", "num_threads": 2, "kv_cache_memory": "8MiB", **options})


def of_image(image: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": image}}


def token_ids(llm: LLM, name: str, text: str) -> list[int]:
    """As the tokenizer of transformers has them, before padding."""
    own = llm.tokenizer.encode(text.lower() if pairs.PAIRS[name].is_padded else text, add_special_tokens=False)
    return [*llm.tokenizer.prefix_ids, *own, *llm.tokenizer.suffix_ids]


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
@pytest.mark.parametrize("name", pairs.PAIRS)
def test_vectors_are_those_of_transformers(name: str, backend: str, folders: dict[str, Path]) -> None:
    """Texts and images in one batch, and each alone."""
    with loaded(folders[name], backend=backend) as llm:
        prompts: list[Any] = [*TEXTS, *(of_image(each.pixels) for each in PICTURES)]
        wanted = [pairs.text_vector(name, model(name), token_ids(llm, name, text)) for text in TEXTS]
        wanted += [pairs.image_vector(name, model(name), each) for each in PICTURES]
        for found, right in zip(llm.embed(prompts), wanted, strict=True):
            np.testing.assert_allclose(found.outputs.embedding, right, rtol=0, atol=TOLERANCE)
        for prompt, right in zip(prompts[2:4], wanted[2:4], strict=True):
            np.testing.assert_allclose(llm.embed(prompt)[0].outputs.embedding, right, rtol=0, atol=TOLERANCE)
        assert np.abs(wanted[3] - wanted[4]).max() > 0.1
        assert llm._session.info.hidden_size == len(wanted[0]) == len(wanted[-1])


def test_texts_of_clip_in_chunks_and_twice(folders: dict[str, Path]) -> None:
    with loaded(folders["clip"], max_num_batched_tokens=5, max_num_seqs=4, block_size=8) as llm:
        right = pairs.text_vector("clip", model("clip"), token_ids(llm, "clip", TEXTS[2]))
        for _ in range(2):
            np.testing.assert_allclose(llm.embed(TEXTS[2])[0].outputs.embedding, right, rtol=0, atol=TOLERANCE)


def test_a_text_that_fills_the_context_is_taken_and_a_longer_one_refused(folders: dict[str, Path]) -> None:
    for name in ("clip", "siglip"):
        with loaded(folders[name]) as llm:
            room = 32 - len(llm.tokenizer.prefix_ids) - len(llm.tokenizer.suffix_ids)
            right = pairs.text_vector(name, model(name), token_ids(llm, name, "x" * room))
            np.testing.assert_allclose(llm.embed("x" * room)[0].outputs.embedding, right, rtol=0, atol=TOLERANCE)
            with pytest.raises(UsageError, match="33 tokens"):
                llm.embed("x" * (room + 1))


def test_cosines_of_texts(folders: dict[str, Path]) -> None:
    with loaded(folders["siglip"]) as llm:
        first, second = (np.array(output.outputs.embedding) for output in llm.embed(TEXTS[:2]))
        (score,) = llm.score(*TEXTS[:2])
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert score.outputs.score == pytest.approx(cosine, abs=1e-5)


@pytest.fixture(scope="module")
def clip(folders: dict[str, Path]) -> Any:
    with loaded(folders["clip"]) as llm:
        yield llm


def test_programs_give_an_image_in_every_form(clip: LLM, tmp_path: Path) -> None:
    image = Image.fromarray(PICTURES[1].pixels)
    image.save(tmp_path / "a.png")
    forms = [image, PICTURES[1].pixels, tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), [image]]
    vectors = [output.outputs.embedding for output in clip.embed([of_image(form) for form in forms])]
    assert all(vector == vectors[0] for vector in vectors)
    assert clip.embed({"multi_modal_data": {"image": image}})[0].outputs.embedding == vectors[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a cat", "multi_modal_data": {"image": PICTURES[0].pixels}}, "for a text or an image"),
        (of_image([PICTURES[0].pixels, PICTURES[1].pixels]), "for a text or an image"),
        ({"prompt": "", "multi_modal_data": {"video": np.stack([PICTURES[2].pixels] * 4)}}, "for a text or an image"),
    ],
)
def test_anything_but_one_text_or_one_image_is_refused(clip: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        clip.embed(prompt)


def test_what_such_a_model_cannot_do_is_refused(clip: LLM, folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="it generates no text"):
        clip.generate("a")
    with pytest.raises(UsageError, match="this model uses 'last'"):
        clip.embed("a", pooling="mean")
    with loaded(folders["clip"], mmproj="none") as llm, pytest.raises(UsageError, match="reads text only"):
        llm.embed(of_image(PICTURES[0].pixels))


def test_texts_and_images_over_http(folders: dict[str, Path]) -> None:
    def asked(client: Any, **body: Any) -> Any:
        return client.post("/v1/embeddings", json=body)

    def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    shown = {"type": "image_url", "image_url": {"url": data_url(encoded(Image.fromarray(PICTURES[0].pixels), "PNG"))}}
    said = {"type": "text", "text": "a cat"}
    with running_server(folders["clip"]) as server, server.client as client:
        seen = asked(client, messages=message(shown)).json()
        vector = np.array(seen["data"][0]["embedding"])
        right = pairs.image_vector("clip", model("clip"), PICTURES[0])
        np.testing.assert_allclose(vector, right / np.linalg.norm(right), rtol=0, atol=TOLERANCE)
        assert seen["usage"]["prompt_tokens_details"]["image_tokens"] == 1
        read = asked(client, messages=message(said)).json()["data"][0]["embedding"]
        assert read == asked(client, input="a cat", dimensions=40).json()["data"][0]["embedding"]
        for wrong in (message(shown, said), message(shown, shown), [*message(said), *message(said)]):
            answer = asked(client, messages=wrong)
            assert answer.status_code == 400
            assert "for a text or an image" in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "messages"
        assert "image" in client.get("/v1/models").json()["data"][0]["input_modalities"]
