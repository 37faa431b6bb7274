"""`octavo convert --mmproj` against hand-made mmproj files and the encoders of safetensors checkpoints."""

from __future__ import annotations

import re
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from octavo.cli.quantize import convert
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.loader.vision import open_vision
from tests.support import tiny_vision
from tests.support.tiny_vision.family import SPECIALS
from tests.support.tiny_vision.mmproj import encoded, save_mmproj

WITH_MMPROJ = [name for name, family in tiny_vision.FAMILIES.items() if family.mmproj is not None]
FURTHER = ["qwen3_5", "qwen3_vl-plain", "internvl-large", "lfm2_vl-plain", "qwen2_5_vl-wide"]
# llama.cpp ignores these keys in some families; the second table names wrong values of the hand-made files.
UNUSED = {"clip.vision.image_size", "general.name"}
OTHERWISE = {
    "gemma4_unified": {"clip.vision.feed_forward_length", "clip.vision.attention.head_count"},
    "llava": {"clip.vision.attention.layer_norm_epsilon"},
    "mistral3": {"clip.vision.attention.layer_norm_epsilon"},
}
PICTURE = tiny_vision.picture(1, 24, 56)
model = cache(tiny_vision.tiny_model)


def saved(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Save a tiny model with weights of this type."""
    tiny_vision.save(model(name), folder, name)
    if dtype != "float32":
        tiny_vision.tiny_model(name).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(convert, [str(argument) for argument in arguments])


def written(folder: Path, *options: str) -> Path:
    """Write the mmproj file of the model in `folder`, next to the folder."""
    path = folder.with_name("mmproj-model.gguf")
    result = run(folder, path, "--mmproj", *options)
    assert result.exit_code == 0, result.output
    return path


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in (*WITH_MMPROJ, *FURTHER)), ("qwen3_vl", "float16"), ("gemma3", "float16")],
)
def test_a_written_file_encodes_as_the_checkpoint(name: str, dtype: str, tmp_path: Path) -> None:
    """To the same bits, except for Gemma 4: its files order the values of a patch differently."""
    folder, text_path = saved(name, tmp_path / "model", dtype), tmp_path / "model.gguf"
    path = written(folder)
    assert run(folder, text_path).exit_code == 0
    with closing(open_checkpoint(folder)) as checkpoint, closing(open_checkpoint(text_path)) as text:
        right, found = open_vision(checkpoint), open_vision(text, str(path))
        assert right is not None
        assert found is not None
        tolerance = 1e-5 if name.startswith("gemma4") else 0
        np.testing.assert_allclose(encoded(found, right, PICTURE), encoded(right, right, PICTURE), tolerance, tolerance)
        found.close()


@pytest.mark.parametrize("name", WITH_MMPROJ)
def test_a_written_file_has_the_tensors_and_keys_that_llama_cpp_reads(name: str, tmp_path: Path) -> None:
    save_mmproj(model(name), tmp_path / "hand-made.gguf", name)
    with (
        closing(open_gguf(tmp_path / "hand-made.gguf")) as right,
        closing(open_gguf(written(saved(name, tmp_path / "m")))) as found,
    ):
        assert found.tensors.keys() == right.tensors.keys()
        for tensor in right.tensors.keys() - {"v.token_embd.img_break"}:  # of zeros in the hand-made file
            a, b = found.source(tensor), right.source(tensor)
            assert (a.shape, a.type_name) == (b.shape, b.type_name), tensor
            assert np.array_equal(a.make().dequantize(), b.make().dequantize()), tensor
        assert right.metadata.keys() - found.metadata.keys() == set()
        for key in right.metadata.keys() - UNUSED - OTHERWISE.get(name, set()):
            assert np.array_equal(found.metadata[key], right.metadata[key]), key


def test_the_break_between_rows_is_that_of_the_text_model(tmp_path: Path) -> None:
    table = model("mistral3").get_input_embeddings().weight.detach().numpy()
    with closing(open_gguf(written(saved("mistral3", tmp_path / "model")))) as file:
        found = file.source("v.token_embd.img_break").make().dequantize()
    assert np.array_equal(found, table[SPECIALS.index("[IMG_BREAK]")])


def test_places_and_kernels_have_types_that_llama_cpp_computes_with(tmp_path: Path) -> None:
    with closing(open_gguf(written(saved("gemma3", tmp_path / "model"), "--dtype", "bf16"))) as file:
        types = {name: file.source(name).type_name for name in file.tensors}
    assert types["v.blk.0.attn_q.weight"] == "BF16"
    assert {types[name] for name in ("v.position_embd.weight", "v.patch_embd.weight", "v.post_ln.weight")} == {"F32"}


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    """The layers of Qwen 2.5 VL that see the whole image must be evenly spaced."""
    result = run(saved("qwen2_5_vl-windows", tmp_path / "model"), tmp_path / "mmproj.gguf", "--mmproj")
    assert result.exit_code != 0
    assert "mmproj files cannot express this encoder's full_layers" in str(result.exception)
    assert not (tmp_path / "mmproj.gguf").exists()


def test_sizes_of_images_that_a_file_cannot_say_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(saved("gemma4", tmp_path / "model"))
    assert "mmproj files cannot express these image settings: max_tokens" in caplog.text


def test_an_encoder_without_a_form_is_refused(tmp_path: Path) -> None:
    result = run(saved("granite_docling", tmp_path / "model"), tmp_path / "mmproj.gguf", "--mmproj")
    assert "llama.cpp does not support its image encoder, granite_docling; it supports gemma3" in str(result.exception)


@pytest.mark.parametrize(
    ("destination", "options", "problem"),
    [
        ("encoder.gguf", (), "the name must contain 'mmproj' so that Octavo finds the file; use .*mmproj-encoder.gguf"),
        ("mmproj.gguf", ("--to", "safetensors"), "leave out --to safetensors"),
        ("mmproj.gguf", ("--lora", "adapter"), "leave out --lora"),
        ("mmproj.gguf", ("--max-part-size", "1GiB"), "leave out --max-part-size"),
    ],
)
def test_options_that_do_not_go_with_mmproj_are_refused(
    destination: str, options: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    result = run(tmp_path, tmp_path / destination, "--mmproj", *options)
    assert re.search(problem, str(result.exception))


def test_a_text_model_has_no_mmproj_file(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    assert run(saved("gemma3", tmp_path / "model"), text).exit_code == 0
    result = run(text, tmp_path / "mmproj.gguf", "--mmproj")
    assert "an mmproj file is made from a safetensors checkpoint" in str(result.exception)
