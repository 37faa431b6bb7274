"""Llama 3 with 70 billion parameters in files that take no disk space: headers, and zeros that are not stored.

The sizes are those of its config.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.safetensors_writer import with_header

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 80, 8192, 28672, 64, 8, 128256
PARAMETERS = 70_553_706_496


def save_large_model(path: Path) -> Path:
    """Write a directory with config.json and the weights in BF16."""
    kv = KV_HEADS * HIDDEN // HEADS
    of_layer = {
        "input_layernorm": [HIDDEN],
        "post_attention_layernorm": [HIDDEN],
        "self_attn.q_proj": [HIDDEN, HIDDEN],
        "self_attn.k_proj": [kv, HIDDEN],
        "self_attn.v_proj": [kv, HIDDEN],
        "self_attn.o_proj": [HIDDEN, HIDDEN],
        "mlp.gate_proj": [INNER, HIDDEN],
        "mlp.up_proj": [INNER, HIDDEN],
        "mlp.down_proj": [HIDDEN, INNER],
    }
    shapes = {"model.embed_tokens": [VOCAB, HIDDEN], "model.norm": [HIDDEN], "lm_head": [VOCAB, HIDDEN]}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in of_layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    assert end == 2 * PARAMETERS
    with (path / "model.safetensors").open("wb") as file:
        file.write(with_header(json.dumps(header).encode()))
        file.truncate(file.tell() + end)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
