"""Operations flattened into kernel operands by the rule that csrc/kernel.h repeats."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu.lowering import KINDS, lower
from octavo.errors import GraphError
from octavo.graph.layer_formats import LayerFormat
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import FusedLinear, Linear
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import TOKENS, Parameter, Value

KERNEL_H = Path(__file__).parents[3] / "csrc" / "kernel.h"

X = Value(0, TOKENS, 64)
Y = Value(1, TOKENS, 32)
W = Parameter("w", (32, 64))
B = Parameter("b", (32,))
PARAMS = AttentionParams(0, 2, 1, 16, 0.25)


def test_every_operand_has_the_name_of_its_field():
    params = AttentionParams(5, 4, 2, 16, 0.25, window=7, softcap=30.0, alibi_slopes=(0.5, 0.25, 0.1, 0.05))
    operands = lower(Attention(X, Y, Y, params, Parameter("sinks", (4,))))
    assert operands.inputs == [("q", X), ("k", Y), ("v", Y)]
    sinks = Parameter("sinks", (4,))
    assert operands.weights == [
        ("alibi_slopes", (0.5, 0.25, 0.1, 0.05)),
        ("query_scales", None),
        ("sinks", sinks),
        ("distance_bias", None),
        ("key_mean", None),
    ]
    assert dict(operands.ints) == {
        "layer": 5,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "window": 7,
        "value_dim": 0,
        "scale_length": 1,
        "scale_offset": 0,
        "chunked": 0,
        "sees_spans": 0,
        "kv_type": 0,
    }
    assert operands.floats == [("scale", 0.25), ("softcap", 30.0)]


def test_absent_fields_keep_their_places():
    assert lower(Linear(X, W)).weights == [("weight", W), ("bias", None)]
    operands = lower(FusedAttention(X, AttentionParams(0, 2, 1, 16, 0.25), None))
    names = [
        "alibi_slopes",
        "query_scales",
        "frequencies",
        "axes",
        "sinks",
        "q_norm",
        "k_norm",
        "distance_bias",
        "key_mean",
    ]
    assert operands.weights == [(name, None) for name in names]
    assert [value for _, value in operands.ints] == [0, 2, 1, 16, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert operands.floats == [("scale", 0.25), ("softcap", 0.0), ("attention_factor", 0.0), ("eps", 0.0)]


def test_the_format_of_the_cache_follows_the_fields():
    mean = np.array([0.5, -1.0], np.float32)
    for op in (Attention(X, Y, Y, PARAMS), FusedAttention(X, PARAMS, None)):
        half, int8 = lower(op), lower(op, LayerFormat("int8", mean))
        assert (half.ints[-1], int8.ints[-1]) == (("kv_type", 0), ("kv_type", 1))
        assert (half.weights[-1], int8.weights[-1]) == (("key_mean", None), ("key_mean", (0.5, -1.0)))
        assert half.ints[:-1] == int8.ints[:-1]
    assert lower(Linear(X, W)).ints == []


def test_tuples_of_weights_stay_together():
    operands = lower(FusedLinear(X, None, (W, W), (B, None), None, 1e-5, "silu"))
    assert operands.inputs == [("x", X), ("residual", None)]
    assert operands.tuples == [("weights", (W, W)), ("biases", (B, None))]
    assert operands.weights == [("norm", None)]
    assert operands.ints == [("kind", KINDS.index("silu"))]
    assert operands.floats == [("eps", 1e-5)]


def test_nested_parameters_are_flattened_in_place():
    operands = lower(Rope(X, 16, RopeParams((1.0, 0.1), 1.5)))
    assert operands.weights == [("frequencies", (1.0, 0.1)), ("axes", None)]
    assert (operands.ints, operands.floats) == ([("head_dim", 16)], [("attention_factor", 1.5)])


def test_kinds_are_those_of_the_native_enumeration():
    (body,) = re.findall(r"enum Kind : int64_t \{(.*?)\}", KERNEL_H.read_text(), re.DOTALL)
    assert tuple(re.findall(r"KIND_(\w+)", body)) == tuple(kind.upper() for kind in KINDS)


def test_unknown_kinds_and_fields_are_errors():
    with pytest.raises(GraphError, match=r"gated_activation.kind is 'swish'; it must be one of none, silu"):
        lower(GatedActivation(X, X, "swish"))

    @dataclass(frozen=True, slots=True)
    class Strange(Op):
        numbers: dict[str, int]

        def infer_shape(self):
            return TOKENS, 1

        def flops(self, sizes):
            return sizes.tokens

        def evaluate(self, step):
            return step

    with pytest.raises(GraphError, match=r"strange.numbers: a field of type .* cannot be given"):
        lower(Strange({}))
