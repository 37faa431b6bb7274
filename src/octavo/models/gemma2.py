"""Gemma 2: norms before and after attention and MLP, soft caps, a window in every other layer. arXiv 2408.00118."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, windows_from_gguf, windows_from_hf
from octavo.models._decoder import DecoderConfig
from octavo.models._encoder import EncoderConfig
from octavo.models._layers import attention, gated_mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import Fold, WeightTable

_NORMS = (
    "norm",
    "layers.*.input_layernorm",
    "layers.*.post_attention_layernorm",
    "layers.*.pre_feedforward_layernorm",
    "layers.*.post_feedforward_layernorm",
)
WEIGHTS = WeightTable(
    names={
        "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
        "blk.*.ffn_norm": "layers.*.pre_feedforward_layernorm",
        "blk.*.post_ffw_norm": "layers.*.post_feedforward_layernorm",
    },
    # A norm multiplies by 1 + weight. The converter to GGUF has added the one.
    transforms=tuple(Fold(stem, 1.0, "safetensors") for stem in _NORMS),
)

# Values that published files leave out.
_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Gemma 2's configuration, with a soft cap on the logits."""

    logit_softcap: float | None = None

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader, shapes)
        # The file lacks the query scale, which differs from head_dim only in the 27B model (46 layers).
        query_dim = plain.hidden_size // plain.num_heads if plain.num_layers == 46 else plain.head_dim
        window = reader.integer("attention.sliding_window", 4096)
        return replace(
            plain,
            attention=AttentionConfig(
                windows_from_gguf(reader, 2, window),
                scale=query_dim**-0.5,
                softcap=reader.number("attn_logit_softcapping", 50.0),
            ),
            logit_softcap=reader.number("final_logit_softcapping", 30.0),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        null = [key for key in caps if reader.is_null(key)]  # no cap
        reader = reader.with_defaults(_DEFAULTS)
        if reader.flag("use_bidirectional_attention", False):
            raise reader.error("use_bidirectional_attention", True, "bidirectional attention is not supported")
        attention_cap, logit_cap = (None if key in null else reader.number(key) for key in caps)
        scale = reader.number("query_pre_attn_scalar", 256.0) ** -0.5
        return cls.read_hf(
            reader,
            attention=AttentionConfig(windows_from_hf(reader, 2), scale=scale, softcap=attention_cap),
            mlp=MLPConfig.from_hf(reader, activation=("gelu_pytorch_tanh",)),
            logit_softcap=logit_cap,
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = layers(g, cfg, lambda x, i: attention(g, x, cfg, i))
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, softcap=cfg.logit_softcap)


def layers(g: Graph, cfg: DecoderConfig | EncoderConfig, attend: Callable[[Value, int], Value]) -> Value:
    """Return the hidden states after the last layer [TOKENS, hidden].

    attend: builds a layer's attention on normed rows.
    """

    def norm(x: Value, name: str) -> Value:
        return g.rms_norm(x, name, cfg.norm_eps)

    h: Value = g.embedding("embed_tokens") * cfg.hidden_size**0.5
    for i in range(cfg.num_layers):
        p = f"layers.{i}."
        x = attend(norm(h, p + "input_layernorm"), i)
        h = h + norm(x, p + "post_attention_layernorm")
        x = gated_mlp(g, norm(h, p + "pre_feedforward_layernorm"), p + "mlp", "gelu_tanh")
        h = h + norm(x, p + "post_feedforward_layernorm")
    return h
