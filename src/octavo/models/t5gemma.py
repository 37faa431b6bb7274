"""T5Gemma: an encoder and a decoder made of Gemma 2's layers. Zhang et al., arXiv 2504.06225."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope, RopeParams
from octavo.graph.ops.encoder import CrossAttention, EncoderAttentionParams
from octavo.graph.ops.linear import Input
from octavo.graph.source import SOURCE
from octavo.graph.values import Value
from octavo.models import gemma2
from octavo.models._decoder import ModelConfig
from octavo.models._layers import gated_mlp
from octavo.models._reading import ConfigReader
from octavo.models._weights import Fold, WeightTable

_NORMS = (
    *("encoder.norm", "decoder.norm"),
    *(
        f"{stack}.layers.*.{place}_{part}_layernorm"
        for stack in ("encoder", "decoder")
        for part in ("self_attn", "cross_attn", "feedforward")
        for place in ("pre", "post")
    ),
)
WEIGHTS = WeightTable(
    prefixes=("model.",),
    names={"lm_head.out_proj": "lm_head"},
    # A norm multiplies by 1 + weight.
    transforms=tuple(Fold(stem, 1.0, "safetensors") for stem in _NORMS),
)


@dataclass(frozen=True, slots=True)
class Config(ModelConfig):
    """T5Gemma's configuration, for encoder and decoder. Except where noted, the inherited fields describe the decoder.

    max_position_embeddings: limit for a source and its answer together, in tokens.
    """

    encoder: gemma2.Config
    decoder: gemma2.Config
    start_token_id: int

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        del reader, shapes
        raise ModelLoadError("GGUF has no form for T5Gemma; use its safetensors files")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        encoder, decoder = (gemma2.Config.from_hf(reader.section(name)) for name in ("encoder", "decoder"))
        if encoder.vocab_size != decoder.vocab_size:
            problem = f"must be the decoder's value, {decoder.vocab_size}"
            raise reader.section("encoder").error("vocab_size", encoder.vocab_size, problem)
        first = reader.integer("bos_token_id", reader.section("decoder").integer("bos_token_id", 2, low=0), low=0)
        return cls(
            vocab_size=decoder.vocab_size,
            num_layers=decoder.num_layers,
            hidden_size=decoder.hidden_size,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            max_position_embeddings=encoder.max_position_embeddings + decoder.max_position_embeddings,
            encoder=encoder,
            decoder=decoder,
            start_token_id=reader.integer("decoder_start_token_id", first, low=0, high=decoder.vocab_size - 1),
        )


def build_encoder(g: Graph, cfg: Config) -> Value:
    """Build the encoder and return the rows [OUTPUTS, hidden] of a step's texts; a step requests all of them."""
    own = cfg.encoder
    h: Value = g.embedding("encoder.embed_tokens") * own.hidden_size**0.5
    for i in range(own.num_layers):
        p = f"encoder.layers.{i}."
        x = g.rms_norm(h, p + "pre_self_attn_layernorm", own.norm_eps)
        q, k, v = _projected(g, own, x, x, p + "self_attn", own.rope_params(i))
        mixed = g.encoder_attention(q, k, v, _heads(own, own.attention.windows[i]))
        h = h + g.rms_norm(g.linear(mixed, p + "self_attn.o_proj"), p + "post_self_attn_layernorm", own.norm_eps)
        h = _with_mlp(g, own, h, p)
    return g.rms_norm(g.select_rows(h), "encoder.norm", own.norm_eps)


def build(g: Graph, cfg: Config) -> Value:
    """Build the decoder, which reads the encoder's rows, and return its logits [LOGITS, vocab]."""
    own = cfg.decoder
    source = g.add(Input(0, SOURCE, cfg.encoder.hidden_size))
    h: Value = g.embedding("decoder.embed_tokens") * own.hidden_size**0.5
    for i in range(own.num_layers):
        p = f"decoder.layers.{i}."
        x = g.rms_norm(h, p + "pre_self_attn_layernorm", own.norm_eps)
        q, k, v = _projected(g, own, x, x, p + "self_attn", own.rope_params(i))
        mixed = g.linear(g.attention(q, k, v, own.attention_params(i)), p + "self_attn.o_proj")
        h = h + g.rms_norm(mixed, p + "post_self_attn_layernorm", own.norm_eps)
        x = g.rms_norm(h, p + "pre_cross_attn_layernorm", own.norm_eps)
        q, k, v = _projected(g, own, x, source, p + "cross_attn", None)
        mixed = g.add(CrossAttention(q, k, v, _heads(own, None), own.num_layers + i, SOURCE))
        h = h + g.rms_norm(g.linear(mixed, p + "cross_attn.o_proj"), p + "post_cross_attn_layernorm", own.norm_eps)
        h = _with_mlp(g, own, h, p)
    h = g.rms_norm(g.select_rows(h), "decoder.norm", own.norm_eps)
    head = "lm_head" if "lm_head.weight" in g.weights else "decoder.embed_tokens"
    return g.logits(h, head, softcap=own.logit_softcap)


def _heads(own: gemma2.Config, window: int | None) -> EncoderAttentionParams:
    """Return the parameters of attention to all rows, or to rows at most `window` before or after."""
    params = own.attention_params(0)
    heads = own.num_heads, own.num_kv_heads, own.head_dim
    return EncoderAttentionParams(*heads, params.scale, window, softcap=params.softcap)


def _projected(
    g: Graph, own: gemma2.Config, x: Value, source: Value, stem: str, rope: RopeParams | None
) -> tuple[Value, Value, Value]:
    """Return q projected from x, and k and v projected from source."""
    q, k, v = (g.linear(y, f"{stem}.{part}_proj") for part, y in (("q", x), ("k", source), ("v", source)))
    if rope is not None:
        q, k = (g.add(Rope(y, own.head_dim, rope)) for y in (q, k))
    return q, k, v


def _with_mlp(g: Graph, own: gemma2.Config, h: Value, p: str) -> Value:
    x = gated_mlp(g, g.rms_norm(h, p + "pre_feedforward_layernorm", own.norm_eps), p + "mlp", "gelu_tanh")
    return h + g.rms_norm(x, p + "post_feedforward_layernorm", own.norm_eps)
