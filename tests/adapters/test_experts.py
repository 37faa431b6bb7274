"""Adapters beside routed experts that are no stacks of PEFT: one tensor an expert, GGUF files, parts of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from octavo import LLM, LoRARequest, SamplingParams
from octavo.adapters.adapter import Adapter
from octavo.adapters.description import describe_adapter
from octavo.adapters.read import read_adapter
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from tests.compress.test_convert import save
from tests.support import adapted_steps, tiny_models
from tests.support.peft_adapters import save_peft

peft = pytest.importorskip("peft", reason="peft is not installed", exc_type=ImportError)

TOKENS = np.random.default_rng(0).integers(0, 96, 30).tolist()
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK = 3


def per_expert(folder: Path) -> Path:
    """A PEFT folder as versions before fused experts wrote it for Mixtral: factors of single experts."""
    rng, tensors = np.random.default_rng(4), {}
    for layer, expert, part in [(i, e, w) for i in range(3) for e in range(4) for w in ("w1", "w2", "w3")]:
        out_features, in_features = (64, 96) if part == "w2" else (96, 64)
        stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
        for suffix, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
            numbers = rng.standard_normal(shape) * shape[1] ** -0.5
            tensors[f"{stem}.lora_{suffix}.weight"] = torch.tensor(numbers).bfloat16().float().numpy()
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["w1", "w2", "w3"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def save_gguf(adapter: Adapter, path: Path, alpha: float) -> Path:
    """The parts beside experts as llama.cpp's converter writes them: [experts, rank, in] and [experts, out, rank]."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, part in adapter.parts.items():
        layer, kind = re.fullmatch(r"layers\.(\d+)\.mlp\.experts\.(\w+)_proj\.weight", name).groups()  # type: ignore[union-attr]
        assert part.a is not None
        writer.add_tensor(f"blk.{layer}.ffn_{kind}_exps.weight.lora_a", np.ascontiguousarray(part.a))
        b = part.b * np.float32(part.scale * part.rank / alpha)
        writer.add_tensor(f"blk.{layer}.ffn_{kind}_exps.weight.lora_b", np.ascontiguousarray(b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(checkpoint_folder: Path, adapter: Path, backend: str) -> NDArray[np.float32]:
    checkpoint = open_checkpoint(checkpoint_folder)
    found = read_adapter(adapter, adapted_steps.base_of(checkpoint))
    executor = adapted_steps.executor_of(checkpoint, backend)
    adapted_steps.load(executor, {1: found})
    [logits] = adapted_steps.logits_of(executor, [TOKENS], [1])
    executor.close()
    checkpoint.close()
    return logits


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
def test_a_tensor_for_each_expert(backend: str, tmp_path: Path) -> None:
    """PEFT joins them for the fused experts that transformers has now."""
    model = tiny_models.tiny_model("mixtral")
    folder = tiny_models.save_safetensors(model, tmp_path / "model")
    adapter = per_expert(tmp_path / "adapter")
    found = logits_of(folder, adapter, backend)
    unchanged = tiny_models.expected_logits(model, TOKENS)
    expected = tiny_models.expected_logits(peft.PeftModel.from_pretrained(model, adapter).eval(), TOKENS)
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < scale * (1e-4 if backend == "reference" else 3e-3)
    assert np.abs(expected - unchanged).max() > 0.1 * scale


def test_gguf_files_mean_the_same(tmp_path: Path) -> None:
    model = tiny_models.tiny_model("mixtral")
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path / "model"))
    save_peft(model, tmp_path / "adapter", TOKENS, target_parameters=STACKS)
    base = adapted_steps.base_of(checkpoint)
    plain = read_adapter(tmp_path / "adapter", base)
    converted = read_adapter(save_gguf(plain, tmp_path / "adapter.gguf", 6.0), base)
    assert converted.parts.keys() == plain.parts.keys()
    assert len(plain.parts) == 9
    for name, part in plain.parts.items():
        weight = np.zeros(part.shape, np.float32)
        np.testing.assert_allclose(converted.parts[name].merged(weight), part.merged(weight), atol=1e-6)
    facts = describe_adapter(tmp_path / "adapter"), describe_adapter(tmp_path / "adapter.gguf")
    assert [each.ranks for each in facts if each is not None] == [{4: 6}, {4: 9}]
    assert facts[0] is not None
    assert (facts[0].modules, facts[0].problem) == ({"down_proj": 3, "gate_up_proj": 3}, None)
    checkpoint.close()


def test_factors_that_no_expert_has(tmp_path: Path) -> None:
    model = tiny_models.tiny_model("mixtral")
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path / "model"))
    save_peft(model, tmp_path / "adapter", TOKENS, target_parameters=STACKS)
    base, path = adapted_steps.base_of(checkpoint), tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    stem = "base_model.model.model.layers.0.mlp.experts.lora_"
    for count, message in (
        (15, "has 15 rows, not a multiple of the rank 4"),
        (12, r"is for a weight of \[3, 64, 96\]"),
    ):
        a, b = tensors[f"{stem}A.weight"][:count], np.ascontiguousarray(tensors[f"{stem}B.weight"][:, :count])
        save_file({**tensors, f"{stem}A.weight": a, f"{stem}B.weight": b}, path)
        with pytest.raises(ModelLoadError, match=rf"experts\.lora_A\.weight' {message}"):
            read_adapter(tmp_path / "adapter", base)
    checkpoint.close()


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_ranks_have_their_parts_of_experts(options: dict[str, object], tmp_path: Path) -> None:
    """Columns of each expert, whole experts, and layers."""
    model = str(save("qwen2moe", tmp_path / "model"))
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    save_peft(judge, tmp_path / "adapter", TOKENS, target_parameters=STACKS, lora_alpha=24)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests, prompts = [LoRARequest("a", 1, tmp_path / "adapter"), None], [list(range(20, 50)), list(range(20, 50))]
    found = []
    for more in ({}, options):
        sizes = {"num_threads": 1, "max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory": 1 << 20}
        with LLM(model, enable_lora=True, **sizes, **more) as llm:  # type: ignore[arg-type]
            outputs = llm.generate(prompts, sampling, lora_request=requests)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
