"""DeepSeek V2 to V3.2, Kimi K2, GLM 4.7 Flash and GLM 5 as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, Sources, Stored, routed_keys
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_section
from octavo.models.deepseek2 import Config

_INDEXED = {"deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa"}


def _stored(cfg: Config, reader: ConfigReader, weights: Sources) -> Stored:
    return Stored(cfg, weights, name=_INDEXED.get(reader.text("model_type", ""), ""))


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. The usual keys for sizes of heads describe the KV cache; additional keys describe the heads."""
    keys: Keys = {
        **routed_keys(cfg, reader),
        "attention.kv_lora_rank": cfg.latent_dim,
        "attention.key_length_mla": cfg.nope_dim + cfg.rope_dim,
        "attention.value_length_mla": cfg.head_value_dim,
    }
    if reader.has("q_lora_rank"):
        keys["attention.q_lora_rank"] = reader.integer("q_lora_rank")
    section = rope_section(reader)
    if "rope.scaling.factor" in keys and (mscale := section.number("mscale_all_dim", 0.0, low=-1.0)) > 0:
        # A reader takes the factor of attention from this one, and has none beside it.
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * mscale
        keys.pop("rope.scaling.attn_factor", None)
    return keys if cfg.index_topk is None else keys | _indexer_keys(cfg.index_topk, reader, cfg.num_layers)


def _indexer_keys(topk: int, reader: ConfigReader, num_layers: int) -> Keys:
    """Return the keys of the indexer, and the full context length of the model.

    Octavo's own configuration has a shorter context, because it only uses the part that needs no indexer.
    """
    keys: Keys = {
        "context_length": reader.integer("max_position_embeddings"),
        "attention.indexer.top_k": topk,
        "attention.indexer.head_count": reader.integer("index_n_heads", 64),
        "attention.indexer.key_length": reader.integer("index_head_dim", 128),
    }
    if reader.has("indexer_types"):
        kinds = reader.texts("indexer_types", num_layers)
        keys["attention.indexer.types"] = np.array([kind == "full" for kind in kinds], np.int32)
    return keys


GGUF = GGUFForm("deepseek2", _keys, stored=_stored)
