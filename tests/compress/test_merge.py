"""`octavo convert --lora`: PEFT's `merge_and_unload` is the judge of the weights, and of the logits of GGUF files."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from tests.compress.test_convert import run, save
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support.peft_adapters import save_peft
from tests.support.tiny_models import expected_logits

peft = pytest.importorskip("peft", reason="peft is not installed", exc_type=ImportError)

SETTINGS: dict[str, dict[str, Any]] = {
    "llama-tied-biased": {"rank_pattern": {"q_proj": 8}, "use_rslora": True},
    "phi3": {},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "qwen3": {"target_modules": ["q_proj", "down_proj"]},
    "gemma3": {"lora_alpha": 0.5},
    "qwen2moe": {"target_modules": ["q_proj", "o_proj", "shared_expert.up_proj"]},
    "mixtral": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def adapted(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, settings: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """A base and an adapter of PEFT with random factors for it."""
    base = save(name, folder / "base", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    save_peft(model, folder / "adapter", TOKENS, **(SETTINGS[name] if settings is None else settings))
    return base, folder / "adapter"


def judged(base: Path, adapter: Path) -> PreTrainedModel:
    """PEFT's merge in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: PreTrainedModel = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    return merged


@pytest.mark.parametrize("name", SETTINGS)
def test_the_weights_are_those_of_peft(name: str, tmp_path: Path) -> None:
    base, adapter = adapted(name, tmp_path)
    code, _, error = run(base, tmp_path / "merged", "--to", "safetensors", "--lora", adapter)
    assert code == 0, error
    expected = judged(base, adapter).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    changed = 0
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)
        is_changed = not torch.equal(expected[key], before[key])
        assert is_changed or torch.equal(tensor, before[key])
        changed += is_changed
    assert changed >= 6


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"use_dora": True}),
        ("phi3", {"use_dora": True}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    ],
)
def test_magnitudes_embeddings_and_whole_weights_are_merged(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter = adapted(name, tmp_path, settings=settings)
    code, _, error = run(base, tmp_path / "merged", "--to", "safetensors", "--lora", adapter)
    assert code == 0, error
    expected = judged(base, adapter).state_dict()
    for key, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_gguf_files_have_the_logits_of_peft(name: str, form: str, tmp_path: Path) -> None:
    base, adapter = adapted(name, tmp_path)
    source = base
    if form == "gguf":
        source = tmp_path / "base.gguf"
        assert run(base, source)[0] == 0
    code, _, error = run(source, tmp_path / "merged.gguf", "--lora", adapter)
    assert code == 0, error
    with closing(open_checkpoint(tmp_path / "merged.gguf")) as checkpoint:
        assert_close(logits_of(checkpoint), expected_logits(judged(base, adapter), TOKENS))
    if form == "gguf":
        before, after = open_gguf(source), open_gguf(tmp_path / "merged.gguf")
        assert before.tensors.keys() == after.tensors.keys()
        same = [n for n in before.tensors if np.array_equal(before.array(n), after.array(n))]
        assert "token_embd.weight" in same
        assert "blk.0.attn_norm.weight" in same


def test_a_gguf_base_becomes_a_folder(tmp_path: Path) -> None:
    base, adapter = adapted("phi3", tmp_path)
    assert run(base, tmp_path / "base.gguf")[0] == 0
    code, _, error = run(tmp_path / "base.gguf", tmp_path / "merged", "--to", "safetensors", "--lora", adapter)
    assert code == 0, error
    expected, found = judged(base, adapter).state_dict(), load_file(tmp_path / "merged" / "model.safetensors")
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)


def test_narrow_weights_are_rounded_once(tmp_path: Path) -> None:
    """Each is the float32 sum in bfloat16; PEFT would round the product too."""
    base, adapter = adapted("qwen3", tmp_path, torch.bfloat16)
    code, _, error = run(base, tmp_path / "merged", "--to", "safetensors", "--lora", adapter)
    assert code == 0, error
    expected = judged(base, adapter).state_dict()
    for path in sorted((tmp_path / "merged").glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            assert tensor.dtype == torch.bfloat16
            exact = expected[key]
            nearest = (tensor.float() - exact).abs() <= (exact.to(torch.bfloat16).float() - exact).abs() + 1e-6
            assert nearest.all(), key


def test_scales_and_several_adapters(tmp_path: Path) -> None:
    base, adapter = adapted("llama-tied-biased", tmp_path)
    key = "model.layers.0.self_attn.q_proj.weight"
    for target, options in {"once": [adapter], "twice": [adapter, adapter], "half": [f"{adapter}:0.5"]}.items():
        given = [part for each in options for part in ("--lora", each)]
        code, _, error = run(base, tmp_path / target, "--to", "safetensors", *given)
        assert code == 0, error
    plain, once, twice, half = (
        load_file(tmp_path / n / "model.safetensors")[key] for n in ("base", "once", "twice", "half")
    )
    torch.testing.assert_close(twice - plain, 2 * (once - plain), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(half - plain, (once - plain) / 2, rtol=1e-4, atol=1e-6)


def test_adapters_that_cannot_be_merged(tmp_path: Path) -> None:
    """Each is refused by name before anything is written."""
    base, adapter = adapted("llama-tied-biased", tmp_path)
    assert "no such file or directory" in run(base, tmp_path / "m.gguf", "--lora", tmp_path / "nothing:x")[2]
    error = run(base, tmp_path / "m.gguf", "--lora", f"{adapter}:inf")[2]
    assert "the scale of an adapter must be a finite number" in error
    head = tmp_path / "head"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    save_peft(model, head, TOKENS, target_modules=["lm_head"])
    error = run(base, tmp_path / "m.gguf", "--lora", head)[2]
    assert "the output head, but the embedding and the output head are one weight" in error
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alora_invocation_tokens": [1, 2]}))
    assert "alora_invocation_tokens" in run(base, tmp_path / "m.gguf", "--lora", adapter)[2]
    assert not (tmp_path / "m.gguf").exists()
