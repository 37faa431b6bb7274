"""Operations with states on the cpu: numpy's meaning, the same bits on every instruction set and for every chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import Executor, ExecutorLimits, reference
from octavo.backends.cpu import CompileOptions
from octavo.backends.cpu import compile as compile_native
from octavo.batch import Batch
from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import (
    ChannelScan,
    DeltaHeads,
    DiagonalDeltaRule,
    GatedDeltaRule,
    RealGatedRecurrence,
    ScanHeads,
    SelectiveScan,
)
from octavo.graph.ops.rowwise import Activation
from octavo.graph.values import Parameter, Value
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step

VOCAB, NUM_SLOTS = 40, 6
LIMITS = ExecutorLimits(96, 4, 96, 128)
BLOCKS = [0] * 20  # nothing is kept in them
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()


@dataclass(frozen=True)
class Case:
    """A graph of one operation after an embedding of so many columns."""

    cols: int
    shapes: dict[str, tuple[int, ...]]
    build: Callable[[Graph, Value], Value]
    tolerance: float = 2e-6
    sizes: dict[str, float] = field(default_factory=dict)  # of weights; 0.5 for others

    def graph(self) -> tuple[Graph, dict[str, DenseWeight]]:
        shapes = {"embed.weight": (VOCAB, self.cols), **self.shapes}
        rng = np.random.default_rng(self.cols)
        arrays = {n: (rng.standard_normal(s) * self.sizes.get(n, 0.5)).astype(np.float32) for n, s in shapes.items()}
        signs = {".decay": -1.0, ".slope": 1.0}
        arrays = {n: signs[n[1:]] * np.abs(array) if n[1:] in signs else array for n, array in arrays.items()}
        g = Graph(shapes)
        g.output = g.select_rows(self.build(g, g.embedding("embed")))
        return g, {name: DenseWeight(array) for name, array in arrays.items()}


def conv(cols: int, taps: int, kind: str | None, *, bias: bool) -> Case:
    shapes = {"conv.weight": (cols * taps,), **({"conv.bias": (cols,)} if bias else {})}
    return Case(cols, shapes, lambda g, x: g.short_conv(x, "conv", kind))


def delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Case:
    widths = {"qkv": 2 * key_heads * key_dim + value_heads * value_dim, "beta": value_heads, "alpha": value_heads}
    shapes = {**{f"{n}.weight": (w, 32) for n, w in widths.items()}, "a.decay": (value_heads,), "a.dt": (value_heads,)}

    def build(g: Graph, x: Value) -> Value:
        qkv, beta, alpha = (g.linear(x, name) for name in widths)
        decay, dt = (Parameter(name, (value_heads,)) for name in ("a.decay", "a.dt"))
        heads = DeltaHeads(key_heads, value_heads, key_dim, value_dim, is_tiled=key_heads == 3)
        return g.add(GatedDeltaRule(qkv, beta, alpha, decay, dt, heads, 0))

    return Case(32, shapes, build, 2e-5)


def scan(heads: int, head_dim: int, groups: int, state_dim: int) -> Case:
    widths = {"xbc": heads * head_dim + 2 * groups * state_dim, "dt": heads}
    vectors = ("a.decay", "a.skip", "a.dt")
    shapes = {**{f"{n}.weight": (w, 32) for n, w in widths.items()}, **dict.fromkeys(vectors, (heads,))}

    def build(g: Graph, x: Value) -> Value:
        xbc, dt = (g.linear(x, name) for name in widths)
        parameters = (Parameter(name, (heads,)) for name in vectors)
        return g.add(SelectiveScan(xbc, dt, *parameters, ScanHeads(heads, head_dim, groups, state_dim), 0))

    return Case(32, shapes, build, 2e-5)


def channels(cols: int, state_dim: int) -> Case:
    widths = {"x": cols, "dt": cols, "b": state_dim, "c": state_dim}
    vectors = {"a.decay": (state_dim * cols,), "a.skip": (cols,)}
    shapes = {**{f"{n}.weight": (w, 32) for n, w in widths.items()}, **vectors}

    def build(g: Graph, x: Value) -> Value:
        parameters = (Parameter(name, shape) for name, shape in vectors.items())
        return g.add(ChannelScan(*(g.linear(x, name) for name in widths), *parameters, 0))

    return Case(32, shapes, build, 2e-5)


def diagonal(heads: int, key_dim: int, value_dim: int, *, kimi: bool) -> Case:
    """With decays, shared keys and amounts as in Kimi Linear, or as in RWKV 7."""
    keys = ("q", "k", "gate") if kimi else ("q", "k", "gate", "read", "erase")
    widths = {**dict.fromkeys(keys, heads * key_dim), "v": heads * value_dim, "beta": heads}
    shapes = {**{f"{n}.weight": (w, 32) for n, w in widths.items()}, "a.decay": (heads,)}

    def build(g: Graph, x: Value) -> Value:
        made = {name: g.linear(x, name) for name in widths}
        read, erase = (made["k"],) * 2 if kimi else (made["read"] * 0.1, made["erase"] * 0.1)
        gate = made["gate"] if kimi else g.add(Activation(made["gate"], "sigmoid")) * -0.6
        beta, decay = (made["beta"], Parameter("a.decay", (heads,))) if kimi else (None, None)
        k = g.rms_norm(made["k"], None, 1e-6, key_dim) * key_dim**-0.5
        read, erase = (k, k) if kimi else (read, erase)
        rest = (gate, beta, decay, key_dim, value_dim, kimi, 0)
        return g.add(DiagonalDeltaRule(made["q"], k, made["v"], read, erase, *rest))

    return Case(32, shapes, build, 2e-5)


def gated(cols: int) -> Case:
    vectors = dict.fromkeys(("a.slope", "a.input", "a.gate"), (cols,))
    shapes = {**{f"{n}.weight": (cols, 32) for n in "xig"}, **vectors}

    def build(g: Graph, x: Value) -> Value:
        slope, *biases = (Parameter(name, shape) for name, shape in vectors.items())
        return g.add(RealGatedRecurrence(*(g.linear(x, name) for name in "xig"), slope, *biases, 0))

    return Case(32, shapes, build, 2e-5)


CASES = {
    "diagonal-kimi": diagonal(2, 16, 32, kimi=True),
    "diagonal-kimi-odd": diagonal(3, 5, 19, kimi=True),
    "diagonal-rwkv": diagonal(2, 24, 24, kimi=False),
    "gated": gated(64),
    "gated-odd": gated(23),
    "delta": delta(2, 4, 16, 32),
    "delta-odd": delta(1, 3, 5, 19),
    "delta-tiled": delta(3, 6, 16, 16),
    "scan": scan(4, 32, 2, 16),
    "scan-odd": scan(3, 7, 1, 5),
    "channels": channels(64, 16),
    "channels-odd": channels(23, 5),
    "conv": conv(64, 3, None, bias=False),
    "conv-silu-biased": conv(33, 4, "silu", bias=True),
    "conv-narrow": conv(1, 2, None, bias=True),
    "conv-8-taps": conv(15, 8, "gelu", bias=False),
}


def with_states(
    batch: Batch,
    *,
    slots: list[int],
    saves: list[list[tuple[int, int]]] | None = None,
    copies: Sequence[tuple[int, int]] = (),
) -> Batch:
    batch.state_slots = np.array(slots, np.int32)
    batch.state_saves = None if saves is None else np.array(saves, np.int32)
    batch.state_copies = np.array(copies, np.int32).reshape(-1, 2)
    return batch


def native(case: Case, isa: str, threads: int = 2) -> Executor:
    executor = compile_native(*case.graph(), LIMITS, num_threads=threads, options=CompileOptions(isa, checked=True))
    executor.allocate_cache(64, 16, NUM_SLOTS)
    return executor


def rows(executor: Executor, batch: Batch) -> NDArray[np.floating]:
    logits = executor.submit(batch).wait().logits
    assert logits is not None
    return logits


def script(executor: Executor) -> list[NDArray[np.floating]]:
    """Sequences of different lengths side by side; one is forked, one starts in a slot that another has left."""
    first, second, late = (Request(tokens, BLOCKS) for tokens in (TOKENS, TOKENS[::-1], TOKENS[20:]))
    found = [rows(executor, with_states(step([(first, 20), (second, 1)]), slots=[4, 1]))]
    batch = with_states(step([(second, 9), (first, 17)]), slots=[1, 4], saves=[[(0, -1)], [(12, 5)]])
    found.append(rows(executor, batch))
    fork = Request(TOKENS, BLOCKS, first.computed)
    saved = Request(TOKENS, BLOCKS, 32)
    batch = with_states(
        step([(first, 1), (fork, 3), (late, 5), (saved, 8)]), slots=[4, 2, 1, 5], copies=[(4, 0), (0, 2)]
    )
    found.append(rows(executor, batch))
    found.append(rows(executor, with_states(step([(late, 1), (first, 1)]), slots=[1, 4], saves=[[(1, 0)], [(0, -1)]])))
    found.append(rows(executor, with_states(step([(Request(TOKENS[20:], BLOCKS, 6), 4)]), slots=[0])))
    return found


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_a_kernel_has_the_meaning_of_numpy(case: Case, isa: str) -> None:
    judge = reference.compile(*case.graph(), LIMITS, dtype=np.float64)
    judge.allocate_cache(64, 16, NUM_SLOTS)
    expected = script(judge)
    scalar = script(native(case, "scalar", 1))
    for wanted, found, least in zip(expected, script(native(case, isa)), scalar, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=case.tolerance * np.abs(expected[0]).max())
        np.testing.assert_array_equal(found, least)


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_change_no_bit(case: Case, isa: str, threads: int) -> None:
    executor = native(case, isa, threads)
    whole = rows(executor, with_states(step([(Request(TOKENS, BLOCKS), 70)]), slots=[3]))
    for sizes in ([1] * 70, [17, 1, 30, 22]):
        request = Request(TOKENS, BLOCKS)
        parts = [rows(executor, with_states(step([(request, size)]), slots=[3])) for size in sizes]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    saves = [(40, 1), (41, 0), (69, 2), (0, -1)]
    saved = with_states(step([(Request(TOKENS, BLOCKS), 70)]), slots=[3], saves=[saves])
    np.testing.assert_array_equal(rows(executor, saved), whole)
    for count, slot in saves[:3]:
        rest = step([(Request(TOKENS, BLOCKS, count), 70 - count)])
        np.testing.assert_array_equal(rows(executor, with_states(rest, slots=[slot])), whole[count:])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_slots_that_are_wrong_are_refused(backend: str) -> None:
    case = CASES["conv"]
    judge = reference.compile(*case.graph(), LIMITS)
    judge.allocate_cache(64, 16, NUM_SLOTS)
    executor = judge if backend == "reference" else native(case, "scalar")

    def submit(**fields: object) -> None:
        batch = step([(Request(TOKENS, BLOCKS), 5), (Request(TOKENS, BLOCKS), 2)])
        executor.submit(with_states(batch, **fields))

    submit(slots=[0, 1], saves=[[(3, 4), (5, 2)], [(2, 3), (0, -1)]], copies=[(0, 1)])
    for fields in (
        {"slots": [0, 6]},
        {"slots": [-1, 0]},
        {"slots": [2, 2]},
        {"slots": [0]},
        {"slots": [0, 1], "copies": [(0, 6)]},
        {"slots": [0, 1], "copies": [(-1, 0)]},
        {"slots": [0, 1], "saves": [[(6, 2)], [(0, -1)]]},
        {"slots": [0, 1], "saves": [[(0, 2)], [(0, -1)]]},
        {"slots": [0, 1], "saves": [[(1, 1)], [(0, -1)]]},
        {"slots": [0, 1], "saves": [[(1, 6)], [(0, -1)]]},
        {"slots": [0, 1], "saves": [[(2, 2), (2, 3)], [(0, -1), (0, -1)]]},
        {"slots": [0, 1], "saves": [[(1, 3)]]},
    ):
        with pytest.raises(ValueError, match="state"):
            submit(**fields)
    batch = step([(Request(TOKENS, BLOCKS), 5)])
    batch.state_slots = None
    with pytest.raises(ValueError, match="state_slots"):
        executor.submit(batch)


def test_a_graph_with_states_needs_slots() -> None:
    executor = compile_native(*CASES["conv"].graph(), LIMITS)
    with pytest.raises(Exception, match="the graph has states: at least one slot is needed"):
        executor.allocate_cache(4, 16)
