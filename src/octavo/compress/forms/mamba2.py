"""Mamba 2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, scan_keys
from octavo.models._reading import ConfigReader
from octavo.models.mamba2 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "vocab_size": cfg.vocab_size,
        **scan_keys(cfg.scan, reader.integer("conv_kernel", 4)),
    }


GGUF = GGUFForm("mamba2", _keys)
