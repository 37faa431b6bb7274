"""GPT-2 as a file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys
from octavo.models._classic import ClassicConfig
from octavo.models._reading import ConfigReader


def classic_keys(cfg: ClassicConfig, reader: ConfigReader) -> Keys:
    """The keys of a model with learned positions."""
    return {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": reader.integer("n_inner") if reader.has("n_inner") else 4 * cfg.hidden_size,
        "attention.head_count": cfg.num_heads,
        "attention.layer_norm_epsilon": cfg.norm_eps,
    }


GGUF = GGUFForm("gpt2", classic_keys)
