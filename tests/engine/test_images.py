"""Models that see against transformers: whole prompts, chunks, batches, cached prefixes, preemption; and refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams, UsageError
from octavo.backends.memory import MemoryBudget
from octavo.cli.plan import plan
from octavo.cli.show import show
from octavo.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.loading.encoder import why_no_images
from octavo.engine.loading.memory_needs import memory_needs
from octavo.engine.speculation.ngram import NgramSource
from octavo.engine.texts.placing import place_items
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.loader.vision import open_vision
from octavo.media.processor import Picture
from octavo.outputs import RequestOutput
from octavo.prompt import MediaItem, Prompt
from tests.support import tiny_vision
from tests.support.answers import answers_of
from tests.support.drafting import AnyPolicy, with_drafts
from tests.support.fake_executor import create_request
from tests.support.tiny_vision.internvl import save_own_internvl
from tests.support.tiny_vision.mmproj import encoded, save_gguf

# Text before, between and behind two images of other shapes, so that the shift of later positions matters.
PICTURES = [tiny_vision.picture(0, 40, 24), tiny_vision.picture(1, 24, 56)]
TEXTS = [np.random.default_rng(seed).integers(40, 250, count).tolist() for seed, count in enumerate((5, 4, 7))]
PARTS = [TEXTS[0], PICTURES[0], TEXTS[1], PICTURES[1], TEXTS[2]]
NUM_TOKENS = 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0, ignore_eos=True)
WITH_MMPROJ = [name for name, family in tiny_vision.FAMILIES.items() if family.mmproj is not None]
# llama.cpp's files leave out the limits of their images, and its own are larger than those of the tiny models.
WITH_LIMITS = ("lfm2_vl", "gemma4", "gemma4-small", "gemma4_unified")
# Of log-probabilities; a cache on the CPU has 16-bit numbers.
TOLERANCE = 5e-3


@cache
def model(name: str) -> PreTrainedModel:
    return tiny_vision.tiny_model(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {name: tiny_vision.save(model(name), root / name, name) for name in tiny_vision.FAMILIES}


def loaded(folder: Path, **options: Any) -> LLM:
    given = {"backend": "cpu", "num_threads": 2, "max_num_seqs": 4, "kv_cache_memory": "8MiB", **options}
    return LLM(str(folder), **given)


def item_of(llm: LLM, picture: Picture, key: bytes) -> MediaItem:
    processor = llm._session.model().engine.encodings.encoder.processor  # type: ignore[union-attr]
    layout = processor.layout(picture.width, picture.height)
    return MediaItem(key, layout, processor.resize(picture, layout))


def prompt_of(llm: LLM, parts: list[Any], keys: str = "abcd") -> Prompt:
    processor = llm._session.images.require()
    placeholder = llm._session.images.placeholder_id(processor)
    pictures = [part for part in parts if isinstance(part, Picture)]
    items = [item_of(llm, picture, key.encode()) for picture, key in zip(pictures, keys, strict=False)]
    ids = [i for part in parts for i in ([placeholder] if isinstance(part, Picture) else part)]
    return place_items(ids, items, placeholder, llm._session.images._encode)


@cache
def expected(name: str, order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> tuple[list[int], list[float]]:
    """The greedy tokens of transformers, and their log-probabilities."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(NUM_TOKENS):
        logits = tiny_vision.expected_logits(name, model(name), [PARTS[i] for i in order], tokens)[-1]
        row = torch.log_softmax(torch.from_numpy(logits).double(), -1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tokens, logprobs


def assert_right(output: RequestOutput, name: str, order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
    tokens, logprobs = expected(name, order)
    choice = output.outputs[0]
    assert choice.token_ids == tokens
    found = [entry[token].logprob for entry, token in zip(choice.logprobs or [], tokens, strict=True)]
    np.testing.assert_allclose(found, logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_answers_about_two_images(name: str, backend: str, folders: dict[str, Path]) -> None:
    with loaded(folders[name], backend=backend) as llm:
        (output,) = llm.generate([prompt_of(llm, PARTS)], PARAMS)
        assert_right(output, name)
        assert llm.metrics.num_items_encoded_total == 2
        assert llm.metrics.encoder_s_total > 0


@pytest.mark.parametrize("budget", [4])
@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_chunks_and_neighbours_change_nothing(name: str, budget: int, folders: dict[str, Path]) -> None:
    """An image first, an image last, one alone, and a text, all at once in chunks."""
    orders: list[tuple[int, ...]] = [(0, 1, 2, 3, 4), (1, 2), (0, 3), (0, 2, 4)]
    with loaded(folders[name], max_num_batched_tokens=budget) as llm:
        prompts = [prompt_of(llm, [PARTS[i] for i in order], "ab" if 1 in order else "b") for order in orders]
        for output, order in zip(llm.generate(prompts, PARAMS), orders, strict=True):
            assert_right(output, name, order)
        assert llm.metrics.num_items_encoded_total == 2


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_cached_prefixes_and_rows_are_used_again(name: str, folders: dict[str, Path]) -> None:
    with loaded(folders[name], block_size=16) as llm:
        whole = prompt_of(llm, PARTS)
        (first,) = llm.generate([whole], PARAMS)
        assert_right(first, name)
        llm._session.model().engine.encodings._rows.clear()  # type: ignore[union-attr]
        encoded = llm.metrics.num_items_encoded_total
        (second,) = llm.generate([whole], PARAMS)
        assert_right(second, name)
        num_cached = second.metrics.num_cached_tokens
        assert num_cached > whole.spans[0].end
        assert llm.metrics.num_items_encoded_total - encoded == (num_cached < whole.spans[-1].end)
        # Another picture of the same size shares nothing from its first position on.
        other = prompt_of(llm, PARTS, "xy")
        (third,) = llm.generate([other], PARAMS)
        assert third.metrics.num_cached_tokens <= whole.spans[0].start
        assert third.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.usefixtures("keeps_prompts")
def test_kept_prompts_know_their_images(folders: dict[str, Path], tmp_path: Path) -> None:
    """After a restart, too, a prompt is found by the same images alone: not by others, nor by its ids without any."""
    name, kept = "qwen3_vl", {"block_size": 16, "prompt_cache_dir": str(tmp_path / "kept")}

    def answers(llm: LLM, *prompts: Prompt) -> list[tuple[list[int], int]]:
        outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
        return [(list(output.outputs[0].token_ids), output.metrics.num_loaded_tokens) for output in outputs]

    with loaded(folders[name], **kept) as llm:
        assert answers(llm, prompt_of(llm, PARTS)) == [(expected(name)[0], 0)]
    with loaded(folders[name], **kept) as llm:
        whole, others = prompt_of(llm, PARTS), prompt_of(llm, PARTS, "xy")
        assert whole.spans[0].start < 16  # no block is before the images
        assert [count for _, count in answers(llm, others, Prompt(whole.token_ids))] == [0, 0]
        [(tokens, count)] = answers(llm, whole)
        assert (tokens, count > whole.spans[0].end) == (expected(name)[0], True)
    with loaded(folders[name], **kept) as llm:  # now that ids without images are kept, too
        [(tokens, count), (_, plain)] = answers(llm, prompt_of(llm, PARTS), Prompt(whole.token_ids))
        assert (tokens, count > whole.spans[0].end, plain >= 16) == (expected(name)[0], True, True)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "gemma4-small"])
def test_vectors_of_texts_with_images(name: str, folders: dict[str, Path]) -> None:
    """The mean of the last hidden states of text and images, and the last of them; also in chunks."""
    states = tiny_vision.expected_states(name, model(name), PARTS)
    with loaded(folders[name], max_num_batched_tokens=16) as llm:
        for pooling, right in (("mean", states.mean(axis=0)), ("last", states[-1])):
            (output,) = llm.embed(prompt_of(llm, PARTS), pooling=pooling)
            np.testing.assert_allclose(output.outputs.embedding, right, rtol=0, atol=TOLERANCE)


def test_preempted_requests_are_computed_again(folders: dict[str, Path]) -> None:
    name, block = "qwen3_vl", 4 * 2 * 32 * 2 * 2 * 8  # bytes; a prompt takes seven, and an answer one more
    given = {"block_size": 8, "kv_cache_memory": 14 * block, "max_model_len": 64, "enable_prefix_caching": False}
    with loaded(folders[name]) as llm:
        prompt = prompt_of(llm, PARTS)
    model = load_engine(EngineConfig(model=str(folders[name]), backend="cpu", num_threads=2, max_num_seqs=4, **given))
    for request in "12":
        model.engine.add_request(create_request(model.engine, request, prompt, PARAMS))
    outputs = answers_of(model.engine)
    assert [outputs[request].outputs[0].token_ids for request in "12"] == [expected(name)[0]] * 2
    assert model.engine.metrics.num_preemptions_total > 0
    model.executor.close()
    model.engine.close()


def test_choices_share_the_images_of_their_prompt(folders: dict[str, Path]) -> None:
    with loaded(folders["qwen3_vl"]) as llm:
        several = SamplingParams(n=3, max_tokens=4, temperature=0, ignore_eos=True)
        (output,) = llm.generate([prompt_of(llm, PARTS)], several)
        assert [choice.token_ids for choice in output.outputs] == [expected("qwen3_vl")[0][:4]] * 3
        assert llm.metrics.num_items_encoded_total == 2


def test_ngrams_continue_texts_beside_images_and_never_images(folders: dict[str, Path]) -> None:
    """The text before an image is repeated after it. The ids of the image between them are no guesses."""
    params = replace(PARAMS, max_tokens=60)
    with loaded(folders["qwen3_vl"], speculation="off") as llm:
        prompt = prompt_of(llm, [TEXTS[0], PICTURES[0], TEXTS[1], PICTURES[1], TEXTS[0]])
        (expected,) = llm.generate([prompt], params)

    def guess(num_tokens: int, limit: int) -> list[int] | None:
        beginning = SimpleNamespace(
            token_ids=list(prompt.token_ids[:num_tokens]), request=SimpleNamespace(prompt=prompt)
        )
        draft = NgramSource().open(beginning).guess((), limit)  # type: ignore[arg-type]
        return None if draft is None else draft.token_ids

    assert guess(len(prompt) - 2, 1) == TEXTS[0][-2:-1]
    assert guess(len(prompt) - 2, 4) == TEXTS[0][-2:]
    assert guess(len(prompt), 4) is None
    with loaded(folders["qwen3_vl"]) as llm:
        with_drafts(llm._session.model().engine, NgramSource(), AnyPolicy(1, least=1))
        (output,) = llm.generate([prompt_of(llm, [TEXTS[0], PICTURES[0], TEXTS[1], PICTURES[1], TEXTS[0]])], params)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs
        assert llm.metrics.num_draft_tokens_total["ngram"] > 0


def test_a_small_cache_of_rows_keeps_what_is_needed(folders: dict[str, Path]) -> None:
    with loaded(folders["qwen3_vl"], media_cache_size=1, enable_prefix_caching=False) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt_of(llm, PARTS)], PARAMS)
            assert_right(output, "qwen3_vl")
        encodings = llm._session.model().engine.encodings
        assert encodings is not None
        assert len(encodings._rows) <= 2
        assert llm.metrics.num_items_encoded_total == 3  # only the last was kept


def test_without_its_part_that_sees_a_model_refuses_images(folders: dict[str, Path]) -> None:
    name = "qwen3_vl"
    with loaded(folders[name]) as llm:
        prompt = prompt_of(llm, PARTS)
        (output,) = llm.generate([TEXTS[0]], PARAMS)
        whole_text = output.outputs[0].token_ids
    with loaded(folders[name], mmproj="none") as llm:
        (output,) = llm.generate([TEXTS[0]], PARAMS)
        assert output.outputs[0].token_ids == whole_text
        with pytest.raises(UsageError, match="takes no images"):
            llm.generate(prompt, PARAMS)


@pytest.fixture(scope="module")
def small(folders: dict[str, Path]) -> Iterator[LLM]:
    with loaded(folders["qwen3_vl"], image_max_tokens=16) as llm:
        yield llm


def test_large_images_are_made_smaller_or_refused(small: LLM, folders: dict[str, Path]) -> None:
    big = tiny_vision.picture(3, 64, 64)
    assert item_of(small, big, b"a").num_rows == 16
    with loaded(folders["qwen3_vl"]) as other:
        item = item_of(other, big, b"a")
    assert item.num_rows > 16
    placeholder = model("qwen3_vl").config.image_token_id
    with pytest.raises(UsageError, match=r"256 patches; this engine takes at most 64.*image_max_tokens") as refusal:
        small.generate(place_items([placeholder], [item], placeholder, small.tokenizer.encode), PARAMS)
    assert refusal.value.code == "image_too_large"


def test_pixels_that_are_not_those_of_the_layout_are_refused(small: LLM) -> None:
    item = item_of(small, PICTURES[0], b"a")
    wrong = MediaItem(b"a", item.layout, (item.tiles[0][:-1],))
    placeholder = model("qwen3_vl").config.image_token_id
    with pytest.raises(UsageError, match=r"a tile has .* pixels, but its layout") as refusal:
        small.generate(place_items([placeholder], [wrong], placeholder, small.tokenizer.encode), PARAMS)
    assert refusal.value.code == "invalid_image"


def test_as_many_places_as_images(small: LLM) -> None:
    item, placeholder = item_of(small, PICTURES[0], b"a"), model("qwen3_vl").config.image_token_id
    with pytest.raises(UsageError, match="2 image placeholders but 1 images"):
        place_items([placeholder, 20, placeholder], [item], placeholder, small.tokenizer.encode)


TEXT = "Is <|image_pad|> or <|image_pad|> larger?"


def test_programs_give_images_in_every_form(small: LLM, tmp_path: Path) -> None:
    first, second = (Image.fromarray(each.pixels) for each in PICTURES)
    first.save(tmp_path / "a.png")
    second.save(tmp_path / "b.png")
    forms: list[list[Any]] = [
        [first, second],
        [PICTURES[0].pixels, PICTURES[1].pixels],
        [tmp_path / "a.png", str(tmp_path / "b.png")],
        [(tmp_path / "a.png").read_bytes(), second],
    ]
    outputs = [small.generate({"prompt": TEXT, "multi_modal_data": {"image": form}}, PARAMS)[0] for form in forms]
    assert outputs[0].prompt == TEXT
    first_bits = outputs[0].outputs[0].cumulative_logprob
    assert {output.outputs[0].cumulative_logprob for output in outputs} == {first_bits}
    ids = small.tokenizer.encode(TEXT, parse_special=True)
    (swapped,) = small.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": [second, first]}}, PARAMS)
    assert swapped.outputs[0].cumulative_logprob != first_bits
    (one,) = small.generate({"prompt": "<|image_pad|>", "multi_modal_data": {"image": first}}, PARAMS)
    assert one.prompt_token_ids[0] == 0


def test_images_are_embedded_from_vllms_keys(small: LLM) -> None:
    images = [Image.fromarray(each.pixels) for each in PICTURES]
    vectors = [
        np.array(output.outputs.embedding)
        for output in small.embed(
            [{"prompt": TEXT, "multi_modal_data": {"image": each}} for each in (images, images[::-1])]
        )
    ]
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01


def test_names_of_contents_take_the_place_of_digests(small: LLM) -> None:
    before = small.metrics.num_items_encoded_total
    picture, text = tiny_vision.picture(7, 24, 24).pixels, "<|image_pad|>"
    for name in ("cat", "cat", "dog"):
        prompt = {"prompt": text, "multi_modal_data": {"image": picture}, "multi_modal_uuids": {"image": name}}
        small.generate(prompt, PARAMS)
    assert small.metrics.num_items_encoded_total - before == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"multi_modal_data": {"image": []}}, "2 image placeholders but 0 images"),
        ({"multi_modal_data": {"audio": b""}}, "multi_modal_data has 'audio'"),
        ({"multi_modal_data": {"video": b""}}, "a video is not an MP4"),
        ({"multi_modal_data": [b""]}, "multi_modal_data has"),
        ({"multi_modal_data": {"image": 5}}, "an image is int"),
        ({"multi_modal_data": {"image": b"no image"}}, "an image is not"),
        ({"multi_modal_data": {"image": "/no/such/file.png"}}, "No such file"),
        ({"multi_modal_data": {"image": np.zeros((2, 2), np.float32)}}, "an image is an array of float32"),
        ({"multi_modal_data": {"image": b""}, "mm_processor_kwargs": {"fps": 1}}, "unsupported option 'fps'"),
        ({"multi_modal_data": {"image": b""}, "multi_modal_uuids": {"image": ["a", "b"]}}, "multi_modal_uuids is"),
    ],
)
def test_wrong_images_are_refused(small: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small.generate({"prompt": TEXT, **given}, PARAMS)


def test_a_model_that_reads_text_says_so(folders: dict[str, Path]) -> None:
    frames = [np.zeros((24, 24, 3), np.uint8)] * 2
    with loaded(folders["qwen3_vl"], mmproj="none") as llm:
        with pytest.raises(UsageError, match="reads text only"):
            llm.generate({"prompt": TEXT, "multi_modal_data": {"image": b""}}, PARAMS)
        for video in (frames, (np.stack(frames), {"fps": 30})):
            content = [{"type": "video", "video": video}]
            with pytest.raises(UsageError, match="reads text only"):
                llm.chat([{"role": "user", "content": content}], PARAMS)


@pytest.mark.parametrize("name", [name for name in WITH_MMPROJ if name not in WITH_LIMITS])
def test_gguf_files_see_with_the_file_beside_them(
    name: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    text = save_gguf(model(name), folders[name], name)
    with loaded(text.parent) as llm:
        (output,) = llm.generate([prompt_of(llm, PARTS)], PARAMS)
        assert_right(output, name)
    beside = text.with_name("mmproj-tiny.gguf")
    apart = beside.rename(text.with_name("part.gguf"))
    with loaded(text) as llm, pytest.raises(UsageError, match="reads text only"):
        llm.generate({"prompt": "<|image_pad|>", "multi_modal_data": {"image": b""}}, PARAMS)
    with loaded(text, mmproj=str(apart)) as llm:
        (output,) = llm.generate([prompt_of(llm, PARTS)], PARAMS)
        assert_right(output, name)
    for wrong, message in (
        (str(beside), "no such file, but mmproj names it"),
        (str(text), "but Octavo does not support it"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            loaded(text, mmproj=wrong)
    check_beside(text, "but Octavo does not support it", caplog)
    check_beside(text, "2 files may be its vision encoder: name one with --mmproj", caplog)


@pytest.mark.parametrize("name", WITH_LIMITS)
def test_gguf_files_have_the_same_encoder(name: str, folders: dict[str, Path]) -> None:
    text = save_gguf(model(name), folders[name], name)
    with closing(open_checkpoint(text)) as own, closing(open_checkpoint(folders[name])) as judge:
        found, right = open_vision(own, str(text.with_name("mmproj-tiny.gguf"))), open_vision(judge)
        assert found is not None
        assert right is not None
        assert (found.config.sight, found.processor.patch_size) == (right.config.sight, right.processor.patch_size)
        np.testing.assert_allclose(
            encoded(found, right, PICTURES[1]), encoded(right, right, PICTURES[1]), rtol=0, atol=1e-5
        )
        # The files do not say the sizes of images, which are the published ones.
        assert found.processor.layout(96, 96).num_tokens == (144 if name == "lfm2_vl" else 256)
        found.close()


def test_internvl_as_its_authors_publish_it(folders: dict[str, Path]) -> None:
    own = save_own_internvl(model("internvl"), folders["internvl"])
    with loaded(own) as llm:
        (output,) = llm.generate([prompt_of(llm, PARTS)], PARAMS)
        assert_right(output, "internvl")


def check_beside(text: Path, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    """With one more file of no known projector beside it, which may be another model's, a model still reads text."""
    shutil.copy(text, text.with_name(f"mmproj-{len(problem)}.gguf"))
    caplog.clear()
    with loaded(text) as llm:
        assert len(llm.generate([TEXTS[0]], PARAMS)[0].outputs[0].token_ids) == NUM_TOKENS
    assert f"{text} reads text only: " in caplog.text
    assert problem in caplog.text
    with closing(open_checkpoint(text)) as checkpoint:
        config = EngineConfig(model=str(text))
        assert why_no_images(config, checkpoint, None).startswith("reads text only: no mmproj file next to it fits")


@pytest.fixture(scope="module")
def gguf_folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "qwen3_vl"
    shutil.copytree(folders["qwen3_vl"], folder)
    return save_gguf(model("qwen3_vl"), folder, "qwen3_vl").parent


def test_a_gguf_file_says_how_many_features_of_images_are_added(gguf_folder: Path) -> None:
    """Without it llama.cpp takes the part that sees for another model's."""
    with closing(open_gguf(gguf_folder / "text.gguf")) as file:
        assert file.metadata["qwen3vl.n_deepstack_layers"] == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, "mmproj-tiny.gguf"),
        (empty, "mmproj-tiny.gguf"),
        (lambda path: rewritten(path, b"qwen3vl_merger", b"qwen9vl_merger"), "qwen9vl_merger"),
        (lambda path: rewritten(path, b"clip.vision.block_count", b"clip.vision.block_cOunt"), "block_count"),
        (lambda path: rewritten(path, b"v.blk.1.ln1.weight", b"v.blk.1.ln7.weight"), "ln1|norm1"),
    ],
)
def test_what_is_damaged_beside_a_model_does_not_stop_its_text(
    damage: Callable[[Path], None],
    problem: str,
    gguf_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning names it; named by the option, it is refused."""
    shutil.copytree(gguf_folder, tmp_path, dirs_exist_ok=True)
    text, beside = tmp_path / "text.gguf", tmp_path / "mmproj-tiny.gguf"
    damage(beside)
    with loaded(text) as llm:
        assert len(llm.generate([TEXTS[0]], PARAMS)[0].outputs[0].token_ids) == NUM_TOKENS
        with pytest.raises(UsageError, match="reads text only"):
            llm.generate({"prompt": "<|image_pad|>", "multi_modal_data": {"image": b""}}, PARAMS)
    (warning,) = [record.message for record in caplog.records if "reads text only" in record.message]
    assert str(beside) in warning
    assert re.search(problem, warning)
    with pytest.raises(ModelLoadError, match=problem):
        loaded(text, mmproj=str(beside))
    caplog.clear()
    with loaded(text, mmproj="none") as llm:
        assert len(llm.generate([TEXTS[0]], PARAMS)[0].outputs[0].token_ids) == NUM_TOKENS
    assert "reads text only" not in caplog.text


def test_a_file_that_sees_is_for_gguf_models(folders: dict[str, Path], tmp_path: Path) -> None:
    text = shutil.copytree(folders["qwen3_vl"], tmp_path / "text")
    config = json.loads((text / "config.json").read_text())
    del config["vision_config"]
    (text / "config.json").write_text(json.dumps(config))
    for folder in (folders["qwen3_vl"], text):
        with pytest.raises(ModelLoadError, match=r"mmproj 'x.gguf' is for GGUF models; .* leave mmproj out"):
            loaded(folder, mmproj="x.gguf")


def test_plan_and_show_count_what_sees(folders: dict[str, Path]) -> None:
    memory, totals = MemoryBudget(MemoryBudget.with_usable(1 << 30)), []
    with closing(open_checkpoint(folders["qwen3_vl"])) as checkpoint:
        for mmproj in (None, "none"):
            config = EngineConfig(model="m", backend="cpu", mmproj=mmproj)
            needs = memory_needs(checkpoint, 64, 1, memory, config)
            totals.append(needs.total_bytes)
            if mmproj is None:
                assert needs.images is not None
                seeing, images = needs.images.total_bytes, needs.images
            else:
                assert needs.images is None
    assert totals[0] - totals[1] == seeing == images.weight_bytes + images.workspace_bytes + images.cache_bytes
    assert images.square_tokens == 64  # 4096 pixels at most, blocks of 8 x 8
    for command, tokens in ((plan, 64), (show, 64)):
        shown = CliRunner().invoke(command, [str(folders["qwen3_vl"])], catch_exceptions=False).output
        assert f"1024 x 1024 pixels take {tokens} tokens" in shown
