"""Attention and MLP of a layer, as most decoders write them down."""

from __future__ import annotations

from functools import partial

from octavo.graph.builder import Graph
from octavo.graph.ops import GatedActivation, RopeParams, Routing
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig


def attention(
    g: Graph, x: Value, cfg: DecoderConfig, layer: int, rope: RopeParams | None, *, centered: bool = False
) -> Value:
    """The attention of a layer from its projections to the output's: [TOKENS, hidden].

    rope: None: nothing rotates. centered: the norms of q and k are LayerNorm, with other weights for each head.
    """
    p = f"layers.{layer}.self_attn."
    q, k, v = (g.linear(x, f"{p}{n}_proj") for n in "qkv")
    if cfg.qk_norm:
        norm = partial(g.layer_norm, group=cfg.head_dim) if centered else g.rms_norm
        q, k = (norm(y, f"{p}{n}_norm", cfg.norm_eps) for n, y in (("q", q), ("k", k)))
    if rope is not None:
        q, k = (g.rope(y, cfg.head_dim, rope) for y in (q, k))
    sinks = p + "sinks" if cfg.sinks else None
    return g.linear(g.attention(q, k, v, cfg.attention(layer), sinks), p + "o_proj")


def gated_mlp(g: Graph, x: Value, stem: str, kind: str = "silu") -> Value:
    """down(kind(gate(x)) * up(x)) of the weights under `stem`."""
    gate, up = (g.linear(x, f"{stem}.{n}_proj") for n in ("gate", "up"))
    return g.linear(g.add_operation(GatedActivation(gate, up, kind)), f"{stem}.down_proj")


def plain_mlp(g: Graph, x: Value, stem: str, kind: str) -> Value:
    """down(kind(up(x))) of the weights under `stem`."""
    return g.linear(g.activation(g.linear(x, f"{stem}.up_proj"), kind), f"{stem}.down_proj")


def plain_decoder(g: Graph, cfg: DecoderConfig, kind: str) -> Value:
    """The logits [LOGITS, vocab] of layers of attention and a plain MLP, each behind a LayerNorm."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i, cfg.rope)
        x = g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + plain_mlp(g, x, f"layers.{i}.mlp", kind)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def mlp(g: Graph, x: Value, cfg: DecoderConfig, layer: int) -> Value:
    """The experts of a layer, and the shared one, if it has a router, else its gated MLP."""
    stem = f"layers.{layer}.mlp"
    if cfg.experts is None or f"{stem}.gate.weight" not in g.weights:
        return gated_mlp(g, x, stem)
    routed = g.moe(x, stem, cfg.experts)
    if not cfg.shared_expert:
        return routed
    gate = g.activation(g.linear(x, f"{stem}.shared_expert_gate"), "sigmoid")  # one column
    return routed + g.mul(gated_mlp(g, x, f"{stem}.shared_expert"), gate)


def experts_beside_shared(g: Graph, x: Value, stem: str, routing: Routing, *, shared: bool) -> Value:
    """The chosen experts and, if `shared`, those that every token takes, as one gated MLP."""
    routed = g.moe(x, stem, routing)
    return routed + gated_mlp(g, x, f"{stem}.shared_experts") if shared else routed
