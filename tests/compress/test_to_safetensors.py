"""Folders for transformers: from GGUF files and back, the same bytes, tokens and logits; and other float types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.tokenizer import load_tokenizer
from tests.compress.test_convert import SAMPLING, run, save
from tests.models.test_parity import TOKENS, logits_of
from tests.support.directory_tokenizers import KINDS, TEMPLATE
from tests.support.vocabularies import VALID_STRINGS

# The cases of families with a form for safetensors (`HF` in `octavo.compress.forms`).
BACK = [
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3-softcap",
    "granite",
    "llama",
    "llama-linear",
    "llama-llama3-rope",
    "llama-tied-biased",
    "llama-yarn",
    "phi3",
    "phi3-longrope",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "smollm3",
    "stablelm",
    "stablelm-parallel",
    "stablelm-qk-norm",
    "starcoder2",
    "step35",
]


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize("name", BACK)
def test_gguf_and_back_is_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    """The tensors of the first checkpoint, bit by bit, under their names; transformers opens it: the same logits."""
    source, path, back = save(name, tmp_path / "model"), tmp_path / "m.gguf", tmp_path / "back"
    assert run(source, path)[0] == 0
    code, out, error = run(path, back, "--to", "safetensors")
    assert code == 0, error
    assert "of weights" in out
    before, after = loaded(source), loaded(back)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if "norm" in key and name.startswith(("gemma", "step35")):  # stored as 1 + weight in GGUF files
            torch.testing.assert_close(after[key], tensor, rtol=0, atol=1.2e-7)
        else:
            assert torch.equal(after[key], tensor), key
    ids = torch.tensor([TOKENS])
    logits = [AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (source, back)]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-5 * float(logits[0].detach().abs().max()))
    with closing(open_checkpoint(back)) as checkpoint:
        np.testing.assert_allclose(logits_of(checkpoint), logits[1][0].detach().numpy(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_is_the_same(kind: str, tmp_path: Path) -> None:
    source, path, back = save("llama", tmp_path / "model", kind), tmp_path / "m.gguf", tmp_path / "back"
    assert run(source, path)[0] == 0
    code, _, error = run(path, back, "--to", "safetensors")
    assert code == 0, error
    with closing(open_checkpoint(path)) as checkpoint:
        original = load_tokenizer(checkpoint)
    with closing(open_checkpoint(back)) as checkpoint:
        written = load_tokenizer(checkpoint)
    judge = AutoTokenizer.from_pretrained(back)
    for text in VALID_STRINGS:
        for parse in (False, True):
            assert written.encode(text, parse_special=parse) == original.encode(text, parse_special=parse), text
        ids = original.encode(text, add_special_tokens=False, parse_special=True)
        assert judge(text, add_special_tokens=False)["input_ids"] == ids, text
    ids = original.encode("Hello, world! two  spaces")
    assert judge("Hello, world! two  spaces")["input_ids"] == ids
    assert judge.decode(ids, skip_special_tokens=True) == "Hello, world! two  spaces"
    assert judge.chat_template == written.template_source() == TEMPLATE
    assert written.eos_token_ids == original.eos_token_ids
    config = json.loads((back / "generation_config.json").read_text())
    assert {key: config[key] for key in SAMPLING} == SAMPLING
    assert config["do_sample"] is True


def test_another_type_and_shards(tmp_path: Path) -> None:
    source, folder = save("llama", tmp_path / "model"), tmp_path / "half"
    code, _, error = run(source, folder, "--to", "safetensors", "--dtype", "bf16", "--max-part-size", "100kB")
    assert code == 0, error
    assert (folder / "model.safetensors.index.json").is_file()
    before, after = loaded(source), loaded(folder)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor.to(torch.bfloat16)), key
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for path in folder.glob("*.safetensors"):
        assert sum(t.nbytes for t in load_file(path).values()) <= 100_000 or len(load_file(path)) == 1


def test_a_quantized_file_needs_a_type(tmp_path: Path) -> None:
    from tests.compress.models import write_model
    from tests.compress.test_quantize import run as quantize

    plain, small = write_model(tmp_path / "plain.gguf"), tmp_path / "small.gguf"
    assert quantize(plain, small, "--type", "q8_0")[0] == 0
    assert "choose the new type with --dtype" in run(small, tmp_path / "a", "--to", "safetensors")[2]
    code, _, error = run(small, tmp_path / "a", "--to", "safetensors", "--dtype", "f32")
    assert code == 0, error
    with closing(open_checkpoint(small)) as before, closing(open_checkpoint(tmp_path / "a")) as after:
        for name in before.weights:
            expected = before.weights[name].dequantize()
            np.testing.assert_array_equal(after.weights[name].dequantize(), expected)


def test_destinations_that_are_refused(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    assert "this is the source" in run(source, source, "--to", "safetensors", "--force")[2]
    taken = tmp_path / "taken"
    taken.mkdir()
    assert "already exists; --force replaces it" in run(source, taken, "--to", "safetensors")[2]
    (taken / "letters.txt").write_text("dear")
    assert "--force only replaces a model's folder" in run(source, taken, "--to", "safetensors", "--force")[2]
    assert (taken / "letters.txt").exists()
    (taken / "config.json").write_text("{}")
    assert run(source, taken, "--to", "safetensors", "--force")[0] == 0
    assert not (taken / "letters.txt").exists()
    assert "is a folder; give it a name" in run(source, tmp_path / "m.gguf", "--to", "safetensors")[2]
    assert "no such directory" in run(source, tmp_path / "a" / "b", "--to", "safetensors")[2]


def test_an_architecture_without_a_way_back(tmp_path: Path) -> None:
    source, path = save("gpt2", tmp_path / "model"), tmp_path / "m.gguf"
    assert run(source, path)[0] == 0
    code, _, error = run(path, tmp_path / "back", "--to", "safetensors")
    assert code != 0
    assert "'gpt2' cannot be written as safetensors yet; supported are gemma, gemma2" in error
    assert not (tmp_path / "back").exists()


def test_a_tensor_with_nan_leaves_no_folder(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    [path] = source.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    code, _, error = run(source, tmp_path / "half", "--to", "safetensors", "--dtype", "f16")
    assert code != 0
    assert "up_proj.weight" in error
    assert "it contains NaN or infinity" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_kill_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    """Killed while it writes, the command leaves `NAME.partial`, which the next attempt replaces."""
    source = save("llama", tmp_path / "model")
    code = (
        "import os, signal, octavo.loader.safetensors_writer as w\n"
        "real = w.AtomicFile.complete\n"
        "w.AtomicFile.complete = lambda self: os.kill(os.getpid(), signal.SIGKILL) if 'model' in self.path.name "
        "else real(self)\n"
        "from octavo.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "half"), "--to", "safetensors"]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ)
    assert done.returncode == -9
    assert not (tmp_path / "half").exists()
    with pytest.raises(ModelLoadError):
        open_checkpoint(tmp_path / "half.partial")
    assert run(source, tmp_path / "half", "--to", "safetensors")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "model"]
