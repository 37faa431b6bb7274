"""The text models of Step 3.5 and 3.7 Flash as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json, short, window_json
from octavo.errors import ModelLoadError
from octavo.models._reading import ConfigReader
from octavo.models.step35 import Config, rope_sections, usual

_FIRST = 3  # layer with experts, if config.json does not say it
_FACTORS = "rope_freqs.weight"
_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "share_expert_dim": "expert_shared_feed_forward_length",
}


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    reader = usual(reader)
    routing, windows, rope = cfg.mlp.experts, cfg.attention.windows, cfg.rope
    assert routing is not None
    assert rope.local is not None
    if 2 * rope.rotary_dim != cfg.head_dim:
        raise ModelLoadError("GGUF files of Step 3.5 rotate half of the columns of a head in layers without a window")
    full, local = rope_sections(reader, windows)
    heads = [cfg.num_heads if window is None else cfg.local_heads for window in windows]
    keys: Keys = {
        **decoder_keys(cfg, reader.replaced("rope_theta", None), rope=full),
        **{key: reader.integer(name) for name, key in _SIZES.items()},
        "attention.head_count": np.array(heads, np.int32),
        "attention.head_count_kv": np.array([cfg.num_kv_heads] * cfg.num_layers, np.int32),
        "attention.sliding_window": next((window for window in windows if window is not None), 1),
        "attention.sliding_window_pattern": np.array([window is not None for window in windows]),
        "rope.dimension_count": cfg.head_dim,
        "rope.dimension_count_swa": 2 * len(rope.local.frequencies),
        "rope.freq_base_swa": local.number("rope_theta"),
        "leading_dense_block_count": _num_dense_layers(reader, cfg.num_layers),
        "expert_gating_func": 2,
        "expert_weights_norm": routing.normalize,
        "expert_weights_scale": routing.scale,
        "swiglu_clamp_exp": np.array([limit or 0.0 for limit in cfg.limits], np.float32),
        "swiglu_clamp_shexp": np.array([limit or 0.0 for limit in cfg.shared_limits], np.float32),
    }
    if isinstance(factors := keys.get(_FACTORS), np.ndarray):
        keys[_FACTORS] = np.concatenate([factors, np.ones(cfg.head_dim // 2 - len(factors), np.float32)])
    return keys


def _num_dense_layers(reader: ConfigReader, num_layers: int) -> int:
    """Return the number of layers without experts at the start of the model.

    It follows from transformers' `mlp_layer_types` or from the authors' `moe_layers_enum`, the list of layers with
    experts. Raises ModelLoadError if a layer without experts follows one with experts.
    """
    kinds, listed = reader.value("mlp_layer_types"), reader.value("moe_layers_enum")
    if isinstance(kinds, list):
        sparse = {layer for layer, kind in enumerate(kinds[:num_layers]) if kind == "sparse"}
    elif listed is None:
        sparse = set(range(_FIRST, num_layers))
    else:
        numbers = listed.split(",") if isinstance(listed, str) else np.atleast_1d(np.array(listed)).tolist()
        sparse = {int(number) for number in numbers if str(number).strip()} & set(range(num_layers))
    count = num_layers - len(sparse)
    if sparse != set(range(count, num_layers)):
        raise ModelLoadError("GGUF files cannot express that layers without experts follow others (moe_layers_enum)")
    return count


def _json(cfg: Config, reader: ConfigReader) -> JSONObject:
    """Return config.json with the authors' keys. transformers, vLLM and llama.cpp's converter read them."""
    routing, windows, local = cfg.mlp.experts, cfg.attention.windows, cfg.rope.local
    assert routing is not None
    assert local is not None
    keys = decoder_json(cfg, reader)
    keys.pop("partial_rotary_factor", None)
    shares = [2 * len(params.frequencies) / cfg.head_dim for params in (cfg.rope.params, local)]
    thetas = [keys["rope_theta"], short(reader.number("rope.freq_base_swa", keys["rope_theta"]))]
    groups = {"num_attention_groups": cfg.num_kv_heads, "head_dim": cfg.head_dim}
    sparse = range(reader.integer("leading_dense_block_count", 0, low=0, high=cfg.num_layers), cfg.num_layers)
    return {
        **keys,
        **groups,
        **window_json(cfg),
        **{name: reader.integer(key) for name, key in _SIZES.items()},
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": cfg.local_heads,
            **groups,
        },
        "pad_token_id": 1,  # as published; transformers does not take null here
        "use_head_wise_attn_gate": True,
        "use_qk_norm": True,
        "rope_theta": [thetas[window is not None] for window in windows],
        "partial_rotary_factors": [shares[window is not None] for window in windows],
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": ",".join(map(str, sparse)),
        "moe_num_experts": reader.integer("expert_count"),
        "moe_top_k": routing.top_k,
        "moe_router_activation": routing.scoring,
        "moe_router_scaling_factor": short(routing.scale),
        "norm_expert_weight": routing.normalize,
        "use_moe_router_bias": True,
        "swiglu_limits": [short(limit or 0.0) for limit in cfg.limits],
        "swiglu_limits_shared": [short(limit or 0.0) for limit in cfg.shared_limits],
    }


GGUF = GGUFForm("step35", _keys)
HF = HFForm("step3p5", "Step3p5ForCausalLM", _json)
