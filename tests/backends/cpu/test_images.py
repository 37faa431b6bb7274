"""Gates whose output is kept as the next product reads it: the bits are those of the way over floats."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits
from octavo.backends.cpu import _native
from octavo.backends.cpu.compiler import CompileOptions
from octavo.backends.cpu.compiler import compile as compile_graph
from octavo.backends.cpu.executor import CpuExecutor
from octavo.backends.cpu.lowering import lower
from octavo.backends.cpu.packing import pack
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.models import build_graph, load_architecture
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight, Weight
from tests.backends.cpu.conftest import make_batch
from tests.backends.cpu.test_batch_invariance import CONFIG, make_weights, shapes
from tests.backends.cpu.test_linear_orders import ordered
from tests.support.quantize import random_weight

K, HIDDEN, MOST_ROWS = 256, 288, 700
X, GATE, OUT = Value(0, TOKENS, K), Value(1, TOKENS, HIDDEN), Value(2, TOKENS, K)
BIASES = {
    name: DenseWeight(np.random.default_rng(seed).standard_normal(n, dtype=np.float32))
    for seed, (name, n) in enumerate({"gate.bias": HIDDEN, "up.bias": HIDDEN, "down.bias": K}.items())
}


def operations(*, biased: bool, kind: str) -> list[Op]:
    def bias(name: str, n: int) -> Parameter | None:
        return Parameter(f"{name}.bias", (n,)) if biased else None

    gate_up = tuple(Parameter(name, (HIDDEN, K)) for name in ("gate", "up"))
    gate = FusedLinear(X, None, gate_up, (bias("gate", HIDDEN), bias("up", HIDDEN)), kind=kind)
    return [gate, FusedLinear(GATE, X, (Parameter("down", (K, HIDDEN)),), (bias("down", K),))]


def run(
    ops: list[Op],
    weights: dict[str, Weight],
    x: NDArray[np.float32],
    isa: str,
    threads: int,
    *,
    as_image: bool,
    checked: bool = False,
) -> NDArray[np.float32]:
    sizes = [K * MOST_ROWS * 4, HIDDEN * MOST_ROWS * 4, K * MOST_ROWS * 4]
    values = [(sum(sizes[:i]), cols, 0) for i, cols in enumerate((K, HIDDEN, K))]
    limits = (MOST_ROWS, 1, 1, MOST_ROWS, 1)
    program = _native.Program(isa, threads, (0, 0), limits, values, sum(sizes), checked=checked)
    if as_image:
        program.keep_as_image(1)

    def index_of(operand: Parameter | tuple[float, ...] | None) -> int:
        if operand is None:
            return -1
        assert isinstance(operand, Parameter)
        weight = (weights | BIASES)[operand.name]
        if operand.is_matrix:
            return program.add_packed_weight(pack(weight))
        return program.add_plain_weight(weight.dequantize())

    for i, op in enumerate(ops):
        operands = lower(op)
        program.add_record(
            op.name,
            op.name,
            i + 1,
            [(name, -1 if value is None else value.id) for name, value in operands.inputs],
            [(name, index_of(operand)) for name, operand in operands.weights],
            operands.ints,
            operands.floats,
            [(name, [index_of(operand) for operand in elements]) for name, elements in operands.tuples],
        )
    program.finish()
    out = np.full((len(x), K), np.nan, np.float32)
    for _ in range(2):  # the second step finds what the first one left
        program.submit(make_batch(len(x)), 2, None, None, inputs=[(0, x)], copies=[(2, out)]).wait()
    if as_image:
        with pytest.raises(ValueError, match="kept as an image"):
            program.value(1, len(x))
        with pytest.raises(ValueError, match="kept as an image"):
            program.submit(make_batch(len(x)), 2, None, None, copies=[(1, np.empty((len(x), HIDDEN), np.float32))])
    program.close()
    return out


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 40, 129, 530])
@pytest.mark.parametrize(
    ("gate", "up", "down", "kind", "biased"),
    [
        ("Q4_K", "Q4_K", "Q5_1", "silu", False),
        ("Q4_1", "Q6_K", "Q8_0", "gelu_tanh", True),
        ("F16", "Q5_0", "Q4_0", "relu2", True),
        ("BF16", "BF16", "Q4_1", "silu", False),
    ],
)
def test_the_bits_are_those_of_the_way_over_floats(gate, up, down, kind, biased, rows, isa):
    types = {"gate": gate, "up": up, "down": down}
    weights = {
        name: random_weight(type_name, (K, HIDDEN) if name == "down" else (HIDDEN, K), seed)
        for seed, (name, type_name) in enumerate(types.items())
    }
    x = np.random.default_rng(3).standard_normal((rows, K), dtype=np.float32)
    ops = operations(biased=biased, kind=kind)
    expected = run(ops, weights, x, isa, 1, as_image=False)
    assert np.isfinite(expected).all()
    for threads in (1, 3):
        found = run(ops, weights, x, isa, threads, as_image=True)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_what_cannot_be_an_image_is_refused() -> None:
    program = _native.Program(_native.detected_isa(), 1, (0, 0), (1, 1, 1, 1, 1), [(0, 48, 0)], 4096)
    with pytest.raises(ValueError, match="48 columns"):
        program.keep_as_image(0)


def test_only_quantized_weights_in_the_order_of_their_columns_read_images() -> None:
    assert pack(random_weight("Q4_K", (16, K), 0)).reads_image
    assert not pack(random_weight("F16", (16, K), 0)).reads_image
    assert not pack(ordered((16, K), 0)).reads_image


def is_image(executor: CpuExecutor, value: int) -> bool:
    try:
        executor._program.value(value, 1)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("change", ["none", "checked", "dense"])
def test_the_compiler_keeps_images_where_it_can(change: str) -> None:
    graph = build_graph("llama", load_architecture("llama").Config.from_hf(ConfigReader(CONFIG)), shapes())
    weights = make_weights()
    if change == "dense":
        name = "layers.0.mlp.down_proj.weight"
        weights[name] = DenseWeight(weights[name].dequantize().astype(np.float16))
    executor = compile_graph(
        graph, weights, ExecutorLimits(8, 1, 1, 64), options=CompileOptions(checked=change == "checked")
    )
    try:
        kept = [node.op for index, node in enumerate(executor._graph.nodes) if is_image(executor, index)]
        assert len(kept) == (1 if change == "none" else 0)
        assert all(isinstance(op, FusedLinear) and op.kind == "silu" for op in kept)
    finally:
        executor.close()
