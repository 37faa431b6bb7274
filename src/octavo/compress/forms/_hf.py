"""The config.json made from a model's configuration, for `octavo convert`: the reverse of `Config.from_hf`.

Source: the configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.batch import Float64
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._rope import base_frequencies, yarn_mscale

JSONObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HFForm:
    """The form in which `octavo convert --to safetensors` writes an architecture. Each module names it `HF`.

    model_type, class_name: names used by transformers.
    keys: function that returns config.json without these two names, for a configuration and the metadata. The result is
        read back and compared with the configuration.
    prefix: prefix of all tensors except the head.
    """

    model_type: str
    class_name: str
    keys: Callable[[Any, ConfigReader], JSONObject]
    prefix: str = "model."


def decoder_json(cfg: DecoderConfig, reader: ConfigReader, *, norm_eps: str = "rms_norm_eps") -> JSONObject:
    """Return the keys that decoders share.

    reader: metadata with the architecture's prefix.
    """
    keys: JSONObject = {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.mlp.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_position_embeddings,
        norm_eps: short(cfg.norm_eps),
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "rope_theta": short(reader.number("rope.freq_base", 10000.0)),
    }
    if cfg.rope.rotary_dim != cfg.head_dim:
        keys["partial_rotary_factor"] = cfg.rope.rotary_dim / cfg.head_dim
    if scaling := _scaling(cfg, reader, keys["rope_theta"]):
        keys["rope_scaling"] = scaling
    return keys


def expert_json(cfg: DecoderConfig, reader: ConfigReader) -> JSONObject:
    """Return the keys that decoders share, and the keys of experts."""
    assert cfg.mlp.experts is not None
    keys = {
        **decoder_json(cfg, reader),
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": cfg.mlp.experts.top_k,
        "norm_topk_prob": cfg.mlp.experts.normalize,
    }
    for name, key in (("moe", "expert_feed_forward_length"), ("shared_expert", "expert_shared_feed_forward_length")):
        if reader.has(key):
            keys[f"{name}_intermediate_size"] = reader.integer(key)
    return keys


def window_json(cfg: DecoderConfig) -> JSONObject:
    """Return the keys for the size of the attention window and for the layers that have one."""
    windows = {window for window in cfg.attention.windows if window is not None}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in cfg.attention.windows]
    return {"sliding_window": windows.pop() if windows else None, "layer_types": kinds}


def _scaling(cfg: DecoderConfig, reader: ConfigReader, theta: float) -> JSONObject:
    tensors = ConfigReader(reader.values)
    kind = reader.text("rope.scaling.type", "none")
    original = reader.integer("rope.scaling.original_context_length", cfg.max_position_embeddings)
    if tensors.has("rope_factors_long.weight"):
        lists = {
            f"{name}_factor": [short(x) for x in np.asarray(reader.values[f"rope_factors_{name}.weight"])]
            for name in ("long", "short")
        }
        return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}
    if tensors.has("rope_freqs.weight"):
        return _llama3(base_frequencies(cfg.rope.rotary_dim, theta), np.array(cfg.rope.params.frequencies))
    if kind not in ("linear", "yarn"):
        return {}
    keys: JSONObject = {"rope_type": kind, "factor": short(reader.number("rope.scaling.factor"))}
    if kind == "yarn":
        keys["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if reader.has(f"rope.scaling.yarn_{name}"):
                keys[name] = short(reader.number(f"rope.scaling.yarn_{name}"))
        if cfg.rope.params.attention_factor != yarn_mscale(keys["factor"], 1.0):
            keys["attention_factor"] = cfg.rope.params.attention_factor
    return keys


def _llama3(plain: Float64, scaled: Float64) -> JSONObject:
    """Recover the parameters behind a table of llama3 factors: the reverse of `_rope.llama3`.

    Frequencies between the ends of the table are interpolated: the share of the unscaled frequency in each is a linear
    function of that frequency. The slope and the offset of this function give the high factor and the original context
    length. Only the ratios of these to the low factor matter, so the low factor is set to 1, as in the published files.
    """
    factor = float((plain / scaled).max())
    shares = (scaled / plain - 1 / factor) / (1 - 1 / factor)
    inner = (shares > 1e-6) & (shares < 1 - 1e-6)
    keys: JSONObject = {"rope_type": "llama3", "factor": short(factor), "low_freq_factor": 1.0}
    if not inner.any():  # any length between two frequencies would do; these are the published numbers
        return keys | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    offset = -1 / 3  # the published high factor is 4
    slope = float(((shares[inner] - offset) / plain[inner]).mean())
    if inner.sum() > 1:
        slope, offset = np.polyfit(plain[inner], shares[inner], 1)
    span = -1 / offset
    original = round(float(slope * 2 * np.pi * span))
    return keys | {"high_freq_factor": round(1 + float(span), 4), "original_max_position_embeddings": original}


def short(number: Any) -> float:
    """Convert a float32 to the shortest decimal that represents it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))
