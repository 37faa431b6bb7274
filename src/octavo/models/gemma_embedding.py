"""EmbeddingGemma: Gemma 3 with bidirectional attention, for text embeddings. arXiv 2509.20354."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams, MeanPool
from octavo.graph.values import Value
from octavo.models import gemma2, gemma3
from octavo.models._encoder import EncoderConfig, pooling_of_gguf
from octavo.models._reading import ConfigReader, is_classifier
from octavo.models._weights import WeightTable

ALIASES = ("gemma-embedding",)
VARIANT_OF = ("gemma3", "use_bidirectional_attention", True)

# GGUF files may have the dense layers after pooling among their tensors; they have no activation.
_DENSE = ("dense_2", "dense_3")
WEIGHTS = WeightTable(
    names={**gemma3.WEIGHTS.names, **{stem: stem for stem in _DENSE}}, transforms=gemma3.WEIGHTS.transforms
)


@dataclass(frozen=True, slots=True)
class Config(EncoderConfig):
    """EmbeddingGemma's configuration. In a layer with a window, a token sees half of the window on each side."""

    attention_scale: float = 1.0

    def attention_params(self, layer: int) -> EncoderAttentionParams:
        return replace(EncoderConfig.attention_params(self, layer), scale=self.attention_scale)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = gemma3.Config.from_gguf(reader, shapes)
        pooling, is_ranker = pooling_of_gguf(reader)
        if is_ranker:
            raise reader.error("pooling_type", 4, "a head that scores texts is not supported by this architecture")
        # llama.cpp derives the scale from head_dim for any number of layers.
        return replace(cls._of(plain), attention_scale=plain.head_dim**-0.5, pooling=pooling)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if is_classifier(reader):
            names = reader.value("architectures")
            raise reader.error("architectures", names, "a classification head needs causal attention")
        key = reader.prefix + "use_bidirectional_attention"
        return cls._of(gemma3.Config.from_hf(ConfigReader({**reader.values, key: False}, reader.prefix)))

    @classmethod
    def _of(cls, plain: gemma3.Config) -> Config:
        return cls(
            vocab_size=plain.vocab_size,
            num_layers=plain.num_layers,
            hidden_size=plain.hidden_size,
            num_heads=plain.num_heads,
            num_kv_heads=plain.num_kv_heads,
            head_dim=plain.head_dim,
            max_position_embeddings=plain.max_position_embeddings,
            norm_eps=plain.norm_eps,
            windows=tuple(None if window is None else window // 2 for window in plain.attention.windows),
            ropes=tuple(map(plain.rope_params, range(plain.num_layers))),
            intermediate_size=plain.mlp.intermediate_size,
            attention_scale=plain.attention.scale or plain.head_dim**-0.5,
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the embeddings [OUTPUTS, hidden]. The rows are requested as in `_encoder.build`."""

    def attend(x: Value, layer: int) -> Value:
        p = f"layers.{layer}.self_attn."
        q, k, v = (g.linear(x, f"{p}{part}_proj") for part in "qkv")
        q, k = (g.rms_norm(y, f"{p}{part}_norm", cfg.norm_eps) for part, y in (("q", q), ("k", k)))
        rope = cfg.ropes[layer]
        if rope is not None:
            q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
        return g.linear(g.add(EncoderAttention(q, k, v, cfg.attention_params(layer))), p + "o_proj")

    h = g.rms_norm(gemma2.layers(g, cfg, attend), "norm", cfg.norm_eps)
    pooled = g.add(MeanPool(h)) if cfg.pooling == "mean" else g.select_rows(h)
    for stem in _DENSE:
        if f"{stem}.weight" in g.weights:
            pooled = g.linear(pooled, stem)
    return pooled
