"""Multi-token-prediction (MTP) heads: one layer after the last, as a separate graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.streams import SideBySide
from octavo.graph.values import TOKENS, Value
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import MAX_LAYERS, ConfigReader

HeadConfig = TypeVar("HeadConfig", bound=DecoderConfig)

# From a graph, the configuration, the input of a layer and its number to the layer's output.
DraftLayer = Callable[[Graph, HeadConfig, Value, int], Value]

# Prefixes of names in the files of Qwen and of MiMo, which count the layers of heads by themselves.
_OWN_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
    "model.mtp_layers.0.input_proj.": "eh_proj.",
    "model.mtp_layers.0.token_layernorm.": "enorm.",
    "model.mtp_layers.0.hidden_layernorm.": "hnorm.",
    "model.mtp_layers.0.final_layernorm.": "shared_head.norm.",
    "model.mtp_layers.0.": "",
}


def next_token_head(g: Graph, cfg: HeadConfig, layer: DraftLayer[HeadConfig], *, hidden_first: bool = False) -> Value:
    """Return the logits [LOGITS, vocab] of the token after the next one.

    They are computed from tokens and the model's last hidden states. The row of a position holds the next position's
    token and, as `Batch.inputs[0]` [TOKENS, hidden], the input of the output head at that position: DeepSeek-AI et al.,
    arXiv 2412.19437, section 2.2. The graph's `hidden_states` are the input for the next draft.

    hidden_first: the projection reads the hidden states before the embedding, not after it.
    """
    number = cfg.num_layers
    p = f"layers.{number}."
    embedding, head = p + "embed_tokens", p + "shared_head.head"
    tokens = g.embedding(embedding if f"{embedding}.weight" in g.weights else "embed_tokens")
    hidden = g.add(Input(0, TOKENS, cfg.hidden_size))
    tokens, hidden = (g.rms_norm(x, p + name, cfg.norm_eps) for x, name in ((tokens, "enorm"), (hidden, "hnorm")))
    windows = (*cfg.attention.windows, None)
    cfg = replace(cfg, attention=replace(cfg.attention, windows=windows))
    pair = SideBySide(hidden, tokens) if hidden_first else SideBySide(tokens, hidden)
    h = layer(g, cfg, g.linear(g.add(pair), p + "eh_proj"), number)
    h = g.rms_norm(g.select_rows(h), p + "shared_head.norm", cfg.norm_eps)
    return g.logits(h, head if f"{head}.weight" in g.weights else cfg.output_head)


def has_head(cfg: DecoderConfig, weights: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if the checkpoint has a layer after the last one that predicts another token."""
    return f"layers.{cfg.num_layers}.eh_proj.weight" in weights


def head_name(name: str, num_layers: int) -> str:
    """Return the usual name of a weight in Qwen's or MiMo's files. These files number the head layers from 0."""
    for prefix, own in _OWN_NAMES.items():
        if name.startswith(prefix):
            return f"layers.{num_layers}.{own}{name.removeprefix(prefix)}"
    return name


def without_heads(reader: ConfigReader) -> ConfigReader:
    """Return a GGUF file's metadata with the heads, its last blocks, left out of the block count."""
    further = reader.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    count = reader.integer("block_count", low=further + 1, high=MAX_LAYERS + further) - further
    return ConfigReader({**reader.values, reader.prefix + "block_count": count}, reader.prefix)
