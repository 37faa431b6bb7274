"""Rotary embedding and attention in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.torch.attention import attend_all
from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import rotate
from octavo.backends.torch.step import NO_TABLES, HeadTables, TorchStep
from octavo.graph.ops.attention import Attention, FusedAttention, Rope
from octavo.graph.ops.encoder import CrossAttention, EncoderAttention
from octavo.graph.ops.latent_attention import LatentAttention
from octavo.graph.values import Parameter


@form(Rope)
def _rope(op: Rope, step: TorchStep) -> Tensor:
    return step.rotated(step.values[op.x], op.head_dim, op.rope, op.x.rows)


def _tables(op: Attention | FusedAttention, step: TorchStep) -> HeadTables:
    return HeadTables(*(None if x is None else step.weight(x) for x in (op.sinks, op.distance_bias)))


@form(Attention)
def _attention(op: Attention, step: TorchStep) -> Tensor:
    k, v = (None if x is None else step.values[x] for x in (op.k, op.v))
    return step.attend(step.values[op.q], k, v, op.params, _tables(op, step), step.out)


@form(FusedAttention)
def _fused_attention(op: FusedAttention, step: TorchStep) -> Tensor:
    p, qkv = op.params, step.values[op.qkv]
    tables = _tables(op, step)
    if (queries := step.prepared_queries(op, qkv)) is not None:
        return step.attend(queries, None, None, p, tables, step.out)

    def ready(x: Tensor, is_normed: bool, weight: Parameter | None) -> Tensor:
        if is_normed:
            x = step.normed(x, None if weight is None else step.weight(weight), p.head_dim, op.eps)
        return x if op.rope is None else rotate(x, p.head_dim, step.rotation(op.rope, x.dtype))

    if not op.owns_cache:
        return step.attend(ready(qkv, op.norms_q, op.q_norm), None, None, p, tables, step.out)
    q, k, v = torch.split(qkv, [*p.widths], dim=-1)
    q, k = ready(q, op.norms_q, op.q_norm), ready(k, op.norms_k, op.k_norm)
    if op.norms_v:
        v = step.normed(v, None, p.cache.value_dim, op.eps)
    return step.attend(q, k, v, p, tables, step.out)


@form(LatentAttention)
def _latent_attention(op: LatentAttention, step: TorchStep) -> Tensor:
    heads = op.params.num_heads
    q, q_rope = (step.values[x].reshape(-1, heads, x.cols // heads) for x in (op.q, op.q_rope))
    latent, dim = step.values[op.latent], op.params.head_dim
    key = torch.cat([latent, step.values[op.k_rope]], dim=1, out=step.find((len(latent), dim), latent.dtype))
    q = torch.cat([q, q_rope], dim=2, out=step.find((len(latent), heads, dim), latent.dtype)).flatten(1)
    return step.attend(q, key, key[:, :0], op.params, NO_TABLES, step.out)


@form(EncoderAttention)
def _encoder_attention(op: EncoderAttention, step: TorchStep) -> Tensor:
    q, k, v = (step.values[x] for x in (op.q, op.k, op.v))
    spans = step.spans_of(op.q.rows)
    given = (op.distance_bias, op.distance_keys, op.distance_queries)
    tables = [None if each is None else step.weight(each) for each in given]
    return torch.cat([attend_all(q[rows], k[rows], v[rows], op.params, tables) for rows in spans], out=step.out)


@form(CrossAttention)
def _cross_attention(op: CrossAttention, step: TorchStep) -> Tensor:
    return step.attend_across(op)
