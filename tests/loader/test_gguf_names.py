"""The names of GGUF tensors and their checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from gguf import MODEL_ARCH, TensorNameMap
from gguf.constants import MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES

from octavo.loader.tensor_names import GGUF_STEMS, renamed
from octavo.models import deepseek2, gemma3, gpt_oss, qwen2moe


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", "embed_tokens.weight"),
        ("output_norm.weight", "norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.weight", "layers.0.self_attn.q_proj.weight"),
        ("blk.17.attn_k.bias", "layers.17.self_attn.k_proj.bias"),
        ("blk.123.ffn_norm.weight", "layers.123.post_attention_layernorm.weight"),
        ("blk.3.ffn_down_exps.weight", "layers.3.mlp.experts.down_proj.weight"),
        ("blk.2.attn_sinks.weight", "layers.2.self_attn.sinks"),
        ("blk.2.attn_sinks.bias", None),
        ("output_norm", None),
        ("attn_q.weight", None),
        ("blk.0.token_embd.weight", None),
        ("blk.00.attn_q.weight", None),
        ("blk.-1.attn_q.weight", None),
        ("blk.1000000.attn_q.weight", None),
        ("blk.0.attn_q.weight.weight", None),
        ("blk.0.attn_q.scale", None),
        ("blk.*.attn_q.weight", None),
        ("blk.٣.attn_q.weight", None),
    ],
)
def test_names(gguf_name: str, expected: str | None) -> None:
    assert renamed(gguf_name, GGUF_STEMS) == expected


def test_whole_names() -> None:
    """A name without a kind gets a whole name, and only such a name."""
    stems = {"layers.*.up": "layers.*.up_columns.weight", "layers.*.up_bias": "layers.*.up.bias", "layers.*.x": "y"}
    assert renamed("layers.2.up", stems) == "layers.2.up_columns.weight"
    assert renamed("layers.2.up_bias", stems) == "layers.2.up.bias"
    assert renamed("layers.2.up.weight", stems) is None
    assert renamed("layers.2.x", stems) is None


def test_an_architecture_may_differ() -> None:
    stems = {**GGUF_STEMS, **gemma3.WEIGHTS.names}
    assert renamed("blk.2.ffn_norm.weight", stems) == "layers.2.pre_feedforward_layernorm.weight"


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        (MODEL_ARCH.LLAMA, {}),
        (MODEL_ARCH.QWEN2, {}),
        (MODEL_ARCH.QWEN3, {}),
        (MODEL_ARCH.GEMMA3, gemma3.WEIGHTS.names),
        (MODEL_ARCH.DEEPSEEK2, deepseek2.WEIGHTS.names),
        (MODEL_ARCH.QWEN2MOE, qwen2moe.WEIGHTS.names),
        (MODEL_ARCH.GPT_OSS, gpt_oss.WEIGHTS.names),
    ],
)
def test_the_judge_knows_the_same_names(architecture: MODEL_ARCH, overrides: Mapping[str, str]) -> None:
    """The `gguf` package maps our checkpoint names to the very GGUF names that we map to them."""
    judge = TensorNameMap(architecture, 4)
    left_out = {MODEL_TENSOR.ROPE_FREQS, MODEL_TENSOR.ATTN_ROT_EMBD}
    experts = {t for t in MODEL_TENSORS[architecture] if "exp" in TENSOR_NAMES[t]}
    compared = 0
    for tensor in set(MODEL_TENSORS[architecture]) - left_out - experts:
        gguf_name = TENSOR_NAMES[tensor].format(bid=3)
        ours = renamed(f"{gguf_name}.weight", {**GGUF_STEMS, **overrides})
        if ours is None:
            continue  # a part of the architecture that text models do not have
        stem = ours.removesuffix(".weight")
        candidates = [judge.get_name(prefix + stem) for prefix in ("model.", "")]
        assert gguf_name in candidates, (gguf_name, ours, candidates)
        compared += 1
    assert compared >= 10
