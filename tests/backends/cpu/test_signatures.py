"""Fields of operations compared with the signatures of their kernels: a field that moves is an error."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.lowering import Operands, lower
from octavo.graph.ops import recurrence
from octavo.graph.ops.adapted import AdaptedLinear
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.encoder import CrossAttention, EncoderAttention, EncoderAttentionParams
from octavo.graph.ops.latent_attention import LatentAttention
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.ops.low_rank import AddLowRank, AddToEmbedding
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.recurrence import DeltaHeads, GatedDeltaRule, ScanHeads, SelectiveScan
from octavo.graph.ops.spanning_norm import GroupSums, NormColumns, SpanningNorm
from octavo.graph.ops.stages import BORDERS
from octavo.graph.ops.streams import AddToStreams
from octavo.graph.values import SELECTED, TOKENS, IndexArray, Parameter, RowDomain, Value
from tests.support.operations import operations

X = Value(0, TOKENS, 64)
W = Parameter("w", (32, 64))
PARAMS = AttentionParams(0, 2, 1, 16, 0.25)
FRAMES = RowDomain("frames")
PLAIN = (Value, Parameter, IndexArray, RowDomain)  # dataclasses that become one operand
NESTED: dict[type, Any] = {
    EncoderAttention: EncoderAttention(X, X, X, EncoderAttentionParams(2, 2, 32, 0.25)),
    CrossAttention: CrossAttention(X, X, X, EncoderAttentionParams(2, 2, 32, 0.25), 0, FRAMES),
    Attention: Attention(X, X, X, PARAMS),
    FusedAttention: FusedAttention(X, PARAMS, RopeParams((1.0, 0.5))),
    LatentAttention: LatentAttention(X, X, X, X, PARAMS),
    FusedLinear: FusedLinear(X, None, (W,), (None,)),
    GatedDeltaRule: GatedDeltaRule(X, X, X, W, W, DeltaHeads(1, 2, 8, 8), 1),
    GroupSums: GroupSums(X, X, NormColumns(32, 0, 2), 2),
    SpanningNorm: SpanningNorm(X, X, X, W, W, 1e-5, NormColumns(32, 0, 2)),
    SelectiveScan: SelectiveScan(X, X, W, W, W, ScanHeads(2, 8, 1, 8), 1),
    MoE: MoE(X, W, W, W, W, Routing(1)),
    Rope: Rope(X, 16, RopeParams((1.0, 0.5))),
    AddToStreams: AddToStreams(X, X, X, (1.0, 0.5)),
    AdaptedLinear: AdaptedLinear(X, X, None, (W,), (None,), norm=W),
    AddToEmbedding: AddToEmbedding(X, X, (W,)),
    AdaptedMoE: AdaptedMoE(x=X, router=W, gate=W, up=W, down=W, routing=Routing(1), slots=X, weights=(W, W)),
}
# The passes join each AddLowRank with its product.
KERNELS = {cls for cls in operations() if not issubclass(cls, BORDERS) and cls is not AddLowRank}


def lowered(op: Any) -> Operands:
    return lower(op, None, {SELECTED: 0, FRAMES: 3})


def example(cls: type[Op]) -> Op:
    """An operation with something in each field."""
    by_type = {Value: X, Parameter: W, IndexArray: SELECTED, int: 1, float: 0.5, str: "silu", bool: True}
    hints = get_type_hints(cls)
    if cls in NESTED:
        return NESTED[cls]
    return cls(**{f.name: by_type.get(hints[f.name], f.default) for f in dataclasses.fields(cls)})


def rebuilt(instance: Any, fields: list[tuple[str, Any, Any]], namespace: dict[str, Any]) -> Any:
    """An instance of a class of the same name with those fields: name, type, value."""
    bases = (Op,) if isinstance(instance, Op) else ()
    cls = dataclasses.make_dataclass(
        type(instance).__name__,
        [(name, kind) for name, kind, _ in fields],
        bases=bases,
        namespace=namespace,
        frozen=True,
    )
    return cls(*(value for _, _, value in fields))


def fields_of(instance: Any) -> list[tuple[str, Any, Any]]:
    hints = get_type_hints(type(instance))
    return [(f.name, hints[f.name], getattr(instance, f.name)) for f in dataclasses.fields(instance)]


def methods(instance: Any) -> dict[str, Any]:
    """The members of an operation that `lower` needs, independent of its fields."""
    if not isinstance(instance, Op):
        return {}
    cache = instance.cache
    abstract = dict.fromkeys(("infer_shape", "flops", "evaluate"), lambda *_: None)
    return {**abstract, "cache": property(lambda _: cache)}


def changed(instance: Any, change: Any) -> Iterator[Any]:
    """The instance with the fields of it, or of one dataclass inside it, in every way that `change` gives."""
    fields = fields_of(instance)
    for other in change(fields):
        yield rebuilt(instance, other, methods(instance))
    for i, (name, _, value) in enumerate(fields):
        if dataclasses.is_dataclass(value) and not isinstance(value, PLAIN):
            for inner in changed(value, change):
                yield rebuilt(instance, [*fields[:i], (name, type(inner), inner), *fields[i + 1 :]], methods(instance))


def reordered(fields: list[tuple[str, Any, Any]]) -> Iterator[list[tuple[str, Any, Any]]]:
    for i, j in itertools.combinations(range(len(fields)), 2):
        other = list(fields)
        other[i], other[j] = other[j], other[i]
        yield other


def renamed(fields: list[tuple[str, Any, Any]]) -> Iterator[list[tuple[str, Any, Any]]]:
    for i, (name, kind, value) in enumerate(fields):
        if not dataclasses.is_dataclass(value) or isinstance(value, PLAIN):
            yield [*fields[:i], (name + "_new", kind, value), *fields[i + 1 :]]


def extended(fields: list[tuple[str, Any, Any]]) -> Iterator[list[tuple[str, Any, Any]]]:
    for kind, value in ((Value, X), (Parameter, W), (int, 1), (float, 0.5), (bool, True), (str, "silu")):
        yield [*fields, ("field_new", kind, value)]


def shortened(fields: list[tuple[str, Any, Any]]) -> Iterator[list[tuple[str, Any, Any]]]:
    for i, (_, _, value) in enumerate(fields):
        if not dataclasses.is_dataclass(value) or isinstance(value, PLAIN):
            yield [*fields[:i], *fields[i + 1 :]]


def add_record(name: str, operands: Operands) -> None:
    program = _native.Program("scalar", 1, (0, 0), (1, 1, 1, 1, 1), [], 0)
    program.add_record(
        name,
        f"layers.0: {name}",
        -1,
        [(field, -1) for field, _ in operands.inputs],
        [(field, -1) for field, _ in operands.weights],
        operands.ints,
        operands.floats,
        [(field, [-1] * len(elements)) for field, elements in operands.tuples],
        state_size=int(any(example(cls).name == name for cls in KERNELS if cls.__module__ == recurrence.__name__)),
    )


def assert_fields_are_read(name: str, operands: Operands) -> None:
    """The names are right; that no operand is there is the next error."""
    with pytest.raises(ValueError, match=f"layers.0: {name}: not every field has an operand"):
        add_record(name, operands)


def by_name(cls: type) -> str:
    return cls.__name__


def test_every_operation_has_a_kernel():
    measuring = {name for name in _native.kernel_names() if name.startswith("ceiling_")}
    after_the_graph = {"sample", "sample_parts"}
    assert {example(cls).name for cls in KERNELS} == set(_native.kernel_names()) - measuring - after_the_graph


@pytest.mark.parametrize("cls", sorted(KERNELS, key=by_name), ids=by_name)
def test_the_fields_of_an_operation_are_those_of_its_kernel(cls):
    assert_fields_are_read(example(cls).name, lowered(example(cls)))


@pytest.mark.parametrize("cls", sorted(KERNELS, key=by_name), ids=by_name)
def test_fields_in_another_order_are_refused_or_give_the_same_operands(cls):
    """Two fields of different kinds may change places: that moves no operand."""
    op, kinds = example(cls), ("inputs", "weights", "ints", "floats", "tuples")
    for other in changed(op, reordered):
        operands = lowered(other)
        if all(getattr(operands, kind) == getattr(lowered(op), kind) for kind in kinds):
            assert_fields_are_read(op.name, operands)
            continue
        with pytest.raises(
            ValueError, match=f"layers.0: {op.name}: the operation has field '.*' as .*, its kernel reads '"
        ):
            add_record(op.name, operands)


@pytest.mark.parametrize("change", [renamed, extended, shortened])
@pytest.mark.parametrize("cls", sorted(KERNELS, key=by_name), ids=by_name)
def test_fields_that_are_renamed_added_or_removed_are_refused(cls, change):
    op = example(cls)
    for other in changed(op, change):
        with pytest.raises(ValueError, match=f"layers.0: {op.name}: the operation has "):
            add_record(op.name, lowered(other))


def test_the_error_names_operation_field_and_place():
    op = Rope(X, 16, RopeParams((1.0, 0.5)))
    operands = lowered(op)
    operands.floats = [("scale", 1.0), *operands.floats]
    message = "layers.0: rope: the operation has field 'scale' as float 0, its kernel reads 'attention_factor' there"
    with pytest.raises(ValueError, match=message):
        add_record(op.name, operands)


def test_tuples_of_weights_must_be_equally_long():
    operands = lowered(FusedLinear(X, None, (W, W), (None,)))
    with pytest.raises(ValueError, match="4 weights do not fit"):
        add_record("fused_linear", operands)
