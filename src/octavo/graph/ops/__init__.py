"""The operations, each defined once: arguments, shape rule, cost and numpy meaning.

An operation is a frozen dataclass. Its fields of type `Value` are inputs, those of type `Parameter`
are weights (None where optional), everything else is a static attribute. A backend may walk the
fields in order instead of knowing each operation.
"""

from octavo.graph.ops.attention import Attention, AttentionParams, Rope, RopeParams
from octavo.graph.ops.base import Array, Evaluation, LayerCache, Op, StepSizes
from octavo.graph.ops.elementwise import Activation, Add, GatedActivation, Mul, Scale, Softcap
from octavo.graph.ops.fused import FusedAttention, FusedLinear
from octavo.graph.ops.linear import Embedding, Linear, Logits, MoE, SelectRows
from octavo.graph.ops.norm import LayerNorm, RMSNorm

# Every operation that a backend can meet.
ALL_OPS: tuple[type[Op], ...] = (
    Embedding,
    Linear,
    Logits,
    RMSNorm,
    LayerNorm,
    Add,
    Mul,
    Scale,
    Activation,
    GatedActivation,
    Softcap,
    Rope,
    Attention,
    SelectRows,
    MoE,
    FusedLinear,
    FusedAttention,
)

__all__ = [
    "ALL_OPS",
    "Activation",
    "Add",
    "Array",
    "Attention",
    "AttentionParams",
    "Embedding",
    "Evaluation",
    "FusedAttention",
    "FusedLinear",
    "GatedActivation",
    "LayerCache",
    "LayerNorm",
    "Linear",
    "Logits",
    "MoE",
    "Mul",
    "Op",
    "RMSNorm",
    "Rope",
    "RopeParams",
    "Scale",
    "SelectRows",
    "Softcap",
    "StepSizes",
]
