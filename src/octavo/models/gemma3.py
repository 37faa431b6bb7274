"""Gemma 3, text: local and global layers, norms before and after, on q and k too. arXiv 2503.19786."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops import AttentionParams, RopeParams
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig, windows_of_types
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rope_from_hf, scaled
from octavo.models._weights import Fold, WeightTable

ALIASES = ("gemma3_text",)
_NORMS = (
    "norm",
    "layers.*.self_attn.q_norm",
    "layers.*.self_attn.k_norm",
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
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_PATTERN = 6  # every sixth layer is global
_LOCAL_THETA = 10_000.0
_NO_ROPE = RopeParams(())
_GLOBAL_THETA = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Gemma's configuration; `rope` is that of the global layers, which have no window."""

    local_rope: RopeParams = _NO_ROPE
    attention_scale: float = 0.0
    logit_softcap: float | None = None

    def attention(self, layer: int) -> AttentionParams:
        return replace(DecoderConfig.attention(self, layer), scale=self.attention_scale)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = super(Config, cls).from_gguf(reader.with_defaults({"rope.freq_base": _GLOBAL_THETA}), shapes)
        pattern = reader.integer("attention.sliding_window_pattern", _PATTERN)
        window = reader.integer("attention.sliding_window", 0, low=0) or None
        # The file lacks the scale of the query; only in the 27B model (62 layers) it differs from head_dim.
        query_dim = plain.hidden_size // plain.num_heads if plain.num_layers == 62 else plain.head_dim
        return replace(
            plain,
            windows=_windows(plain.num_layers, pattern, window),
            local_rope=scaled(plain.head_dim, reader.number("rope.freq_base_swa", _LOCAL_THETA, low=1.0)),
            attention_scale=query_dim**-0.5,
            logit_softcap=reader.optional_number("final_logit_softcapping"),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        text = reader.section("text_config") if reader.has("text_config") else reader
        reader = text.with_defaults(_DEFAULTS)
        if reader.flag("use_bidirectional_attention", False):
            raise reader.error("use_bidirectional_attention", True, "attention to later tokens is not supported")
        if cap := reader.optional_number("attn_logit_softcapping"):
            raise reader.error("attn_logit_softcapping", cap, "Gemma 3 has no cap in its attention")
        # Newer files describe both ropes in one place, older ones scale the global one only.
        ropes = reader.section("rope_parameters")
        plain = cls.read_hf(
            reader,
            rope=ropes.section("full_attention") if ropes.values else reader.section("rope_scaling"),
            windows=_hf_windows(reader),
            activation=("gelu_pytorch_tanh",),
            theta=_GLOBAL_THETA,
        )
        local_rope = ropes.section("sliding_attention")
        local_theta = reader.number("rope_local_base_freq", _LOCAL_THETA, low=1.0)
        return replace(
            plain,
            local_rope=rope_from_hf(local_rope, plain.head_dim, local_theta, plain.max_position_embeddings),
            attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
            logit_softcap=reader.optional_number("final_logit_softcapping"),
        )


def build(g: Graph, cfg: Config) -> Value:
    """The logits [OUTPUTS, vocab]."""

    def norm(x: Value, name: str) -> Value:
        return g.rms_norm(x, name, cfg.rms_norm_eps)

    h = g.embedding("embed_tokens") * cfg.hidden_size**0.5
    for i in range(cfg.num_layers):
        p = f"layers.{i}."
        x = norm(h, p + "input_layernorm")
        q, k, v = (g.linear(x, p + f"self_attn.{n}_proj") for n in "qkv")
        q, k = norm(q, p + "self_attn.q_norm"), norm(k, p + "self_attn.k_norm")
        rotary = cfg.rope if cfg.windows[i] is None else cfg.local_rope
        q, k = (g.rope(y, cfg.head_dim, rotary) for y in (q, k))
        x = g.linear(g.attention(q, k, v, cfg.attention(i)), p + "self_attn.o_proj")
        h = h + norm(x, p + "post_attention_layernorm")
        x = norm(h, p + "pre_feedforward_layernorm")
        x = g.gelu_mul(g.linear(x, p + "mlp.gate_proj"), g.linear(x, p + "mlp.up_proj"), approximate=True)
        h = h + norm(g.linear(x, p + "mlp.down_proj"), p + "post_feedforward_layernorm")
    h = norm(g.select_rows(h), "norm")
    return g.logits(h, cfg.output_head, softcap=cfg.logit_softcap)


def _hf_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    window = reader.integer("sliding_window", 4096)
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    return _windows(num_layers, reader.integer("sliding_window_pattern", _PATTERN), window)


def _windows(num_layers: int, pattern: int, window: int | None) -> tuple[int | None, ...]:
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
