"""Videos and documents against transformers: the positions and texts of each family, chunks, cached prefixes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from octavo import LLM, SamplingParams, UsageError
from octavo.media.processor import read_processor
from octavo.outputs import RequestOutput
from octavo.prompt import Prompt
from tests.engine.test_images import NUM_TOKENS, PARAMS, TOLERANCE, loaded, model
from tests.support import tiny_vision
from tests.support.videos import encoded_document, encoded_video, frames

pytest.importorskip("av", reason="PyAV is not installed")
pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")

RATE = 5  # frames a second
FRAMES = frames(11, 24, 40)
QUESTION = "What happens?"
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("videos")
    names = (*QWEN, "gemma3", "smolvlm")
    return {name: tiny_vision.save(model(name), root / name, name) for name in names}


def conversation(video: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video", "video": video}, {"type": "text", "text": QUESTION}]}]


def seen_by(name: str, prompt: Prompt, rate: float = RATE) -> dict[str, torch.Tensor]:
    """A prompt with one video as transformers takes it."""
    judge, ids = model(name), torch.tensor([prompt.token_ids])
    kinds = torch.zeros_like(ids)
    for span in prompt.spans:
        ids[0, span.start : span.end] = judge.config.video_token_id
        kinds[0, span.start : span.end] = 2
    rows = np.concatenate([rows_of(name).frame_rows(item.tiles, 2) for item in prompt.items])
    tile, seconds = prompt.items[0].layout.tiles[0], {}
    if name == "qwen2_5_vl":
        shown = len({tuple(frame.reshape(-1)) for item in prompt.items for frame in np.split(item.tiles[0], 2)})
        seconds = {"second_per_grid_ts": torch.tensor([2 / (shown / len(FRAMES) * rate)])}
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "pixel_values_videos": torch.from_numpy(rows),
        "video_grid_thw": torch.tensor([[len(prompt.items), tile.grid_rows, tile.grid_cols]]),
        **seconds,
    }


def judged(name: str, prompt: Prompt) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers and their log-probabilities, after a prompt with one video."""
    given = seen_by(name, prompt)
    ids, kinds = given.pop("input_ids"), given.pop("mm_token_type_ids")
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(NUM_TOKENS):
        more = torch.tensor([tokens], dtype=torch.long)
        whole, types = torch.cat([ids, more], 1), torch.cat([kinds, torch.zeros_like(more)], 1)
        mask = torch.ones_like(whole)
        with torch.no_grad():
            logits = model(name)(input_ids=whole, attention_mask=mask, mm_token_type_ids=types.int(), **given).logits
        row = torch.log_softmax(logits[0, -1].double(), -1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tokens, logprobs


def generated(name: str, prompt: Prompt, rate: float) -> tuple[list[int], list[float]]:
    """The same by `generate`, which has positions of its own for new tokens."""
    given = seen_by(name, prompt, rate)
    given["mm_token_type_ids"] = given["mm_token_type_ids"].int()
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    found = model(name).generate(
        **given,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    rows = [torch.log_softmax(logits[0].double(), -1) for logits in found.logits]
    return [int(row.argmax()) for row in rows], [float(row.max()) for row in rows]


@cache
def rows_of(name: str) -> Any:
    family = tiny_vision.FAMILIES[name]
    return read_processor(name, family.config().to_dict(), family.preprocessor)


def assert_right(output: RequestOutput, expected: tuple[list[int], list[float]]) -> None:
    choice, (tokens, logprobs) = output.outputs[0], expected
    assert choice.token_ids == tokens
    found = [entry[token].logprob for entry, token in zip(choice.logprobs or [], tokens, strict=True)]
    np.testing.assert_allclose(found, logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", QWEN)
def test_a_video_has_the_answer_of_transformers(name: str, folders: dict[str, Path]) -> None:
    """Whole and in chunks, in a batch with a text, and from the prefix cache."""
    with loaded(folders[name], block_size=16, max_num_batched_tokens=24) as llm:
        prompt = llm.chat_prompt(conversation((FRAMES, {"fps": RATE})))
        assert len(prompt.items) > 1
        expected = judged(name, prompt)
        first, _ = llm.generate([prompt, "words"], PARAMS)
        assert_right(first, expected)
        (second,) = llm.generate([prompt], PARAMS)
        assert second.num_cached_tokens > 0
        assert_right(second, expected)
    with loaded(folders[name], backend="torch:cpu") as llm:
        assert_right(llm.generate([prompt], PARAMS)[0], expected)


def test_text_after_a_slow_video_has_the_positions_of_transformers(folders: dict[str, Path]) -> None:
    """Times that are later than the rows and columns of a frame."""
    name, rate = "qwen2_5_vl", 0.25
    with loaded(folders[name]) as llm:
        prompt = llm.chat_prompt(conversation((FRAMES, {"fps": rate})))
        tile = prompt.items[-1].layout.tiles[0]
        assert tile.time is not None
        assert tile.time > tile.grid_cols
        assert_right(llm.generate([prompt], PARAMS)[0], generated(name, prompt, rate))


def test_programs_give_videos_in_every_form(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "film.mkv"
    file.write_bytes(encoded_video(FRAMES, RATE))
    mark = "<|vision_start|><|video_pad|><|vision_end|>"
    with loaded(folders["qwen3_vl"]) as llm:

        def bits(prompt: Any) -> float:
            value = llm.generate([prompt], PARAMS)[0].outputs[0].cumulative_logprob
            assert value is not None
            return value

        images = [Image.fromarray(frame) for frame in FRAMES]
        wanted = bits(llm.chat_prompt(conversation((FRAMES, {"fps": RATE}))))
        for form in (file, str(file), file.read_bytes(), (images, {"fps": RATE})):
            assert bits(llm.chat_prompt(conversation(form))) == wanted
        seen = {"image": images[0], "video": file}
        raw = bits({"prompt": f"{llm.image_mark}{mark}{QUESTION}", "multi_modal_data": seen})
        assert raw == bits({"prompt": f"{llm.image_mark * 2}{QUESTION}", "multi_modal_data": seen})
        assert raw != bits({"prompt": f"{mark}{llm.image_mark}{QUESTION}", "multi_modal_data": seen})
        assert bits(llm.chat_prompt(conversation(FRAMES))) != wanted  # two a second
        for wrong, named in (
            ((FRAMES, {"fps": 0}), "fps of a video is 0"),
            ([images[0], images[1].resize((9, 9))], "pictures of the same size"),
            (5, "a video is int"),
        ):
            with pytest.raises(UsageError, match=named):
                llm.chat_prompt(conversation(wrong))


@pytest.mark.parametrize(("name", "text"), [("gemma3", "<2.0 seconds>"), ("smolvlm", "\nFrame from 00:02:")])
def test_other_families_see_frames_as_images(name: str, text: str, folders: dict[str, Path]) -> None:
    with loaded(folders[name]) as llm:
        prompt = llm.chat_prompt(conversation((FRAMES, {"fps": RATE})))
        assert [item.layout.tiles[0].num_frames for item in prompt.items] == [1, 1]  # of two seconds
        assert text in llm.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
        assert llm.generate([prompt], PARAMS)[0].outputs[0].token_ids


def test_the_pages_of_a_document_are_seen_one_after_another(folders: dict[str, Path], tmp_path: Path) -> None:
    pages = [Image.fromarray(tiny_vision.picture(seed, 24, 40).pixels) for seed in range(3)]
    file = tmp_path / "paper.pdf"
    file.write_bytes(encoded_document(pages))
    question = {"type": "text", "text": QUESTION}

    def asked(llm: LLM, *parts: dict[str, Any]) -> Prompt:
        return llm.chat_prompt([{"role": "user", "content": [*parts, question]}])

    with loaded(folders["qwen3_vl"]) as llm:
        prompts = [asked(llm, {"type": kind, kind: file}) for kind in ("document", "image")]
        images = asked(llm, *[{"type": "image", "image": page.resize((80, 48))} for page in pages])
        assert {prompt.token_ids for prompt in prompts} == {images.token_ids}
        assert len(prompts[0].items) == 3
        outputs = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0))
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
