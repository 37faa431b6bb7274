"""A layer's attention and MLP, as most decoders build them."""

from __future__ import annotations

from functools import partial

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope
from octavo.graph.ops.rowwise import Activation, Clip, GatedActivation
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig


def attention(g: Graph, x: Value, cfg: DecoderConfig, layer: int, *, centered: bool = False) -> Value:
    """Build a layer's attention, from the input projections through the output projection: [TOKENS, hidden].

    centered: the norms of q and k are LayerNorms, with separate weights for each head.
    """
    p, part = f"layers.{layer}.self_attn.", cfg.attention
    q, k, v = (g.linear(x, f"{p}{n}_proj") for n in "qkv")
    norm = partial(g.layer_norm, group=cfg.head_dim) if centered else g.rms_norm
    if part.qk_norm and not part.norm_after_rope:
        q, k = (norm(y, f"{p}{n}_norm", cfg.norm_eps) for n, y in (("q", q), ("k", k)))
    if (limit := part.qkv_limit) is not None:
        q, k, v = (g.add(Clip(y, -limit, limit)) for y in (q, k, v))
    rope = cfg.rope_params(layer)
    if rope is not None:
        q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    if part.qk_norm and part.norm_after_rope:
        q, k = (norm(y, f"{p}{n}_norm", cfg.norm_eps) for n, y in (("q", q), ("k", k)))
    sinks = p + "sinks" if part.sinks else None
    return g.linear(g.attention(q, k, v, cfg.attention_params(layer), sinks), p + "o_proj")


def gated_mlp(g: Graph, x: Value, stem: str, kind: str = "silu") -> Value:
    """Return down(kind(gate(x)) * up(x)), using the weights under `stem`."""
    gate, up = (g.linear(x, f"{stem}.{n}_proj") for n in ("gate", "up"))
    return g.linear(g.add(GatedActivation(gate, up, kind)), f"{stem}.down_proj")


def plain_mlp(g: Graph, x: Value, stem: str, kind: str) -> Value:
    """Return down(kind(up(x))), using the weights under `stem`."""
    return g.linear(g.add(Activation(g.linear(x, f"{stem}.up_proj"), kind)), f"{stem}.down_proj")


def plain_decoder(g: Graph, cfg: DecoderConfig, kind: str) -> Value:
    """Build layers of attention and a plain MLP, each after a LayerNorm, and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i)
        x = g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + plain_mlp(g, x, f"layers.{i}.mlp", kind)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def mlp(g: Graph, x: Value, cfg: DecoderConfig, layer: int) -> Value:
    """Build a layer's experts, including any shared ones, or its gated MLP: [TOKENS, hidden]."""
    stem, part = f"layers.{layer}.mlp", cfg.mlp
    routes = f"{stem}.gate.weight" in g.weights if part.first_experts is None else layer >= part.first_experts
    if part.experts is None or not routes:
        return gated_mlp(g, x, stem)
    routed = g.moe(x, stem, part.experts)
    if part.shared is None:
        return routed
    if part.shared == "plain":
        return routed + gated_mlp(g, x, f"{stem}.shared_experts")
    gate = g.add(Activation(g.linear(x, f"{stem}.shared_expert_gate"), "sigmoid"))  # one column
    return routed + gated_mlp(g, x, f"{stem}.shared_expert") * gate
