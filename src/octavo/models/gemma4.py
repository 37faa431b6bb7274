"""Gemma 4, text: heads of two sizes, shared keys and values, per-layer inputs, experts parallel to the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, Rope
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models import _per_layer
from octavo.models._attention import AttentionConfig, Windows, heads_by_kind, windows_from_gguf, windows_from_hf
from octavo.models._decoder import checked_columns, hf_rope
from octavo.models._layers import gated_mlp
from octavo.models._mlp import MLPConfig, experts_from_gguf
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import rope_from_hf, scaled
from octavo.models._weights import Split, WeightTable, stacked_experts

ALIASES = ("gemma4_text", "gemma4_unified", "gemma4_unified_text")

_EXPERTS = "layers.*.mlp.experts."
_PARTS = ("gate", "up", "down")
WEIGHTS = WeightTable(
    names={
        **_per_layer.WEIGHTS.names,
        "blk.*.layer_output_scale": "layers.*.layer_scalar",
        "layers.*.layer_scalar": "layers.*.layer_scalar.weight",
        "layers.*.router.proj": "layers.*.mlp.gate",
        "layers.*.router.scale": "layers.*.mlp.router_norm.weight",
        "layers.*.router.per_expert_scale": "layers.*.mlp.expert_scale.weight",
        "layers.*.experts.gate_up_proj": _EXPERTS + "gate_up_proj.weight",
        "layers.*.experts.down_proj": _EXPERTS + "down_proj.weight",
        # Quantized checkpoints have one tensor per expert.
        **{f"layers.*.experts.*.{part}_proj": f"{_EXPERTS}*.{part}_proj" for part in _PARTS},
        "blk.*.ffn_gate_inp.scale": "layers.*.mlp.router_norm.weight",
        "blk.*.ffn_gate_up_exps": _EXPERTS + "gate_up_proj",
        "blk.*.ffn_down_exps.scale": "layers.*.mlp.expert_scale.weight",
        "blk.*.pre_ffw_norm_2": "layers.*.pre_feedforward_layernorm_2",
        "blk.*.post_ffw_norm_1": "layers.*.post_feedforward_layernorm_1",
        "blk.*.post_ffw_norm_2": "layers.*.post_feedforward_layernorm_2",
    },
    transforms=(
        Split(_EXPERTS + "gate_up_proj", tuple(f"{_EXPERTS}{n}_proj" for n in _PARTS[:2]), lambda c: c.expert_rows),
        *stacked_experts(),
    ),
)

# Values that published files leave out.
DEFAULTS: dict[str, object] = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_GLOBAL_DIM = 512
_PATTERN = 6  # every sixth layer is global, and the last one
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


@dataclass(frozen=True, slots=True)
class Config(_per_layer.Config):
    """Gemma 4's configuration. `head_dim`, `value_dim` and `num_kv_heads` describe the layers with a window."""

    global_head_dim: int = _GLOBAL_DIM
    global_kv_heads: int = 1
    expert_width: int = 0

    @property
    def expert_rows(self) -> tuple[int, ...]:
        """Number of rows of an expert's gate and up; empty if the model has no experts."""
        return (self.expert_width,) * 2 if self.expert_width else ()

    def attention_params(self, layer: int) -> AttentionParams:
        params = _per_layer.Config.attention_params(self, layer)
        if params.window is not None:
            return params
        dim = self.global_head_dim
        return replace(params, num_kv_heads=self.global_kv_heads, head_dim=dim, value_dim=dim)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = _per_layer.with_widest_mlp(reader, "feed_forward_length", "block_count")
        num_layers, window = reader.integer("block_count", high=MAX_LAYERS), reader.integer("attention.sliding_window")
        windows = windows_from_gguf(reader, _PATTERN, window)
        local_heads, global_heads = heads_by_kind(reader, "attention.head_count_kv", windows)
        reader = reader.with_largest("attention.head_count_kv", num_layers)
        experts = experts_from_gguf(reader, normalize=True)
        mlp = MLPConfig.from_gguf(reader, experts)
        plain = cls.read_gguf(reader.with_defaults({"rope.freq_base": GLOBAL_THETA}), shapes, mlp=mlp)
        # The plain keys are those of the global layers.
        local_dim = reader.integer("attention.key_length_swa", plain.head_dim, low=2, high=MAX_WIDTH)
        theta = reader.number("rope.freq_base_swa", LOCAL_THETA, low=1.0)
        local_rotary = reader.integer("rope.dimension_count_swa", local_dim, low=2, high=local_dim)
        shared = "attention.shared_kv_layers"
        width = reader.integer("embedding_length_per_layer_input", 0, low=0, high=MAX_WIDTH)
        return replace(
            plain,
            attention=AttentionConfig(windows, qk_norm=True, scale=1.0),
            head_dim=local_dim,
            value_dim=local_dim,
            num_kv_heads=local_heads,
            global_head_dim=plain.head_dim,
            global_kv_heads=global_heads,
            rope=replace(plain.rope, local=scaled(local_rotary, theta)),
            logit_softcap=reader.number("final_logit_softcapping", 0.0, low=-1.0) or None,
            sources=_per_layer.cache_sources(
                reader, shared, windows, reader.integer(shared, 0, low=0, high=MAX_LAYERS)
            ),
            input_width=width,
            expert_width=reader.integer("expert_feed_forward_length", high=MAX_WIDTH) if experts else 0,
        )._checked(reader, "attention.head_count_kv")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = _per_layer.text_section(reader, DEFAULTS)
        experts = _experts_from_hf(reader)
        windows = (
            *windows_from_hf(reader, _PATTERN, 512)[:-1],
            None,
        )  # the last layer is global regardless of the file
        ropes = reader.section("rope_parameters")
        plain = cls.read_hf(
            _with_double_mlp(reader),
            attention=AttentionConfig(windows, qk_norm=True, scale=1.0),
            rope=hf_rope(reader, ropes.section("sliding_attention"), LOCAL_THETA),
            mlp=MLPConfig.from_hf(_with_double_mlp(reader), experts, activation=("gelu_pytorch_tanh",)),
        )
        key, is_unified = "num_kv_shared_layers", reader.text("model_type", "") == "gemma4_unified_text"
        dim, kv_heads = _global_heads(reader, windows, plain.num_kv_heads)
        return replace(
            plain,
            rope=replace(
                plain.rope,
                params=rope_from_hf(global_section(reader), dim, GLOBAL_THETA, plain.max_position_embeddings),
                local=plain.rope.params,
            ),
            global_head_dim=dim,
            global_kv_heads=kv_heads,
            logit_softcap=reader.optional_number("final_logit_softcapping"),
            sources=_per_layer.cache_sources(reader, key, windows, reader.integer(key, 0, low=0, high=MAX_LAYERS)),
            input_width=reader.integer("hidden_size_per_layer_input", 0 if is_unified else 256, low=0, high=MAX_WIDTH),
            expert_width=reader.integer("moe_intermediate_size", high=MAX_WIDTH) if experts else 0,
        )._checked(reader, "num_global_key_value_heads")

    def _checked(self, reader: ConfigReader, key: str) -> Config:
        if self.global_kv_heads < 1 or self.num_heads % self.global_kv_heads:
            raise reader.error(key, self.global_kv_heads, f"does not divide the number of heads, {self.num_heads}")
        checked_columns(reader, "global_head_dim", self.global_head_dim, self.num_heads)
        return self


def global_section(reader: ConfigReader) -> ConfigReader:
    """Return the part of config.json about the rotary embedding of layers without a window."""
    return (
        reader.section("rope_parameters")
        .section("full_attention")
        .with_defaults({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": GLOBAL_THETA})
    )


def _with_double_mlp(reader: ConfigReader) -> ConfigReader:
    """Replace the MLP width with the widest one: layers that share keys and values may have twice the columns."""
    if not (reader.flag("use_double_wide_mlp", False) and reader.integer("num_kv_shared_layers", 0, low=0)):
        return reader
    return reader.replaced("intermediate_size", 2 * reader.integer("intermediate_size", high=MAX_WIDTH))


def _experts_from_hf(reader: ConfigReader) -> Routing | None:
    if not reader.flag("enable_moe_block", False):
        return None
    return Routing(reader.integer("top_k_experts", high=reader.integer("num_experts")))


def _global_heads(reader: ConfigReader, windows: Windows, kv_heads: int) -> tuple[int, int]:
    """Return head_dim and the number of kv heads of layers without a window; newer files give them per layer."""
    heads = kv_heads
    if reader.flag("attention_k_eq_v", False) and reader.has("num_global_key_value_heads"):
        heads = reader.integer("num_global_key_value_heads")
    found = set()
    layers = reader.section("per_layer_config")
    for layer, window in enumerate(windows):
        own = layers.section(str(layer)).with_defaults({"num_key_value_heads": heads})
        if window is not None and layers.has(str(layer)):
            raise layers.error(str(layer), own.values, "only layers without a window may differ")
        if window is None:
            by_layer = reader.has("per_layer_config")  # empty if heads do not differ
            default = reader.integer("head_dim") if by_layer else reader.integer("global_head_dim", _GLOBAL_DIM)
            dim = own.integer("head_dim", default, low=2, high=MAX_WIDTH)
            if dim % 2:
                raise own.error("head_dim", dim, "must be even")
            found.add((dim, own.integer("num_key_value_heads")))
    if len(found) != 1:
        raise reader.error("per_layer_config", layers.values, "differs between layers of the same kind")
    return found.pop()


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.hidden_size**0.5
    inputs = _per_layer.inputs_of_layers(g, h, cfg) if cfg.input_width else None
    for i in range(cfg.num_layers):
        p = f"layers.{i}."
        h = layer(g, h, cfg, i)
        if inputs is not None:
            h = h + _per_layer.gated_input(g, h, inputs, i, cfg)
        if f"{p}layer_scalar.weight" in g.weights:
            h = g.scale_columns(h, p + "layer_scalar")
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, softcap=cfg.logit_softcap)


def layer(
    g: Graph, h: Value, cfg: Config, number: int, prefix: str = "", reads: AttentionParams | None = None
) -> Value:
    """Build a layer's attention and MLP, with its experts if it has any: [TOKENS, hidden].

    prefix: prefix of the names of its weights.
    reads: attention for a layer that has no keys and values and reads an existing cache. None means that `cfg` gives
        the attention.
    """
    p = f"{prefix}layers.{number}."
    params = reads or cfg.attention_params(number)
    owns_keys = reads is None and cfg.sources[number] == number
    x = g.rms_norm(h, p + "input_layernorm", cfg.norm_eps)
    x = _attention(g, x, cfg, number, p + "self_attn.", params, owns_keys=owns_keys)
    h = h + g.rms_norm(x, p + "post_attention_layernorm", cfg.norm_eps)
    x = gated_mlp(g, g.rms_norm(h, p + "pre_feedforward_layernorm", cfg.norm_eps), p + "mlp", "gelu_tanh")
    if cfg.mlp.experts is not None and f"{p}mlp.gate.weight" in g.weights:
        x = g.rms_norm(x, p + "post_feedforward_layernorm_1", cfg.norm_eps)
        x = x + _experts(g, h, p, cfg.mlp.experts, cfg)
    return h + g.rms_norm(x, p + "post_feedforward_layernorm", cfg.norm_eps)


def _experts(g: Graph, h: Value, p: str, routing: Routing, cfg: Config) -> Value:
    """Build a layer's chosen experts, which have their own norms; the router reads h through another norm."""
    x = g.rms_norm(h, p + "pre_feedforward_layernorm_2", cfg.norm_eps)
    routed = g.rms_norm(h, p + "mlp.router_norm", cfg.norm_eps) * cfg.hidden_size**-0.5
    x = g.moe(x, p + "mlp", routing, kind="gelu_tanh", router_x=routed)
    return g.rms_norm(x, p + "post_feedforward_layernorm_2", cfg.norm_eps)


def _attention(
    g: Graph, x: Value, cfg: Config, number: int, p: str, params: AttentionParams, *, owns_keys: bool
) -> Value:
    """Build a layer's attention. A layer without a value projection uses its key projection instead.

    p: prefix of the names of its weights.
    """
    dim, rope = params.head_dim, cfg.rope_params(number)
    assert rope is not None
    q = g.add(Rope(g.rms_norm(g.linear(x, p + "q_proj"), p + "q_norm", cfg.norm_eps), dim, rope))
    k = v = None
    if owns_keys:
        k = g.linear(x, p + "k_proj")
        v = g.linear(x, p + "v_proj") if p + "v_proj.weight" in g.weights else k
        k = g.add(Rope(g.rms_norm(k, p + "k_norm", cfg.norm_eps), dim, rope))
        v = g.rms_norm(v, None, cfg.norm_eps, dim)
    return g.linear(g.attention(q, k, v, params), p + "o_proj")
