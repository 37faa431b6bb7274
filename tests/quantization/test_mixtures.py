"""Several formats in one checkpoint, and formats without a kernel: they run, and say their cost once."""

from __future__ import annotations

import json
import logging
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig
from octavo.engine.loading.model_graph import model_sizes
from octavo.engine.loading.progress_bar import size
from octavo.engine.loading.weight_notes import growth_notes
from octavo.loader.checkpoint import open_checkpoint
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.quantization.test_checkpoints import NATIVE_TOLERANCE, RNG, layer_file
from tests.support import quantized_checkpoints, tiny_models
from tests.support.quantized_checkpoints import CASES, SLOWER, Packer, as_tensor, compressed, tiny_model, write

# Part of a layer's name -> its group's configuration, and its packer.
LAYOUTS: dict[str, tuple[dict[str, object], Packer]] = {
    "q_proj": (
        {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
        quantized_checkpoints.integers(8, None, packed=False),
    ),
    "k_proj": (
        {"format": "pack-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
        quantized_checkpoints.integers(8, None, packed=True),
    ),
    "gate_proj": (
        {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}},
        quantized_checkpoints.nvfp4,
    ),
    "up_proj": (
        {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        quantized_checkpoints.fp8("weight_scale", (1, None)),
    ),
    "down_proj": (
        {
            "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
        },
        quantized_checkpoints.integers(4, 64, packed=True, symmetric=False),
    ),
}


def test_a_group_for_each_kind_of_layer(tmp_path: Path) -> None:
    """Five formats by pattern, `v_proj` and `o_proj` on the ignore list, and the head plain."""
    model = tiny_model()
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        kind = next((kind for kind in LAYOUTS if name.endswith(f"{kind}.weight")), None)
        if kind is None:
            tensors[name] = parameter.detach().clone()
            continue
        packed = LAYOUTS[kind][1](parameter.detach().numpy(), RNG)
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{part}": as_tensor(array).contiguous() for part, array in packed.tensors.items()}
        parameter.data = as_tensor(packed.meaning).float()
    groups = {f"group_{i}": {"targets": [f"re:.*{kind}$"], **LAYOUTS[kind][0]} for i, kind in enumerate(LAYOUTS)}
    config = compressed("mixed-precision", {}) | {"config_groups": groups, "ignore": ["lm_head", r"re:.*[vo]_proj"]}
    save_file(tensors, tmp_path / "model.safetensors")
    text = model.config.to_dict() | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(text, default=str))
    checkpoint = open_checkpoint(tmp_path)
    types = Counter(checkpoint.weights.info(name).type_name for name in checkpoint.weights if "layers.0" in name)
    assert set(types) == {"I8_ROW", "NVFP4_16", "F8_E4M3_ROW", "I4_64_Z", "F32"}
    expected = tiny_models.expected_logits(model, TOKENS)
    assert_close(logits_of(checkpoint), expected)
    assert_close(logits_of(checkpoint, "cpu"), expected, NATIVE_TOLERANCE)


@pytest.mark.parametrize("case", ["gptq-4", "gptq-4-act-order", "awq-64", "w4a16", "nvfp4", "float-row", "llm-int8"])
@pytest.mark.parametrize("name", ["qwen2moe", "deepseek3"])
def test_experts_that_are_stored_one_by_one(name: str, case: str, tmp_path: Path) -> None:
    """They become stacks. Every expert is chosen, since a rounded activation may choose another one."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    count = {"qwen2moe": "num_experts", "deepseek3": "n_routed_experts"}[name]
    groups = {"shared_expert_intermediate_size": 128} if name == "qwen2moe" else {"topk_group": 4}
    chosen = getattr(tiny_models.CONFIGS[name](), count)
    model = tiny_models.tiny_model(name, **sizes, **groups, num_experts_per_tok=chosen)
    stored: dict[str, torch.Tensor] = {}
    plain = {tensor: torch.from_numpy(array.copy()) for tensor, array in tiny_models.stored_tensors(model).items()}
    experts = [tensor for tensor in plain if "experts." in tensor and tensor.endswith("_proj.weight")]
    for tensor in plain.keys() - experts:
        stored[tensor] = plain[tensor]
    for tensor in experts:
        packed = CASES[case][1](plain[tensor].numpy(), RNG)
        stem = tensor.removesuffix(".weight")
        stored |= {f"{stem}.{part}": as_tensor(array).contiguous() for part, array in packed.tensors.items()}
        plain[tensor] = as_tensor(packed.meaning).float()
    config = model.config.to_dict()
    folders = []
    for folder, tensors, more in (("plain", plain, {}), ("packed", stored, {"quantization_config": CASES[case][0]})):
        folders.append(tmp_path / folder)
        folders[-1].mkdir()
        save_file(tensors, folders[-1] / "model.safetensors")
        (folders[-1] / "config.json").write_text(json.dumps(config | more, default=str))
    assert len(experts) >= 3 * chosen
    expected, checkpoint = logits_of(open_checkpoint(folders[0])), open_checkpoint(folders[1])
    assert_close(logits_of(checkpoint), expected)
    assert_close(logits_of(checkpoint, "cpu"), expected, NATIVE_TOLERANCE)


@pytest.mark.parametrize("name", ["w8a8", "float-row", "fp8-tensor"])
def test_static_scales_of_activations_are_not_needed(name: str, tmp_path: Path) -> None:
    """W8A8 with static activations has their scale and zero point beside each weight; the result is the same."""
    model = tiny_model()
    write(model, tmp_path, *CASES[name])
    stored = load_file(tmp_path / "model.safetensors")
    for tensor in [tensor for tensor in stored if tensor.endswith("weight_scale")]:
        stem = tensor.removesuffix("weight_scale")
        stored |= {f"{stem}input_scale": torch.ones(1), f"{stem}input_zero_point": torch.zeros(1, dtype=torch.int8)}
    save_file(stored, tmp_path / "model.safetensors")
    assert_close(logits_of(open_checkpoint(tmp_path)), tiny_models.expected_logits(model, TOKENS))


@pytest.mark.parametrize("stored_zero", [0, 15])
@pytest.mark.parametrize("version", [1, 2])
def test_zeros_of_gptq_wrap_around_in_version_1(version: int, stored_zero: int, tmp_path: Path) -> None:
    """AutoGPTQ stores the zero less one in four bits: 15 is stored for a zero of 0. GPTQModel stores it as it is."""
    w = RNG.normal(size=(32, 64)).astype("f4")
    packed = quantized_checkpoints.gptq(4, 32, symmetric=False, version=version)(w, RNG)
    tensors: dict[str, Any] = dict(packed.tensors)
    tensors["qzeros"] = tensors["qzeros"] * 0 + (0 if stored_zero == 0 else -1)
    config = CASES["gptq-4"][0] | {"group_size": 32, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    [weight] = layer_file(tmp_path / "x.safetensors", tensors, config)
    zeros = getattr(weight.make(), "zeros")  # noqa: B009 - of grouped weights
    assert set(zeros.reshape(-1).tolist()) == {(stored_zero + (version == 1)) % 16}


@pytest.mark.parametrize("name", CASES)
def test_a_format_has_a_kernel_of_its_own(name: str, tmp_path: Path) -> None:
    write(tiny_model(), tmp_path, *CASES[name])
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        sizes = model_sizes(checkpoint, EngineConfig(), 64)
    assert growth_notes(sizes) == []
    packed = [m for m in sizes.matrices.values() if m.type_name != "F32"]
    assert packed
    assert all(m.packed_bytes <= 2 * m.stored_bytes for m in packed)


@pytest.mark.parametrize("name", SLOWER)
def test_what_has_no_kernel_runs_and_says_its_cost_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for all layers of a type, with the memory that its weights really take."""
    from octavo import LLM, SamplingParams

    config, packer, stored_as, packed_as = SLOWER[name]
    model = tiny_model()
    write(model, tmp_path, config, packer)
    save_tokenizer(tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        matrices = [m for m in model_sizes(checkpoint, EngineConfig(), 64).matrices.values() if m.type_name != "F32"]
        assert {(m.type_name, m.packed_as) for m in matrices} == {(stored_as, packed_as)}
        assert_close(logits_of(checkpoint, "cpu"), tiny_models.expected_logits(model, TOKENS), NATIVE_TOLERANCE)
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path)) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, detokenize=False))
    (note,) = [text for text in caplog.messages if "has no kernel of its own" in text]
    stored, packed = (sum(getattr(m, f"{kind}_bytes") for m in matrices) for kind in ("stored", "packed"))
    assert f"{stored_as} has no kernel of its own: its weights are kept as {packed_as} and take " in note
    assert f"{packed / stored:.1f} times their size in the file, {size(packed)} instead of {size(stored)}" in note
    assert "Reading them takes about that many times as long" in note
    assert ("prompts take longer too, because products are computed in floats" in note) == (packed_as == "F16")


def save_tokenizer(directory: Path) -> None:
    """A vocabulary of 96 single characters."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE({chr(33 + i): i for i in range(96)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_gptq_with_bits_of_its_own(tied: bool, tmp_path: Path) -> None:
    """`lm_head` of GPTQModel: eight bits by `dynamic` beside four. The embedding is plain, whatever `tie_...` says."""
    model = tiny_model()
    dynamic = {r"+:.*lm_head.*": {"bits": 8, "group_size": 32}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "lm_head": True, "dynamic": dynamic}
    write(model, tmp_path, config, quantized_checkpoints.gptq(4, 64, symmetric=True))
    head = quantized_checkpoints.gptq(8, 32, symmetric=True)(model.lm_head.weight.detach().numpy(), RNG)
    model.lm_head.weight = torch.nn.Parameter(as_tensor(head.meaning))
    stored = load_file(tmp_path / "model.safetensors")
    stored.pop("lm_head.weight", None)
    stored |= {f"lm_head.{part}": as_tensor(array).contiguous() for part, array in head.tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(text))
    checkpoint = open_checkpoint(tmp_path)
    types = {name: checkpoint.weights.info(name).type_name for name in checkpoint.weights}
    assert (types["lm_head.weight"], types["embed_tokens.weight"]) == ("I8_32", "F32")
    assert types["layers.0.mlp.up_proj.weight"] == "I4_64"
    expected = tiny_models.expected_logits(model, TOKENS)
    assert_close(logits_of(checkpoint), expected)
    assert_close(logits_of(checkpoint, "cpu"), expected, NATIVE_TOLERANCE)
