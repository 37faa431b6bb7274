"""Runs single operations on the cpu backend and in numpy, on the same operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.cpu.lowering import lower
from octavo.backends.cpu.packing import pack
from octavo.backends.cpu.threads import plan_threads
from octavo.batch import Batch
from octavo.graph.ops.base import Evaluation, LayerCache, Op
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Parameter, RowDomain, Value
from octavo.quantization.packed import Weight
from tests.support.guarded import guard_arrays, guarded

Array = NDArray[np.float32]


def available_isas() -> list[str]:
    """The levels that this machine (or an emulating build) can run."""
    known = _native.known_isas()
    return known[: known.index(_native.detected_isa()) + 1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", available_isas())


def packed_product(packed: _native.PackedWeight, x: Array, isa: str, threads: int = 1) -> Array:
    """x [rows, in] times the transpose of [out, in] by the kernel alone, into a poisoned output: [rows, out]."""
    out = np.full((len(x), packed.shape[0]), np.nan, np.float32)
    _native.KernelRun("linear", isa, threads)([x], [packed, None], [], [], out)
    return out


AMX_ERROR = 3e-5  # relative squared error of bfloat16 weights and activations, which is 6e-6 of many sums


def assert_agrees(actual: Array, scalar: Array, isa: str, exact: NDArray[np.float64], most: float = AMX_ERROR) -> None:
    """Every level gives the bits of the scalar one, but that of AMX, whose products of quantized weights are its own.

    Those are near `exact`; tests/support/bf16_products.py knows their bits.
    """
    if isa != "amx":
        np.testing.assert_array_equal(actual.view(np.uint32), scalar.view(np.uint32), isa)
        return
    error = float(np.square(actual - exact).sum() / np.square(exact).sum())
    assert error <= most, (isa, error)


def make_batch(num_tokens: int, outputs: list[int] | None = None, vocab: int = 1) -> Batch:
    """One request of `num_tokens` tokens in consecutive slots of blocks of 16."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    blocks = -(-num_tokens // 16)
    return Batch(
        token_ids=tokens % vocab,
        positions=tokens,
        query_start_loc=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None, None],
        slot_mapping=tokens[None],
        logits_indices=np.array(outputs if outputs is not None else [num_tokens - 1], np.int32),
    )


def rows_of(rows: RowDomain, batch: Batch) -> int:
    return {
        TOKENS: len(batch.token_ids),
        OUTPUTS: len(batch.output_indices),
        LOGITS: len(batch.logits_indices),
    }[rows]


@dataclass
class SingleOp:
    """A program of one operation, in checked mode: poisoned output, finite results, guard pages around all operands."""

    op: Op
    weights: Mapping[str, Weight]
    isa: str
    threads: int
    limits: Batch  # the largest step
    vocab: int = 1 << 20

    def __post_init__(self) -> None:
        operands = lower(self.op)
        self.inputs: list[Value] = list(dict.fromkeys(v for _, v in operands.inputs if v is not None))
        rows, cols = self.op.infer_shape()
        values, offset = [], 0
        for r, c in [*((v.rows, v.cols) for v in self.inputs), (rows, cols)]:
            values.append((offset, c, (TOKENS, OUTPUTS, LOGITS).index(r)))
            offset += -(-rows_of(r, self.limits) * c * 4 // 64) * 64
        self.output_rows = rows
        batch = self.limits
        limits = (len(batch.token_ids), len(batch.seq_lens), len(batch.output_indices), int(batch.seq_lens.max()))
        self.program = _native.Program(
            self.isa,
            self.threads,
            plan_threads(self.threads).spin_us,
            (*limits, self.vocab),
            values,
            offset,
            checked=True,
        )
        self.program.add_record(
            self.op.name,
            self.op.name,
            len(self.inputs),
            [(name, -1 if v is None else self.inputs.index(v)) for name, v in operands.inputs],
            [(name, self._add_weight(w)) for name, w in operands.weights],
            operands.ints,
            operands.floats,
            [(name, [self._add_weight(w) for w in elements]) for name, elements in operands.tuples],
            (-1, 0) if self.op.cache is None else (0, 0),
        )
        self.program.finish()

    def _add_weight(self, operand: Parameter | tuple[float, ...] | None) -> int:
        if operand is None:
            return -1
        if isinstance(operand, tuple):
            return self.program.add_plain_weight(guarded(np.array(operand, np.float32)))
        weight = self.weights[operand.name]
        if not operand.is_matrix:
            return self.program.add_plain_weight(guarded(weight.dequantize().reshape(-1)))
        packed = pack(guard_arrays(weight))
        panels = guarded(packed.panels, alignment=64)
        return self.program.add_packed_weight(_native.view_packed(packed.type_name, panels, *packed.shape))

    def __call__(self, batch: Batch, values: Mapping[Value, Array]) -> Array:
        for index, value in enumerate(self.inputs):
            self.program.value(index, rows_of(value.rows, batch))[:] = values[value]
        self.program.submit(guard_arrays(batch), 0, None, None).wait()
        return self.program.value(len(self.inputs), rows_of(self.output_rows, batch)).copy()


@pytest.fixture
def cpu_batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def run_op() -> Callable[..., Array]:
    """run_op(op, values, weights=..., batch=..., isa=..., threads=...) -> output of the native kernel."""

    def run(
        op: Op,
        values: Mapping[Value, Array],
        *,
        weights: Mapping[str, Weight] | None = None,
        batch: Batch | None = None,
        isa: str = "",
        threads: int = 1,
    ) -> Array:
        batch = batch or make_batch(next(iter(values.values())).shape[0])
        return SingleOp(op, weights or {}, isa or _native.detected_isa(), threads, replace(batch))(batch, values)

    return run


@pytest.fixture
def numpy_op() -> Callable[..., NDArray[np.float64]]:
    """numpy_op(op, values, weights=..., batch=...) -> its meaning in float64."""

    def evaluate(
        op: Op,
        values: Mapping[Value, Array],
        *,
        weights: Mapping[str, Weight] | None = None,
        batch: Batch | None = None,
        caches: dict[int, LayerCache] | None = None,
    ) -> NDArray[np.float64]:
        batch = batch or make_batch(next(iter(values.values())).shape[0])
        wide = {value: array.astype(np.float64) for value, array in values.items()}
        dense = {p: (weights or {})[p.name].dequantize().astype(np.float64) for p in op.parameters}
        return op.evaluate(Evaluation(batch, np.float64, dense, caches or {}, {}, wide))

    return evaluate
