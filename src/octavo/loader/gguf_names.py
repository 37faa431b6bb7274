"""What tensors are called: from the names of GGUF files to those of checkpoints.

Source: the tensor naming convention of the GGUF specification. A checkpoint name is that of the
transformers library without its leading `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Without the final `.weight` or `.bias`. An architecture that differs has a `GGUF_NAMES` of its own.
_MODEL_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,5})\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)", re.ASCII)

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that configure the rotary embedding; they are part of the configuration, not weights."""


def checkpoint_name(gguf_name: str, overrides: Mapping[str, str]) -> str | None:
    """The checkpoint name of a GGUF tensor: `blk.3.attn_q.bias` -> `layers.3.self_attn.q_proj.bias`.

    overrides: what an architecture calls differently, for example
    {"ffn_norm": "pre_feedforward_layernorm"}. None for a name that is not known.
    """
    match = _GGUF_NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, stem = match["layer"], match["stem"]
    names = _MODEL_NAMES if layer is None else _LAYER_NAMES
    name = overrides.get(stem, names.get(stem))
    if name is None:
        return None
    prefix = "" if layer is None else f"layers.{layer}."
    return f"{prefix}{name}.{match['kind']}"
