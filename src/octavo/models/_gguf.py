"""The metadata of a GGUF file from a model's configuration: the way back of `Config.from_gguf`.

Source: the GGUF specification, and the keys that llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models._decoder import DecoderConfig, rope_section
from octavo.models._reading import ConfigReader
from octavo.models._rope import base_frequencies, yarn_mscale

Keys = dict[str, bool | int | float | str | NDArray[Any]]


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """The declaration `GGUF` of an architecture that `octavo convert` can write.

    name: `general.architecture`. keys: from a configuration and its config.json to the keys, without the prefix; the
    tensor of rotary factors is among them under its own name. They are read back and compared.
    """

    name: str
    keys: Callable[[Any, ConfigReader], Keys]


def decoder_keys(
    cfg: DecoderConfig, reader: ConfigReader, *, rope: ConfigReader | None = None, theta: float = 10000.0
) -> Keys:
    """The keys that decoders share. rope, theta: as in `DecoderConfig.read_hf`."""
    keys: Keys = {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.intermediate_size,
        "attention.head_count": cfg.num_heads,
        "attention.head_count_kv": cfg.num_kv_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.value_dim,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "vocab_size": cfg.vocab_size,
    }
    if len(set(cfg.windows)) == 1 and (window := cfg.windows[0]) is not None:
        keys["attention.sliding_window"] = window
    return keys | _rope_keys(cfg, rope or rope_section(reader), reader.number("rope_theta", theta, low=1.0))


def _rope_keys(cfg: DecoderConfig, section: ConfigReader, theta: float) -> Keys:
    """The rotary embedding. A kind without keys of its own is found when the keys are read back."""
    theta = section.number("rope_theta", theta, low=1.0)
    kind = section.text("rope_type", section.text("type", "default"))
    keys: Keys = {"rope.freq_base": theta, "rope.dimension_count": cfg.rotary_dim}
    if kind == "llama3":
        divisors = base_frequencies(cfg.rotary_dim, theta) / np.array(cfg.rope.frequencies)
        keys["rope_freqs.weight"] = divisors.astype(np.float32)
    if kind == "linear":
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": section.number("factor")}
    if kind == "yarn":
        original = section.integer("original_max_position_embeddings", cfg.max_position_embeddings)
        factor = section.number("factor", cfg.max_position_embeddings / original)
        keys |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": original,
        }
        turns = (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"))
        keys |= {f"rope.scaling.{key}": section.number(name) for name, key in turns if section.has(name)}
        if (extra := cfg.rope.attention_factor / yarn_mscale(factor, 1.0)) != 1.0:
            keys["rope.scaling.attn_factor"] = extra
    return keys
