"""A record whose operands do not fit each other is refused when it is added, whichever operand it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo.backends import get_backend
from octavo.backends.cpu import _native
from octavo.graph.adapters import join_products
from octavo.graph.builder import Graph
from octavo.graph.ops.base import Op
from octavo.graph.passes import optimize
from octavo.graph.values import TOKENS
from octavo.quantization.packed import DenseWeight
from tests.backends.test_operations import ALL_OPS, GRAPHS, LIMITS, SHAPES

ODD_COLS = 7  # of a value that no operation here can take
ODD_SIZE = 1_000_003
OF_ANY_SIZE = {"query_scales"}  # a factor for so many positions
MAY_BE_NARROWER = {"group_sums": {"x"}}  # the columns of one rank


class Probe:
    """A program that first offers each record with one operand replaced, which must be refused every time."""

    num_refused = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        *before, values, workspace_bytes = args
        self._odd_value = len(values)
        room = ODD_COLS * 4 * LIMITS.max_num_batched_tokens
        values = [*values, (workspace_bytes, ODD_COLS, 0)]
        self._program = _native_program(*before, values, workspace_bytes + -(-room // 64) * 64, **kwargs)
        self._odd_weight = self._program.add_plain_weight(np.zeros(ODD_SIZE, np.float32))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def add_record(self, *record: Any) -> None:
        for other in self._damaged(record):
            with pytest.raises(ValueError, match=r"the operands do not fit each other: .*output"):
                self._program.add_record(*other)
            Probe.num_refused += 1
        self._program.add_record(*record)

    def _damaged(self, record: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        name, label, output, inputs, weights, *rest = record
        yield name, label, self._odd_value, inputs, weights, *rest
        for other in replaced(inputs, self._odd_value, keep=MAY_BE_NARROWER.get(name, set())):
            yield name, label, output, other, weights, *rest
        for other in replaced(weights, self._odd_weight, keep=OF_ANY_SIZE):
            yield name, label, output, inputs, other, *rest
        ints, floats, tuples, *others = rest
        for i, (field, elements) in enumerate(tuples):
            for elements_now in replaced([(field, element) for element in elements], self._odd_weight, keep=set()):
                tuples_now = [*tuples[:i], (field, [index for _, index in elements_now]), *tuples[i + 1 :]]
                yield name, label, output, inputs, weights, ints, floats, tuples_now, *others


def replaced(operands: list[tuple[str, int]], index: int, keep: set[str]) -> Iterator[list[tuple[str, int]]]:
    """The operands with one of those that are there replaced."""
    for i, (field, old) in enumerate(operands):
        if old >= 0 and field not in keep:
            yield [*operands[:i], (field, index), *operands[i + 1 :]]


_native_program = _native.Program


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.__name__)
def test_a_record_with_one_wrong_operand_is_refused(op: type[Op], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in SHAPES.items()}
    g = Graph(SHAPES)
    value = GRAPHS[op](g, g.embedding("embed"))
    g.output = g.select_rows(value) if value.rows is TOKENS else value
    monkeypatch.setattr(_native, "Program", Probe)
    before = Probe.num_refused
    get_backend("cpu").compile(optimize(g, (join_products,)), weights, LIMITS).close()
    assert Probe.num_refused - before >= 2  # at least input or weight, and output, of one record


@pytest.mark.parametrize(
    ("ints", "match"),
    [
        ([("begin", 60), ("count", 40)], r"x \[32, 64\], begin 60, count 40, output \[32, 40\]"),
        ([("begin", -1), ("count", 40)], "begin -1"),
        ([("begin", 0), ("count", 41)], "count 41"),
    ],
)
def test_numbers_that_lead_out_of_an_operand_are_refused(ints: list[tuple[str, int]], match: str) -> None:
    program = _native.Program("scalar", 1, (0, 0), (32, 2, 32, 64, 50), [(0, 64, 0), (8192, 40, 0)], 16384)
    with pytest.raises(ValueError, match=match):
        program.add_record("columns", "layers.0: columns", 1, [("x", 0)], [], ints, [], [])
    program.add_record("columns", "layers.0: columns", 1, [("x", 0)], [], [("begin", 24), ("count", 40)], [], [])
