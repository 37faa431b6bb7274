"""The metadata of a GGUF file made from a model's configuration: the reverse of `Config.from_gguf`.

Source: the GGUF specification, and the keys that llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.graph.ops.attention import RopeParams
from octavo.graph.ops.recurrence import ScanHeads
from octavo.loader.tensor_files import Source
from octavo.models._classic import ClassicConfig
from octavo.models._decoder import DecoderConfig
from octavo.models._mamba import StateSpaceConfig
from octavo.models._reading import ConfigReader
from octavo.models._rope import STILL, base_frequencies, rope_section, yarn_mscale
from octavo.models._sizes import EXPERT_COUNTS
from octavo.models._weights import Transform
from octavo.models.mamba import Channels

# The MLP's width in config.json of the models of `_classic`; four times the hidden size if it has none of them.
_WIDTHS = ("n_inner", "intermediate_size", "ffn_hidden_size")

Keys = dict[str, bool | int | float | str | NDArray[Any]]
Sources = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Stored:
    """A model as its GGUF file stores it.

    config: configuration that a reader of the file gets.
    weights: the weights that become tensors of the file, by their names in the graph.
    steps: transforms of tensors whose rows or numbers differ in the file, by checkpoint name.
    name: the architecture's name in the file; empty for the form's.
    """

    config: Any
    weights: Sources
    steps: tuple[Transform, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """The form in which `octavo convert` writes an architecture to GGUF files. Each module names it `GGUF`.

    name: the value of `general.architecture`, or a function that returns it for a configuration.
    keys: function that returns the metadata keys, without the architecture's prefix, for a configuration and the text
        part of its config.json. It also returns the tensor of rotary factors, under the tensor's name, and keys that
        have no prefix in the file. All of them are read back, and the result is compared with the configuration.
    whole: function that returns additional keys for the whole config.json.
    stems: function that returns, for a configuration, the file's stem of each graph stem for which the weight table has
        several.
    stored: function that returns the model as the file stores it. `keys` gets the configuration of this model. None if
        the file stores the same as a checkpoint.
    """

    name: str | Callable[[Any], str]
    keys: Callable[[Any, ConfigReader], Keys]
    whole: Callable[[ConfigReader], Keys] = field(default=lambda _reader: {})
    stems: Callable[[Any], Mapping[str, str]] | None = None
    stored: Callable[[Any, ConfigReader, Sources], Stored] | None = None

    def name_of(self, cfg: Any) -> str:
        """Return the architecture's name for a model with this configuration."""
        return self.name if isinstance(self.name, str) else self.name(cfg)

    def stored_of(self, cfg: Any, reader: ConfigReader, weights: Sources) -> Stored:
        """Return the model as its file stores it, including the architecture's name."""
        found = Stored(cfg, weights) if self.stored is None else self.stored(cfg, reader, weights)
        return replace(found, name=found.name or self.name_of(found.config))

    def stems_of(self, cfg: Any) -> Mapping[str, str]:
        """Return the result of `stems` for this configuration, or an empty mapping if the form has no `stems`."""
        return {} if self.stems is None else self.stems(cfg)


def decoder_keys(
    cfg: DecoderConfig,
    reader: ConfigReader,
    *,
    rope: ConfigReader | None = None,
    theta: float = 10000.0,
    norm_eps: str = "attention.layer_norm_rms_epsilon",
) -> Keys:
    """Return the keys that decoders share.

    rope, theta: as in `hf_rope`.
    norm_eps: as in `DecoderConfig.read_gguf`.
    """
    keys: Keys = {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.mlp.intermediate_size,
        "attention.head_count": cfg.num_heads,
        "attention.head_count_kv": cfg.num_kv_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.value_dim,
        norm_eps: cfg.norm_eps,
        "vocab_size": cfg.vocab_size,
    }
    if len(set(cfg.attention.windows)) == 1 and (window := cfg.attention.windows[0]) is not None:
        keys["attention.sliding_window"] = window
    keys |= _expert_keys(cfg, reader)
    theta = reader.number("rope_theta", theta, low=1.0)
    return keys | rope_keys(cfg.rope.params, cfg.max_position_embeddings, rope or rope_section(reader), theta)


def classic_keys(cfg: ClassicConfig, reader: ConfigReader) -> Keys:
    """Return the keys of a model based on `_classic`, including those of its rotary embedding if it has one."""
    width = next((key for key in _WIDTHS if reader.has(key)), None)
    keys: Keys = {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": 4 * cfg.hidden_size if width is None else reader.integer(width),
        "attention.head_count": cfg.num_heads,
        "attention.layer_norm_epsilon": cfg.norm_eps,
    }
    if cfg.num_kv_heads != cfg.num_heads:
        keys["attention.head_count_kv"] = cfg.num_kv_heads
    if cfg.rope is None:
        return keys
    theta = reader.number("rotary_emb_base" if reader.has("rotary_emb_base") else "rope_theta", 10000.0, low=1.0)
    return keys | rope_keys(cfg.rope, cfg.max_position_embeddings, rope_section(reader), theta)


def layer_norm_keys(cfg: DecoderConfig, reader: ConfigReader) -> Keys:
    """Return the keys that decoders share, for a model with LayerNorm instead of RMSNorm."""
    return decoder_keys(cfg, reader, norm_eps="attention.layer_norm_epsilon")


def sectioned_keys(cfg: DecoderConfig, reader: ConfigReader) -> Keys:
    """Return the keys that decoders share, with three rotary sections for images and an empty fourth."""
    sections = rope_section(reader).counts("mrope_section", 3)
    return {**decoder_keys(cfg, reader), "rope.dimension_sections": np.array([*sections, 0], np.int32)}


def deepstack_keys(reader: ConfigReader) -> Keys:
    """Return the key for the number of layers after which image features are added.

    Without this key, llama.cpp accepts no images for the model.
    """
    layers = reader.section("vision_config").value("deepstack_visual_indexes")
    return {"n_deepstack_layers": len(layers)} if isinstance(layers, list) else {}


def _expert_keys(cfg: DecoderConfig, reader: ConfigReader) -> Keys:
    """Return the keys of the experts, or no keys for a model without experts.

    Raises ModelLoadError if some layers have experts and others have none, because these keys cannot express that.
    """
    if cfg.mlp.experts is None:
        return {}
    if reader.value("mlp_only_layers") or reader.integer("decoder_sparse_step", 1) != 1:
        raise ModelLoadError("GGUF files cannot express that some layers have no experts (mlp_only_layers)")
    count = reader.integer(next((key for key in EXPERT_COUNTS if reader.has(key)), "num_experts"))
    keys: Keys = {"expert_count": count, "expert_used_count": cfg.mlp.experts.top_k}
    if reader.has("moe_intermediate_size"):
        keys["expert_feed_forward_length"] = reader.integer("moe_intermediate_size")
    if cfg.mlp.shared == "gated":
        keys["expert_shared_feed_forward_length"] = reader.integer("shared_expert_intermediate_size")
    return keys


def routed_keys(cfg: DecoderConfig, reader: ConfigReader) -> Keys:
    """Return the keys that decoders share, with DeepSeek's expert routing, dense first layers and shared experts."""
    routing = cfg.mlp.experts
    assert routing is not None
    keys: Keys = {
        **decoder_keys(cfg, reader),
        "leading_dense_block_count": cfg.mlp.first_experts or 0,
        "expert_shared_count": reader.integer("n_shared_experts", 0, low=0),
        "expert_gating_func": 2 if routing.scoring == "sigmoid" else 1,
        "expert_weights_norm": routing.normalize,
        "expert_weights_scale": routing.scale,
    }
    if routing.num_groups > 1:
        keys |= {"expert_group_count": routing.num_groups, "expert_group_used_count": routing.top_groups}
    return keys


def scan_keys(scan: ScanHeads, taps: int) -> Keys:
    """Return the keys of Mamba 2.

    taps: number of taps of the convolution.
    """
    return {
        "ssm.conv_kernel": taps,
        "ssm.state_size": scan.state_dim,
        "ssm.group_count": scan.num_groups,
        "ssm.inner_size": scan.num_heads * scan.head_dim,
        "ssm.time_step_rank": scan.num_heads,
    }


def channel_keys(channels: Channels, taps: int) -> Keys:
    """Return the keys of Mamba 1.

    taps: number of taps of the convolution.
    """
    return {
        "ssm.conv_kernel": taps,
        "ssm.inner_size": channels.inner,
        "ssm.state_size": channels.state_dim,
        "ssm.time_step_rank": channels.rank,
    }


def stateful_keys(cfg: StateSpaceConfig) -> Keys:
    """Return the keys of a model whose layers are all state-space layers."""
    return {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "vocab_size": cfg.vocab_size,
    }


def gguf_pattern(cfg: DecoderConfig, pattern: int) -> Keys:
    """Return the key for the size of the attention window and, if needed, the list of layers that have a window.

    The list is left out if exactly every `pattern`-th layer has no window, because that is what a reader assumes.
    """
    keys: Keys = {}
    if windows := {window for window in cfg.attention.windows if window is not None}:
        keys["attention.sliding_window"] = windows.pop()
    local = [window is not None for window in cfg.attention.windows]
    if local != [(layer + 1) % pattern != 0 for layer in range(cfg.num_layers)]:
        keys["attention.sliding_window_pattern"] = np.array(local)
    return keys


def rope_keys(params: RopeParams, positions: int, section: ConfigReader, theta: float) -> Keys:
    """Return the keys of the rotary embedding.

    No error is raised for a kind of scaling that has no keys. The difference is found when the keys are read back.

    positions: context length in tokens.
    section, theta: as in `hf_rope`.
    """
    rotary_dim = 2 * len(params.frequencies)
    theta = section.number("rope_theta", theta, low=1.0)
    kind = section.text("rope_type", section.text("type", "default"))
    keys: Keys = {"rope.freq_base": theta, "rope.dimension_count": rotary_dim}
    if kind == "llama3":
        divisors = base_frequencies(rotary_dim, theta) / np.array(params.frequencies)
        keys["rope_freqs.weight"] = divisors.astype(np.float32)
    if kind == "proportional":
        turning = np.array(params.frequencies)
        divisors = base_frequencies(rotary_dim, theta) / np.where(turning > 0, turning, 1.0)
        keys["rope_freqs.weight"] = np.where(turning > 0, divisors, STILL).astype(np.float32)
    if kind in ("longrope", "su"):
        original = section.integer("original_max_position_embeddings", positions)
        keys |= {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": params.attention_factor,
        }
        for name in ("long", "short"):
            factors = section.numbers(f"{name}_factor", rotary_dim // 2, low=0.0, high=float("inf"))
            keys[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    if kind == "linear":
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": section.number("factor")}
    if kind == "yarn":
        original = section.integer("original_max_position_embeddings", positions)
        factor = section.number("factor", positions / original)
        keys |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": original,
        }
        turns = (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"))
        keys |= {f"rope.scaling.{key}": section.number(name) for name, key in turns if section.has(name)}
        if (extra := params.attention_factor / yarn_mscale(factor, 1.0)) != 1.0:
            keys["rope.scaling.attn_factor"] = extra
    return keys
