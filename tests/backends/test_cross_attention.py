"""Tokens that see the cached rows of an encoder, a domain of its own: a made-up model, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, cpu, get_backend, reference
from octavo.backends.cpu import CompileOptions
from octavo.batch import Batch, DomainRows
from octavo.config import CPU_KV_DTYPES, KVDtype
from octavo.engine.loading import model_graph
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.cache import CacheGroup, CacheLayout, KVCache, cache_layout
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.base import StepSizes
from octavo.graph.ops.encoder import CrossAttention, EncoderAttentionParams
from octavo.graph.ops.linear import Input
from octavo.graph.shard import shard
from octavo.graph.values import TOKENS, RowDomain
from octavo.quantization.packed import DenseWeight
from tests.backends.cpu.conftest import available_isas
from tests.support.batches import Request, step

FRAMES = RowDomain("frames")
DIM, WIDTH, BLOCK = 8, 16, 4
HEADS = EncoderAttentionParams(2, 2, DIM, DIM**-0.5)
LIMITS = ExecutorLimits(32, 4, 32, 64, further_rows={FRAMES: 16})
NAMES = ("q", "k", "v", "again", "out")
SHAPES = {"embed.weight": (50, WIDTH), "head.weight": (50, WIDTH)} | {f"{n}.weight": (WIDTH, WIDTH) for n in NAMES}
LENGTHS = (9, 3)
FIRST, SECOND = slice(0, 9), slice(9, 12)


def weights() -> dict[str, DenseWeight]:
    rng = np.random.default_rng(0)
    return {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in SHAPES.items()}


def frames() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(12, WIDTH)).astype(np.float32)


def model(*, has_own_cache: bool = False) -> Graph:
    """A layer that writes the keys of frames and sees them, and another that only sees them."""
    g = Graph(SHAPES)
    encoded, h = g.add(Input(0, FRAMES, WIDTH)), g.embedding("embed")
    if has_own_cache:
        h = h + g.attention(h, h, h, AttentionParams(0, 2, 2, DIM, DIM**-0.5))
    q, k, v = g.linear(h, "q"), g.linear(encoded, "k"), g.linear(encoded, "v")
    h = h + g.linear(g.add(CrossAttention(q, k, v, HEADS, 1, FRAMES)), "out")
    h = h + g.add(CrossAttention(g.linear(h, "again"), None, None, HEADS, 1, FRAMES))
    g.output = g.logits(g.select_rows(h), "head")
    return g


def steps(num_groups: int = 1, block: int = BLOCK) -> list[Batch]:
    """The prompts with all frames; then a token of each text in turn, without frames."""
    blocks = ([5, 2, 7], [3])
    texts = [Request(list(range(10 * i, 10 * i + 9)), own) for i, own in enumerate(blocks)]
    slots = [own[i // block] * block + i % block for own, n in zip(blocks, LENGTHS, strict=True) for i in range(n)]
    batches = []
    for counts in ((5, 2), (1, 1), (2, 1)):
        batch = step(list(zip(texts, counts, strict=True)), block_size=block, num_groups=num_groups)
        in_group = np.array(slots, np.int32) // block * num_groups + np.arange(num_groups, dtype=np.int32)[:, None]
        places = (in_group * block + np.array(slots, np.int32) % block).astype(np.int32)
        lengths = np.array(LENGTHS, np.int32)
        rows = DomainRows(0, lengths=lengths) if batches else DomainRows(12, lengths=lengths, slots=places)
        batch.inputs, batch.domains = (frames()[: rows.count],), {"frames": rows}
        batches.append(batch)
    return batches


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    heads = []
    for columns in (slice(0, DIM), slice(DIM, 2 * DIM)):
        scores = np.exp(q[:, columns] @ k[:, columns].T * DIM**-0.5)
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, columns])
    return np.concatenate(heads, axis=1)


def expected(batch: Batch) -> np.ndarray:
    w = {name.removesuffix(".weight"): weight.dequantize().astype(np.float64).T for name, weight in weights().items()}
    h, starts = w["embed"].T[batch.token_ids], batch.query_start_loc
    for text, rows in enumerate((FIRST, SECOND)):
        part, k, v = slice(starts[text], starts[text + 1]), frames()[rows] @ w["k"], frames()[rows] @ w["v"]
        h[part] += softmax_attention(h[part] @ w["q"], k, v) @ w["out"]
        h[part] += softmax_attention(h[part] @ w["again"], k, v)
    return h @ w["head"]


def executor_of(graph: Graph, num_blocks: int = 8) -> Any:
    executor = reference.compile(graph, weights(), LIMITS, dtype=np.float64)
    executor.allocate_cache(num_blocks, BLOCK)
    return executor


def test_later_steps_see_the_frames_in_the_cache() -> None:
    executor = executor_of(model())
    for batch in steps():
        np.testing.assert_allclose(executor.submit(batch).wait().logits, expected(batch), rtol=0, atol=1e-10)


def test_frames_lie_beside_the_tokens_in_a_group_of_their_own() -> None:
    """Slots of the groups of another domain are not read."""
    graph = model(has_own_cache=True)
    assert [(group.domain, group.layers) for group in graph.cache_layout.groups] == [(TOKENS, (0,)), (FRAMES, (1,))]
    found, other = [], []
    for results, hides in ((found, False), (other, True)):
        executor = executor_of(graph, 16)
        for batch in steps(2):
            if hides:
                batch.slot_mapping[1] = -1
                if (slots := batch.domains["frames"].slots) is not None:
                    slots[0] = -1
            results.append(executor.submit(batch).wait().logits)
    assert np.isfinite(found[2]).all()
    for one, same in zip(found, other, strict=True):
        np.testing.assert_array_equal(one, same)


def test_a_sequence_without_frames_sees_nothing() -> None:
    executor, (batch, *_) = executor_of(model()), steps()
    rows = batch.domains["frames"]
    batch.domains = {"frames": replace(rows, lengths=np.array([9, 0], np.int32))}
    w = {name.removesuffix(".weight"): weight.dequantize().astype(np.float64) for name, weight in weights().items()}
    plain = w["embed"][batch.token_ids[5:]] @ w["head"].T
    np.testing.assert_allclose(executor.submit(batch).wait().logits[5:], plain, rtol=0, atol=1e-12)


def test_ranks_have_some_heads_each() -> None:
    ranks = [shard(model(), rank, 2, lambda _: 1) for rank in range(2)]
    assert [cache.num_kv_heads for graph in ranks for cache in graph.kv_caches] == [1, 1]
    executors = [executor_of(graph) for graph in ranks]
    for batch in steps():
        (output, _) = reference.ReferenceGroup(executors).run(batch)
        np.testing.assert_allclose(output.logits, expected(batch), rtol=0, atol=1e-10)


def frames_with(**fields: object) -> Callable[[Batch], Batch]:
    return lambda b: replace(b, domains={"frames": replace(b.domains["frames"], **fields)})


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


HOSTILE: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "no domain": (lambda b: replace(b, domains={}, inputs=(frames()[:0],)), r"frames.lengths are missing"),
    "no lengths": (frames_with(lengths=None), "frames.lengths are missing"),
    "a length below zero": (frames_with(lengths=numbers(-1, 3)), "frames.lengths are -1"),
    "a length beyond the table": (frames_with(lengths=numbers(13, 3)), "frames.lengths are 3 to 13"),
    "lengths of one sequence": (frames_with(lengths=numbers(9)), "frames.lengths are int32"),
    "lengths of another type": (frames_with(lengths=np.array([9, 3])), "frames.lengths are int64"),
    "no slots": (frames_with(slots=None), "frames.slots are missing"),
    "a slot below zero": (frames_with(slots=np.full((1, 12), -1, np.int32)), "frames.slots are -1"),
    "a slot beyond the cache": (frames_with(slots=np.full((1, 12), 32, np.int32)), "frames.slots are 32"),
    "slots of other rows": (frames_with(slots=np.zeros((1, 11), np.int32)), "frames.slots are int32"),
    "slots of no group": (frames_with(slots=np.zeros((0, 12), np.int32)), "frames.slots are int32"),
    "a block beyond the cache": (lambda b: replace(b, block_tables=b.block_tables + 1), "block_tables of frames.cache"),
    "tables of one sequence": (lambda b: replace(b, block_tables=b.block_tables[:, :1]), "block_tables are"),
}


# In blocks of eight tokens.
HOSTILE_KERNEL: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "a length beyond the table": (frames_with(lengths=numbers(25, 3)), ""),
    "a slot beyond the cache": (frames_with(slots=np.full((1, 12), 64, np.int32)), ""),
    "a block beyond the cache": (lambda b: replace(b, block_tables=b.block_tables + 3), ""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_lengths_and_slots_are_refused_before_anything_runs(case: str) -> None:
    executor, (batch, *_) = executor_of(model()), steps()
    change, message = HOSTILE[case]
    with pytest.raises(ValueError, match=message):
        executor.submit(change(batch))
    np.testing.assert_allclose(executor.submit(batch).wait().logits, expected(batch), rtol=0, atol=1e-10)


def native(graph: Graph, isa: str | None = None, threads: int = 2, kv_dtype: KVDtype = "float16") -> Any:
    options = CompileOptions(isa=isa, checked=threads == 3)
    executor = cpu.compile(graph, weights(), LIMITS, num_threads=threads, kv_dtype=kv_dtype, options=options)
    executor.allocate_cache(16, 8)
    return executor


@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
@pytest.mark.parametrize("isa", available_isas())
def test_the_kernel_on_every_level(isa: str, kv_dtype: KVDtype) -> None:
    """Beside a cache of tokens or without; checked memory and other numbers of threads change no bit."""
    for groups in (1, 2):
        graph = model(has_own_cache=groups == 2)
        judge = reference.compile(graph, weights(), LIMITS, dtype=np.float64)
        judge.allocate_cache(16, 8)
        executors = [native(graph, isa, threads, kv_dtype) for threads in (1, 2, 3)]
        for batch in steps(groups, 8):
            batch.slot_mapping[groups - 1] = -1 if groups == 2 else 0  # not read
            meant = judge.submit(batch).wait().logits
            first, *others = [executor.submit(batch).wait().logits for executor in executors]
            assert np.abs(first - meant).max() < (2e-2 if kv_dtype == "int8" else 2e-3) * np.abs(meant).max()
            for other in others:
                np.testing.assert_array_equal(other, first)


def test_torch_has_the_meaning() -> None:
    graph = model(has_own_cache=True)
    judge = reference.compile(graph, weights(), LIMITS, dtype=np.float64)
    executor = get_backend("torch:cpu").compile(graph, weights(), LIMITS)
    for each in (judge, executor):
        each.allocate_cache(16, 8)
    for batch in steps(2, 8):
        batch.slot_mapping[1] = -1  # not read
        meant = judge.submit(batch).wait().logits
        assert np.abs(executor.submit(batch).wait().logits - meant).max() < 2e-3 * np.abs(meant).max()


@pytest.mark.parametrize("backend", ["cpu", "torch:cpu"])
def test_without_frames_in_kernels(backend: str) -> None:
    executor, (batch, *_) = get_backend(backend).compile(model(), weights(), LIMITS), steps(1, 8)
    executor.allocate_cache(16, 8)
    rows = batch.domains["frames"]
    batch.domains = {"frames": replace(rows, lengths=np.array([9, 0], np.int32))}
    w = {name.removesuffix(".weight"): weight.dequantize() for name, weight in weights().items()}
    logits = executor.submit(batch).wait().logits
    np.testing.assert_allclose(logits[5:], w["embed"][batch.token_ids[5:]] @ w["head"].T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("case", HOSTILE)
def test_kernels_see_no_hostile_batch(case: str, backend: str) -> None:
    executor, batches = get_backend(backend).compile(model(), weights(), LIMITS), steps(1, 8)
    executor.allocate_cache(8, 8)
    change, _ = HOSTILE_KERNEL.get(case, HOSTILE[case])
    with pytest.raises(ValueError, match=r"frames\.(lengths|slots|cache)|block_tables"):
        executor.submit(change(batches[0])).wait()
    assert np.isfinite(executor.submit(batches[0]).wait().logits).all()


def long_model(heads: EncoderAttentionParams) -> tuple[Graph, dict[str, DenseWeight]]:
    width, kv_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    shapes = {"embed.weight": (50, WIDTH), "head.weight": (50, width), "q.weight": (width, WIDTH)}
    shapes |= {f"{name}.weight": (kv_width, WIDTH) for name in "kv"}
    g = Graph(shapes)
    encoded, h = g.add(Input(0, FRAMES, WIDTH)), g.embedding("embed")
    q, k, v = g.linear(h, "q"), g.linear(encoded, "k"), g.linear(encoded, "v")
    g.output = g.logits(g.select_rows(g.add(CrossAttention(q, k, v, heads, 0, FRAMES))), "head")
    rng = np.random.default_rng(3)
    return g, {n: DenseWeight(rng.normal(0, 2 * s[-1] ** -0.5, s).astype(np.float32)) for n, s in shapes.items()}


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 40), (4, 1, 64), (2, 2, 16)])
def test_many_rows_and_tokens_that_come_alone(heads: int, kv_heads: int, dim: int) -> None:
    """Several splits of keys, blocks of queries, and groups of heads, which tiles compute; the bits of any chunks."""
    graph, numbers_of = long_model(EncoderAttentionParams(heads, kv_heads, dim, dim**-0.5))
    limits = ExecutorLimits(256, 2, 256, 256, further_rows={FRAMES: 700})
    lengths, given = np.array([600, 37], np.int32), np.random.default_rng(4).normal(size=(637, WIDTH))
    blocks = [list(range(38)), list(range(40, 56))]
    slots = np.array([b[i // 16] * 16 + i % 16 for b, n in zip(blocks, lengths, strict=True) for i in range(n)])
    texts = [Request([(7 * i + t) % 50 for i in range(190 - 100 * t)], blocks[t]) for t in range(2)]

    def logits_of(executor: Any, chunks: list[tuple[int, int]]) -> np.ndarray:
        executor.allocate_cache(64, 16)
        found: list[list[np.ndarray]] = [[], []]
        own = [Request(text.token_ids, text.blocks) for text in texts]
        for number, counts in enumerate(chunks):
            batch = step(list(zip(own, counts, strict=True)), block_size=16)
            count = 0 if number else 637
            rows = DomainRows(count, lengths=lengths, slots=None if number else slots.astype(np.int32)[None])
            batch.inputs, batch.domains = (given[:count].astype(np.float32),), {"frames": rows}
            logits = executor.submit(batch).wait().logits
            for text, part in enumerate(np.split(logits, batch.query_start_loc[1:-1])):
                found[text].append(part)
        executor.close()
        return np.concatenate([part for parts in found for part in parts])

    whole, chunks = [(150, 90)], [(100, 1), (1, 1), (49, 88)]
    judge = logits_of(reference.compile(graph, numbers_of, limits, dtype=np.float64), whole)
    for isa in available_isas():
        made = [cpu.compile(graph, numbers_of, limits, num_threads=n, options=CompileOptions(isa=isa)) for n in (1, 2)]
        first, other = (logits_of(each, part) for each, part in zip(made, (whole, chunks), strict=True))
        assert np.abs(first - judge).max() < 2e-3 * np.abs(judge).max()
        np.testing.assert_array_equal(first, other)
    plain = logits_of(get_backend("torch:cpu").compile(graph, numbers_of, limits), chunks)
    assert np.abs(plain - judge).max() < 2e-3 * np.abs(judge).max()


def test_the_engine_refuses_a_cache_of_another_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model()
    monkeypatch.setattr(model_graph, "build_graph", lambda *_, **__: graph)
    parts = {"config": SimpleNamespace(for_length=lambda _: None), "weights": SimpleNamespace(shapes={}), "sight": None}
    checkpoint: Any = SimpleNamespace(
        path=Path("made-up"), architecture="", pooling=SimpleNamespace(is_classifier=False), **parts
    )
    with pytest.raises(
        ModelLoadError, match=r"layer 1 has a cache of frames, but the engine allocates blocks only for tokens"
    ):
        model_graph.model_graph(checkpoint, 64)


def test_the_layout_of_tokens_is_as_it_was() -> None:
    caches = [KVCache(layer, 2, DIM, DIM, window) for layer, window in enumerate((None, 7, 7))]
    groups = CacheGroup(None, (0,)), CacheGroup(7, (1,)), CacheGroup(7, (2,))
    assert cache_layout(caches) == CacheLayout(groups)
    # Blocks on disk are named by this text.
    assert repr(groups[1]) == "CacheGroup(window=7, layers=(1,), chunked=False)"
    assert repr(cache_layout([])) == "CacheLayout(groups=(CacheGroup(window=None, layers=(), chunked=False),))"


def test_what_a_graph_may_not_do() -> None:
    g = Graph(SHAPES)
    encoded, h = g.add(Input(0, FRAMES, WIDTH)), g.embedding("embed")
    for op, message in (
        (CrossAttention(h, h, h, HEADS, 0, TOKENS), "tokens cannot be cached as other rows"),
        (CrossAttention(h, h, h, HEADS, 0, FRAMES), r"k \[tokens, 16\] is not \[frames"),
        (CrossAttention(encoded, encoded, encoded, HEADS, 0, FRAMES), r"q \[frames, 16\] is not \[tokens"),
        (CrossAttention(h, encoded, None, HEADS, 0, FRAMES), "k and v must be given together"),
        (CrossAttention(h, encoded, encoded, replace(HEADS, window=3), 0, FRAMES), "no window"),
        (CrossAttention(h, None, None, HEADS, 0, FRAMES), "layer 0 has no such cache"),
    ):
        with pytest.raises(GraphError, match=message):
            g.add(op)
    op = CrossAttention(h, encoded, encoded, HEADS, 0, FRAMES)
    assert op.flops(StepSizes(4, 2, 4, 2, further_rows={FRAMES: 12})) == 4 * 6 * 2 * (4 * DIM + 5)
