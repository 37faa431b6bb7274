"""The operations, each defined once: arguments, shape rule, cost and numpy meaning.

An operation is a frozen dataclass. Its fields of type `Value` are inputs, those of type `Parameter`
are weights (None where optional), everything else is a static attribute. A backend may walk the
fields in order instead of knowing each operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graph.values import Parameter, Value


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Rotary embedding, whatever the scaling: everything reduces to frequencies and one factor.

    frequencies: radians per position for each rotated pair [rotary_dim / 2].
    attention_factor: multiplies cos and sin (yarn, long-rope), else 1.
    interleaved: pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2).
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What one layer's attention looks like. Window: a token sees itself and window - 1 before it."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # [num_heads]


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all operations."""


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    weight: Parameter  # [vocab, cols]; -> [TOKENS, cols]


@dataclass(frozen=True, slots=True)
class Linear(Op):
    x: Value
    weight: Parameter  # [out, in]
    bias: Parameter | None = None  # [out]


@dataclass(frozen=True, slots=True)
class Logits(Op):
    """The output head: linear on the selected rows, then an optional soft cap. -> [OUTPUTS, vocab]"""

    x: Value
    weight: Parameter  # [vocab, in]
    bias: Parameter | None = None
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RMSNorm(Op):
    """x / rms(x) * (weight + weight_offset), over groups of weight.shape[0] columns (heads)."""

    x: Value
    weight: Parameter  # [group]; group divides x.cols
    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    x: Value
    weight: Parameter
    bias: Parameter | None
    eps: float


@dataclass(frozen=True, slots=True)
class Add(Op):
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Mul(Op):
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Scale(Op):
    x: Value
    factor: float


@dataclass(frozen=True, slots=True)
class Activation(Op):
    x: Value
    kind: str  # silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """kind(gate) * up: SwiGLU and GeGLU (`silu_mul`, `gelu_mul` of the builder)."""

    gate: Value
    up: Value
    kind: str


@dataclass(frozen=True, slots=True)
class Softcap(Op):
    """cap * tanh(x / cap)"""

    x: Value
    cap: float


@dataclass(frozen=True, slots=True)
class Rope(Op):
    x: Value  # [TOKENS, heads * head_dim]; the first 2 * len(frequencies) columns of a head rotate
    head_dim: int
    rope: RopeParams


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Writes k and v of the step into the paged cache, then causal attention over it."""

    q: Value  # [TOKENS, num_heads * head_dim]
    k: Value  # [TOKENS, num_kv_heads * head_dim]
    v: Value
    params: AttentionParams
    sinks: Parameter | None = None  # [num_heads], one extra logit a head in the softmax


@dataclass(frozen=True, slots=True)
class SelectRows(Op):
    """Keeps the rows of `Batch.logits_indices`: [TOKENS, cols] -> [OUTPUTS, cols]."""

    x: Value


@dataclass(frozen=True, slots=True)
class MoE(Op):
    """Routing and experts: sum over the top_k experts of weight_e * down_e(kind(gate_e x) * up_e x).

    scoring: softmax or sigmoid over the router's outputs, taken before the choice; normalize: the chosen
    weights are divided by their sum.
    """

    x: Value
    router: Parameter  # [experts, hidden]
    gate: Parameter  # [experts, intermediate, hidden]
    up: Parameter
    down: Parameter  # [experts, hidden, intermediate]
    top_k: int
    kind: str = "silu"
    scoring: str = "softmax"
    normalize: bool = True
    routed_scale: float = 1.0


# Composites, made by passes only. Their meaning is that of the operations they stand for.


@dataclass(frozen=True, slots=True)
class FusedLinear(Op):
    """norm -> several linears side by side (or gate and up with an activation) -> + residual.

    Without `kind` the outputs of all weights stand next to each other in the columns; with it there
    are two weights, gate and up, and the output is kind(gate) * up.
    """

    x: Value
    residual: Value | None
    weights: tuple[Parameter, ...]
    biases: tuple[Parameter | None, ...]  # one a weight
    norm: Parameter | None = None  # RMSNorm of x before the product
    eps: float = 0.0
    weight_offset: float = 0.0
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class FusedAttention(Op):
    """Per-head norms, rope, cache write and attention on q, k and v side by side in one value."""

    qkv: Value  # [TOKENS, (num_heads + 2 * num_kv_heads) * head_dim]
    params: AttentionParams
    rope: RopeParams | None
    sinks: Parameter | None = None
    q_norm: Parameter | None = None  # RMSNorm [head_dim]
    k_norm: Parameter | None = None
    eps: float = 0.0
    weight_offset: float = 0.0
