"""Operations flattened into kernel operands by the rule that csrc/kernel.h repeats."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.backends.cpu.lowering import KINDS, lower
from octavo.errors import GraphError
from octavo.graph.ops import (
    Attention,
    AttentionParams,
    FusedAttention,
    FusedLinear,
    GatedActivation,
    Linear,
    Op,
    Rope,
    RopeParams,
)
from octavo.graph.values import Parameter, Rows, Value

KERNEL_H = Path(__file__).parents[3] / "csrc" / "kernel.h"

X = Value(0, Rows.TOKENS, 64)
Y = Value(1, Rows.TOKENS, 32)
W = Parameter("w", (32, 64))
B = Parameter("b", (32,))
PARAMS = AttentionParams(0, 2, 1, 16, 0.25)


def test_attention_as_kernel_h_describes_it():
    params = AttentionParams(5, 4, 2, 16, 0.25, window=7, softcap=30.0, alibi_slopes=(0.5, 0.25, 0.1, 0.05))
    operands = lower(Attention(X, Y, Y, params, Parameter("sinks", (4,))))
    assert operands.inputs == [X, Y, Y]
    assert operands.weights == [(0.5, 0.25, 0.1, 0.05), Parameter("sinks", (4,))]
    assert operands.ints == [5, 4, 2, 16, 7, 0, 0]  # and the cache's type
    assert operands.floats == [0.25, 30.0]
    assert operands.layer == 5


def test_absent_fields_keep_their_places():
    assert lower(Linear(X, W)).weights == [W, None]
    operands = lower(FusedAttention(X, AttentionParams(0, 2, 1, 16, 0.25), None))
    assert operands.weights == [None, None, None, None, None]  # slopes, frequencies, sinks, q_norm, k_norm
    assert operands.ints == [0, 2, 1, 16, 0, 0, 0]  # ... window, value_dim, the cache's type
    assert operands.floats == [0.25, 0.0, 0.0, 0.0]  # scale, softcap, attention_factor, eps


def test_the_type_of_the_cache_comes_last():
    plain, fused = Attention(X, Y, Y, PARAMS), FusedAttention(X, PARAMS, None)
    for op in (plain, fused):
        half, int8 = lower(op, "float16"), lower(op, "int8")
        assert (half.ints[-1], int8.ints[-1]) == (0, 1)
        assert half.ints[:-1] == int8.ints[:-1]
    assert lower(Linear(X, W), "int8").ints == []


def test_tuples_of_weights_bring_their_length():
    operands = lower(FusedLinear(X, None, (W, W), (B, None), None, 1e-5, "silu"))
    assert operands.inputs == [X, None]
    assert operands.weights == [W, W, B, None, None]
    assert operands.ints == [2, 2, KINDS.index("silu")]
    assert operands.floats == [1e-5]


def test_nested_parameters_are_flattened_in_place():
    operands = lower(Rope(X, 16, RopeParams((1.0, 0.1), 1.5)))
    assert (operands.weights, operands.ints, operands.floats) == ([(1.0, 0.1)], [16], [1.5])
    assert operands.layer is None


def test_kinds_are_those_of_the_native_enumeration():
    (body,) = re.findall(r"enum Kind : int64_t \{(.*?)\}", KERNEL_H.read_text(), re.DOTALL)
    assert tuple(re.findall(r"KIND_(\w+)", body)) == tuple(kind.upper() for kind in KINDS)


def test_unknown_kinds_and_fields_are_errors():
    with pytest.raises(GraphError, match=r"gated_activation.kind: 'swish' is none of none, silu"):
        lower(GatedActivation(X, X, "swish"))

    @dataclass(frozen=True, slots=True)
    class Strange(Op):
        numbers: dict[str, int]

        def infer_shape(self):
            return Rows.TOKENS, 1

        def flops(self, sizes):
            return sizes.tokens

        def evaluate(self, step):
            return step

    with pytest.raises(GraphError, match=r"strange.numbers: a field of type .* cannot be given"):
        lower(Strange({}))
