"""Checks that a configuration's sizes agree with the shapes of the weights."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.errors import ModelLoadError
from octavo.models._decoder import ModelConfig
from octavo.models._reading import ConfigReader

# The keys of each size, in config.json of different families and in GGUF files.
_VOCAB = ("vocab_size",)
_WIDTH = ("hidden_size", "n_embd", "d_model", "embedding_length")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "expert_count")


def check_sizes(reader: ConfigReader, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the sizes of a configuration against the weights. Raises ModelLoadError naming the key.

    A wrong size would scale activations wrongly, or accept token ids that have no embedding.

    reader: the part of the configuration about text, from which `config` was read.
    shapes: shapes of the graph's weights.
    """
    table = "embed_tokens.weight"
    rows, cols = shapes[table] if len(shapes.get(table, ())) == 2 else (config.vocab_size, config.hidden_size)
    if rows != config.vocab_size:
        raise _error(reader, _VOCAB, config.vocab_size, f"{table} has {rows} rows")
    if cols != config.hidden_size and "project_in.weight" not in shapes:  # OPT's embeddings may be narrower
        raise _error(reader, _WIDTH, config.hidden_size, f"{table} has {cols} columns")
    key = next((key for key in EXPERT_COUNTS if reader.has(key)), None)
    if key is None:
        return
    count = reader.integer(key, low=0)
    for name, shape in shapes.items():
        if name.endswith(".experts.down_proj.weight") and shape[0] != count:
            raise _error(reader, (key,), count, f"{name} has {shape[0]} experts")


def _error(reader: ConfigReader, keys: tuple[str, ...], value: int, found: str) -> ModelLoadError:
    key = next((key for key in keys if reader.has(key)), keys[0])
    return reader.error(key, value, f"{found}; configuration and weights do not belong together")
