"""Adapters of eight families against PEFT on the same float32 model, on bases of both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.adapters.read import read_adapter
from octavo.loader.checkpoint import open_checkpoint
from tests.support import adapted_steps, converted_gguf, tiny_models
from tests.support.peft_adapters import save_peft

pytest.importorskip("peft", reason="peft is not installed", exc_type=ImportError)

TOKENS = np.random.default_rng(0).integers(0, 96, 30).tolist()
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"rank_pattern": {"q_proj": 8, r".*layers\.1\..*up_proj": 2}, "alpha_pattern": {"k_proj": 11}},
    "qwen2": {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]},
    "qwen3": {"rank_pattern": {"o_proj": 1}},
    "phi3": {},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "gemma3": {"lora_alpha": 3.5},
    "deepseek2": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "qwen2moe": {"target_modules": ["q_proj", "o_proj", "shared_expert.up_proj", "shared_expert.down_proj"]},
}


# Changes that are more than a low-rank product beside a weight, by the name of the model and what it has of them.
MORE: dict[str, dict[str, Any]] = {
    "llama magnitudes": {"use_dora": True},
    "phi3 magnitudes": {"use_dora": True},
    "gpt2 magnitudes": {**SETTINGS["gpt2"], "use_dora": True},
    "qwen2 magnitudes": {**SETTINGS["qwen2"], "use_dora": True},
    "llama embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "gemma3 embedding": {"target_modules": ["embed_tokens", "lm_head", "up_proj"], "use_rslora": True},
    "gpt2 embedding": {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True},
    "llama embedding with magnitudes": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "qwen2 whole": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "phi3 whole": {"modules_to_save": ["lm_head"]},
    "gemma3 whole": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "gemma3 tied": {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True},
}

# Stacks of experts by their names, as transformers has them: [out, in] and, in gpt-oss and Llama 4, [in, out].
_STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral experts": {"target_modules": ["q_proj"], "target_parameters": _STACKS, "seed": 1},
    "qwen3moe experts and router": {"target_parameters": [*_STACKS, "mlp.gate.weight"], "use_rslora": True},
    "qwen2moe down": {"target_parameters": _STACKS[1:], "rank_pattern": {r".*layers\.1\..*down_proj": 2}},
    "gpt-oss experts": {"target_parameters": _STACKS, "alpha_pattern": {"mlp.experts.down_proj": 9}},
    "llama4 experts": {"target_parameters": [x.replace("mlp", "feed_forward") for x in _STACKS], "lora_alpha": 24},
    "gemma4-experts experts": {"target_parameters": [name.removeprefix("mlp.") for name in _STACKS]},
}


@pytest.mark.parametrize("base", ["safetensors", "gguf"])
@pytest.mark.parametrize("case", [*SETTINGS, *MORE, *EXPERTS])
@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
def test_the_same_logits(case: str, base: str, backend: str, tmp_path: Path) -> None:
    """Permuted, fused, transposed and absorbed weights included; magnitudes, embeddings, whole weights and experts."""
    model = tiny_models.tiny_model(case.partition(" ")[0])
    expected = save_peft(model, tmp_path / "adapter", TOKENS, **{**SETTINGS, **MORE, **EXPERTS}[case])
    if base == "gguf":
        checkpoint = open_checkpoint(converted_gguf.save_gguf(model, tmp_path / "model.gguf"))
    else:
        checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path / "model"))
    adapter = read_adapter(tmp_path / "adapter", adapted_steps.base_of(checkpoint))
    executor = adapted_steps.executor_of(checkpoint, backend)
    adapted_steps.load(executor, {2: adapter})
    adapted, plain = adapted_steps.logits_of(executor, [TOKENS, TOKENS], [2, -1])
    scale = np.abs(expected).max()
    # B times the gains of magnitudes is rounded to bfloat16.
    most = 1e-4 if backend == "reference" else 1e-2 if backend == "cpu" and "magnitudes" in case else 3e-3
    assert np.abs(adapted - expected).max() < scale * most
    unchanged = tiny_models.expected_logits(model, TOKENS)
    assert np.abs(plain - unchanged).max() < scale * (1e-4 if backend == "reference" else 3e-3)
    assert np.abs(expected - unchanged).max() > 0.1 * scale


def test_an_activated_adapter(tmp_path: Path) -> None:
    """Rows before the last invocation are the base's."""
    model = tiny_models.tiny_model("llama")
    invocation, start = TOKENS[20:22], 20
    settings = {"alora_invocation_tokens": invocation, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    expected = save_peft(model, tmp_path / "adapter", TOKENS, **settings)
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path / "model"))
    adapter = read_adapter(tmp_path / "adapter", adapted_steps.base_of(checkpoint))
    assert adapter.start_in(TOKENS) == start
    executor = adapted_steps.executor_of(checkpoint)
    adapted_steps.load(executor, {0: adapter})
    slots = np.where(np.arange(len(TOKENS)) < start, -1, 0)
    [logits] = adapted_steps.logits_of(executor, [TOKENS], slots.tolist())
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(expected - tiny_models.expected_logits(model, TOKENS))[start:].max() > 0.1
