"""The text models of Qwen3-Next and Qwen 3.5 as a GGUF file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, Sources, Stored, decoder_keys
from octavo.graph.ops.recurrence import DeltaHeads
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_section
from octavo.models._weights import Permute, PermuteColumns, Transform
from octavo.models.qwen3next import DELTA, Config

_INTERVAL = 4  # every fourth layer has attention
_SECTIONS = [11, 11, 10]  # sections of the rotary embedding, for images


def _stored(cfg: Config, reader: ConfigReader, weights: Sources) -> Stored:
    """Return the model as the file stores it.

    Qwen 3.5 has architecture names of its own, and its files store value heads in a different order.
    """
    if not reader.text("model_type", "qwen3_next").startswith("qwen3_5"):
        return Stored(cfg, weights)
    name = "qwen35" if cfg.mlp.experts is None else "qwen35moe"
    tiled = replace(cfg, delta=replace(cfg.delta, is_tiled=True))
    return Stored(tiled, weights, _tiled(cfg.delta), name)


def _tiled(delta: DeltaHeads) -> tuple[Transform, ...]:
    """Return the transforms that reorder value heads: the first of every key head, then the second, and so on."""
    share = delta.num_v_heads // delta.num_k_heads
    heads = np.arange(delta.num_v_heads).reshape(delta.num_k_heads, share).T.reshape(-1)
    values = (heads[:, None] * delta.value_dim + np.arange(delta.value_dim)).reshape(-1)
    keys = np.arange(2 * delta.num_k_heads * delta.key_dim)
    qkv = np.concatenate([keys, len(keys) + values])
    orders = {"in_proj_qkv": qkv, "conv1d": qkv, "in_proj_z": values}
    orders |= dict.fromkeys(("in_proj_a", "in_proj_b", "decay", "dt"), heads)
    rows = (Permute(DELTA + part, lambda _, order=order: order) for part, order in orders.items())  # type: ignore[misc]
    return (*rows, PermuteColumns(DELTA + "out_proj", lambda _: values))


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    delta, section = cfg.delta, rope_section(reader)
    keys: Keys = {
        **decoder_keys(cfg, reader),
        "ssm.conv_kernel": reader.integer("linear_conv_kernel_dim", 4),
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.num_k_heads,
        "ssm.time_step_rank": delta.num_v_heads,
        "ssm.inner_size": delta.num_v_heads * delta.value_dim,
        "full_attention_interval": _interval(reader, cfg.num_layers),
    }
    if delta.is_tiled:
        sections = section.counts("mrope_section", 3) if section.has("mrope_section") else _SECTIONS
        keys["rope.dimension_sections"] = np.array([*sections, 0], np.int32)
    return keys


def _interval(reader: ConfigReader, num_layers: int) -> int:
    """Return n if every n-th layer has attention. Raises ModelLoadError if the layers follow no such pattern."""
    interval = reader.integer("full_attention_interval", _INTERVAL)
    if not reader.has("layer_types"):
        return interval
    kinds = reader.texts("layer_types", num_layers)
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else num_layers + 1
    if any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
        raise reader.error("layer_types", kinds, "GGUF files express attention only in every n-th layer")
    return interval


GGUF = GGUFForm("qwen3next", _keys, stored=_stored)
