"""The sizes that tiny random models share, and their scaled rotary embeddings."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def rope(kind: str, **parameters: object) -> dict[str, object]:
    """Return the `rope_parameters` of a model that was first trained on a quarter of its positions."""
    return {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 16, **parameters}


def llama3_rope() -> dict[str, object]:
    return rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
