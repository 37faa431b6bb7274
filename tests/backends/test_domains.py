"""A made-up domain of rows, patches with places in two directions, through every executor; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import Executor, ExecutorLimits, cpu, get_backend, reference
from octavo.backends.cpu import _native
from octavo.backends.cpu.compiler import CompileOptions
from octavo.batch import Batch, DomainRows
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.domain_rows import domain_rows
from octavo.graph.domains import domain_needs
from octavo.graph.ops.attention import AttentionParams, Rope, RopeParams
from octavo.graph.ops.base import StepSizes
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import AddRows, Gather, PoolRows, Splice
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, IndexArray, RowDomain, Value
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step

PATCHES, MERGED = RowDomain("patches"), RowDomain("merged")
CORNERS, SOFT = (
    IndexArray(MERGED, "corners"),
    IndexArray(TOKENS, "soft"),
)  # four patches each; a merged row for a token
DIM, WIDTH, COLORS = 16, 32, 12
LIMITS = ExecutorLimits(32, 4, 32, 64, further_rows={PATCHES: 40, MERGED: 10})
ENCODER = EncoderAttentionParams(2, 2, DIM, DIM**-0.5)
PLANE = RopeParams(tuple(0.6**i for i in range(8)), axes=(0, 1) * 4)
SPACE = RopeParams(tuple(0.5**i for i in range(8)), axes=(0, 1, 2, 0, 1, 2, 0, 1))
SHAPES = {
    "embed.weight": (50, WIDTH),
    "patch.weight": (WIDTH, COLORS),
    "tower.q.weight": (WIDTH, WIDTH),
    "tower.k.weight": (WIDTH, WIDTH),
    "tower.norm.weight": (WIDTH,),
    "merge.weight": (WIDTH, 4 * WIDTH),
    "q.weight": (WIDTH, WIDTH),
    "k.weight": (WIDTH, WIDTH),
    "head.weight": (50, WIDTH),
}
COMPILERS: dict[str, Callable[..., Executor]] = {
    "torch": get_backend("torch:cpu").compile,
    **dict.fromkeys(_native.known_isas()[: _native.known_isas().index(_native.detected_isa()) + 1], cpu.compile),
}


def weights() -> dict[str, DenseWeight]:
    rng = np.random.default_rng(0)
    return {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in SHAPES.items()}


def tower(g: Graph, patches: Value, rope: RopeParams = PLANE, params: EncoderAttentionParams = ENCODER) -> Value:
    """An encoder's block: [rows, COLORS] -> [rows, WIDTH]."""
    h = g.linear(patches, "patch")
    normed = g.rms_norm(h, "tower.norm", 1e-5)
    q, k = (g.add(Rope(g.linear(normed, f"tower.{name}"), DIM, rope)) for name in "qk")
    return h + g.add(EncoderAttention(q, k, normed, params))


def whole_graph() -> Graph:
    """Patches through a block, four of them merged into each row that takes the place of a token; then a decoder."""
    g = Graph(SHAPES)
    merged = g.linear(g.add(Gather(tower(g, g.add(Input(0, PATCHES, COLORS))), CORNERS, 4)), "merge")
    h = g.add(Splice(g.embedding("embed"), merged, SOFT))
    q, k = (g.add(Rope(g.linear(h, name), DIM, SPACE)) for name in "qk")
    h = h + g.attention(q, k, h, AttentionParams(0, 2, 2, DIM, DIM**-0.5))
    g.output = g.logits(g.select_rows(h), "head")
    return g


def compiled(name: str, graph: Graph, limits: ExecutorLimits = LIMITS) -> Executor:
    more = {} if name == "torch" else {"num_threads": 2, "options": CompileOptions(isa=name, checked=True)}
    return COMPILERS[name](graph, weights(), limits, **more)


def batch_of(*, with_images: bool = True) -> Batch:
    """Two texts; the first has two images, of 2 x 4 and 4 x 4 patches, which become its tokens 3, 4 and 6 to 9."""
    rng = np.random.default_rng(1)
    batch = step([(Request(rng.integers(0, 50, 12).tolist(), [0]), 12), (Request([7] * 5, [1]), 5)], block_size=16)
    if not with_images:
        batch.inputs = (np.zeros((0, COLORS), np.float32),)
        return batch
    places = [(y, x) for height in (2, 4) for y in range(height) for x in range(4)]
    soft = np.full(17, -1, np.int32)
    soft[[3, 4, 6, 7, 8, 9]] = np.arange(6)[::-1]
    components = np.stack([batch.positions, rng.integers(0, 99, 17), rng.integers(0, 99, 17)]).astype(np.int32)
    batch.inputs = (rng.normal(size=(24, COLORS)).astype(np.float32),)
    batch.domains = {
        "patches": DomainRows(24, np.array([0, 8, 24], np.int32), np.array(places, np.int32).T.copy()),
        "merged": DomainRows(6, indices={"corners": rng.permutation(24).astype(np.int32)}),
        "tokens": DomainRows(17, positions=components, indices={"soft": soft}),
    }
    return batch


def logits(executor: Executor, *batches: Batch) -> list[np.ndarray]:
    executor.allocate_cache(4, 16)
    found = [executor.submit(batch).wait().logits for batch in batches]
    executor.close()
    return found


@pytest.mark.parametrize("name", COMPILERS)
def test_patches_are_encoded_merged_and_spliced_as_the_reference_does(name: str) -> None:
    batches = batch_of(), batch_of(with_images=False), batch_of()
    exact = reference.compile(whole_graph(), weights(), LIMITS, dtype=np.float64)
    expected = logits(exact, *batches)
    found = logits(compiled(name, whole_graph()), *batches)
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=0, atol=3e-3 * np.abs(other).max())
    np.testing.assert_array_equal(found[0], found[2])
    assert np.abs(expected[0] - expected[1])[5:].max() > 0.1  # images matter


@pytest.mark.parametrize("name", COMPILERS)
def test_a_block_over_patches_has_the_bits_of_one_over_tokens(name: str) -> None:
    """With one component and the same starts, rows are computed alike whatever their domain is."""
    params = replace(ENCODER, window=3)
    of_domain = {}
    for domain in (PATCHES, TOKENS):
        g = Graph(SHAPES)
        g.output = tower(g, g.add(Input(0, domain, COLORS)), replace(PLANE, axes=None), params)
        assert g.takes_whole_texts == (domain is TOKENS)
        executor, batch = compiled(name, g), batch_of(with_images=False)
        batch.return_logits = False
        batch.inputs = (np.random.default_rng(3).normal(size=(17, COLORS)).astype(np.float32),)
        if domain is PATCHES:
            batch.domains = {"patches": DomainRows(17, batch.query_start_loc, batch.positions[None].copy())}
        (of_domain[domain],) = executor.submit(batch).wait().values
    np.testing.assert_array_equal(of_domain[PATCHES], of_domain[TOKENS])


def encoder_graph() -> Graph:
    """Patches through a block; four of them merged into a row, and their mean beside it."""
    g = Graph(SHAPES)
    h = tower(g, g.add(Input(0, PATCHES, COLORS)))
    g.output = g.linear(g.add(Gather(h, CORNERS, 4)), "merge") + g.add(PoolRows(h, CORNERS, 4))
    return g


def encoder_batch(seed: int = 0) -> Batch:
    """The images of `batch_of`, without tokens."""
    none, starts = np.zeros(0, np.int32), np.zeros(1, np.int32)
    tables, slots = np.zeros((1, 0, 0), np.int32), np.zeros((1, 0), np.int32)
    rows = {name: each for name, each in batch_of().domains.items() if name != "tokens"}
    inputs = (np.random.default_rng(seed).normal(size=(24, COLORS)).astype(np.float32),)
    return Batch(none, none, starts, none, tables, slots, none, inputs=inputs, domains=rows)


@pytest.mark.parametrize("name", COMPILERS)
def test_an_encoder_runs_without_tokens(name: str) -> None:
    exact = reference.compile(encoder_graph(), weights(), LIMITS, dtype=np.float64)
    (expected,) = exact.submit(encoder_batch()).wait().values
    (found,) = compiled(name, encoder_graph()).submit(encoder_batch()).wait().values
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-3 * np.abs(expected).max())


@pytest.mark.parametrize("width", [12, 80])
@pytest.mark.parametrize("isa", [name for name in COMPILERS if name != "torch"])
def test_products_of_float16_over_patches(isa: str, width: int) -> None:
    """As accurate as in float32 on every level, and each row by itself."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(40, width)).astype(np.float16)
    g = Graph({"w.weight": weight.shape})
    g.output = g.linear(g.add(Input(0, PATCHES, width)), "w")
    limits = replace(LIMITS, further_rows={PATCHES: 300})
    executor = cpu.compile(
        g, {"w.weight": DenseWeight(weight)}, limits, num_threads=2, options=CompileOptions(isa=isa, checked=True)
    )

    def product(x: np.ndarray) -> np.ndarray:
        batch = encoder_batch()
        starts = np.array([0, len(x)], np.int32)
        batch.inputs, batch.domains = (x,), {"patches": DomainRows(len(x), starts)}
        (found,) = executor.submit(batch).wait().values
        return found.copy()

    x = rng.normal(size=(290, width)).astype(np.float32)
    found, expected = product(x), x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for first, count in ((0, 1), (7, 4), (100, 17), (33, 130)):
        np.testing.assert_array_equal(product(x[first : first + count]), found[first : first + count])
    executor.close()


@pytest.mark.parametrize("checked", [True, False])
def test_parts_of_a_step_make_what_the_whole_step_makes(checked: bool) -> None:
    executor = cpu.compile(encoder_graph(), weights(), LIMITS, num_threads=2, options=CompileOptions(checked=checked))
    (whole,) = executor.submit(encoder_batch()).wait().values
    executor.submit(encoder_batch(1)).wait()
    count = executor.num_operations
    for size in (1, 3, count):
        batch = encoder_batch()
        for begin in range(0, count, size):
            output = executor.submit_part(batch, begin, min(begin + size, count)).wait()
            assert len(output.values) == (begin + size >= count)
        np.testing.assert_array_equal(output.values[0], whole)
    for begin, end in ((0, count + 1), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="no such part"):
            executor.submit_part(encoder_batch(), begin, end)
    executor.close()


def test_a_part_with_one_operation_runs_on_all_threads() -> None:
    """Without a boundary inside the part, the thread that waits for it takes part from the start."""
    g = Graph({"w.weight": (512, 512)})
    g.output = g.linear(g.add(Input(0, PATCHES, 512)), "w")
    weight = DenseWeight(np.ones((512, 512), np.float16))
    executor = cpu.compile(g, {"w.weight": weight}, replace(LIMITS, further_rows={PATCHES: 300}), num_threads=2)
    batch = encoder_batch()
    batch.inputs = (np.ones((300, 512), np.float32),)
    batch.domains = {"patches": DomainRows(300, np.array([0, 300], np.int32))}
    linear, sizes, shares = executor.num_operations - 1, StepSizes(1, 1, 1, 1, further_rows={PATCHES: 300}), []
    for _ in range(20):
        executor.submit_part(batch, 0, linear).wait()
        executor.start_profile()
        executor.submit_part(batch, linear, linear + 1).wait()
        time = executor.profile(sizes)[linear]
        shares.append(time.busy_seconds / time.seconds)
    executor.close()
    assert max(shares) > 1.5  # of two threads


@pytest.mark.parametrize("name", COMPILERS)
def test_rows_of_images_are_added_to_tokens(name: str) -> None:
    """In a later layer, at the tokens that have one; a step without images has none."""
    g = Graph(SHAPES)
    given = g.linear(g.add(Gather(g.linear(g.add(Input(0, PATCHES, COLORS)), "patch"), CORNERS, 4)), "merge")
    h = g.add(AddRows(g.rms_norm(g.embedding("embed"), "tower.norm", 1e-5), given, SOFT))
    g.output = g.logits(g.select_rows(h), "head")
    batches = batch_of(), batch_of(with_images=False)
    expected = logits(reference.compile(g, weights(), LIMITS, dtype=np.float64), *batches)
    for each, other in zip(logits(compiled(name, g), *batches), expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=0, atol=3e-3 * np.abs(other).max())
    changed_rows = np.abs(expected[0] - expected[1]).max(axis=1) > 0
    assert np.flatnonzero(changed_rows).tolist() == [3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", COMPILERS)
def test_tokens_of_a_span_see_each_other(name: str, window: int | None) -> None:
    """The second component of a position is the last that a token sees. A last one beyond the sequence is its end."""

    def decoder(longest: int) -> Graph:
        g = Graph(SHAPES)
        h = g.embedding("embed")
        q, k = (g.add(Rope(g.linear(h, name), DIM, replace(SPACE, axes=None))) for name in "qk")
        params = AttentionParams(0, 2, 2, DIM, DIM**-0.5, window=window, sees_spans=longest)
        g.output = g.logits(g.select_rows(g.attention(q, k, h, params)), "head")
        return g

    batch, ends = batch_of(with_images=False), []
    for last in (10, 99):
        positions = np.stack([batch.positions, batch.positions])
        positions[1, 3:11] = last
        ends.append(replace(batch, inputs=(), domains={"tokens": DomainRows(17, positions=positions)}))
    plain = replace(batch, inputs=())
    exact = reference.compile(decoder(8), weights(), LIMITS, dtype=np.float64)
    found = logits(compiled(name, decoder(8)), *ends, plain)
    for each, other in zip(found, logits(exact, ends[0]), strict=False):
        np.testing.assert_allclose(each, other, rtol=0, atol=3e-3 * np.abs(other).max())
    assert np.isfinite(found[1]).all()
    np.testing.assert_array_equal(found[2], logits(compiled(name, decoder(0)), plain)[0])
    changed_rows = np.flatnonzero(np.abs(found[0] - found[2]).max(axis=1) > 1e-3)
    assert changed_rows.tolist() == list(range(3, 10))  # the last sees what it saw before


@pytest.mark.parametrize("name", COMPILERS)
def test_axes_of_equal_components_are_the_plain_rope(name: str) -> None:
    """M-RoPE of text: all components are the position. Fused into the attention as well."""
    found = []
    for rope in (replace(SPACE, axes=None), SPACE):
        g = Graph(SHAPES)
        h = g.embedding("embed")
        q, k = (g.add(Rope(g.linear(h, name), DIM, rope)) for name in "qk")
        h = g.attention(q, k, h, AttentionParams(0, 2, 2, DIM, DIM**-0.5))
        g.output = g.logits(g.select_rows(h), "head")
        batch = batch_of(with_images=False)
        batch.inputs = ()
        if rope.axes is not None:
            batch.domains = {"tokens": DomainRows(17, positions=np.tile(batch.positions, (3, 1)))}
        found += logits(compiled(name, g), batch)
    np.testing.assert_array_equal(found[1], found[0])


def test_the_domains_of_every_batch() -> None:
    batch = batch_of()
    tokens, outputs, patches = (domain_rows(batch, domain) for domain in (TOKENS, OUTPUTS, PATCHES))
    assert (tokens.count, outputs.count, domain_rows(batch, LOGITS).count, patches.count) == (17, 17, 17, 24)
    assert tokens.starts is batch.query_start_loc
    assert tokens.positions.shape == (3, 17)
    np.testing.assert_array_equal(outputs.indices["tokens"], batch.logits_indices)
    assert domain_rows(batch_of(with_images=False), PATCHES).count == 0
    needs = {need.domain: need for need in domain_needs(whole_graph())}
    assert [(d.name, n.components, n.starts) for d, n in needs.items()] == [
        ("tokens", 3, True),
        ("outputs", 0, False),
        ("patches", 2, True),
        ("merged", 0, False),
    ]


def changed(batch: Batch, domain: str, **fields: object) -> Batch:
    return replace(batch, domains={**batch.domains, domain: replace(batch.domains[domain], **fields)})


def index(name: str, numbers: list[int]) -> dict[str, object]:
    return {"indices": {name: np.array(numbers, np.int32)}}


HOSTILE: dict[str, Callable[[Batch], Batch]] = {
    "a corner beyond the patches": lambda b: changed(b, "merged", **index("corners", [24] * 24)),
    "a negative corner": lambda b: changed(b, "merged", **index("corners", [-1] * 24)),
    "too few corners": lambda b: changed(b, "merged", **index("corners", [0] * 23)),
    "no corners": lambda b: changed(b, "merged", indices={}),
    "corners of another type": lambda b: changed(b, "merged", indices={"corners": np.zeros(24, np.int64)}),
    "a row beyond the merged ones": lambda b: changed(b, "tokens", **index("soft", [6] * 17)),
    "a row below none": lambda b: changed(b, "tokens", **index("soft", [-2] * 17)),
    "starts that fall": lambda b: changed(b, "patches", starts=np.array([0, 30, 24], np.int32)),
    "starts that fall below zero": lambda b: changed(b, "patches", starts=np.array([0, -5, 24], np.int32)),
    "starts from 1": lambda b: changed(b, "patches", starts=np.array([1, 24], np.int32)),
    "starts that end early": lambda b: changed(b, "patches", starts=np.array([0, 8], np.int32)),
    "starts that end late": lambda b: changed(b, "patches", starts=np.array([0, 25], np.int32)),
    "no starts": lambda b: changed(b, "patches", starts=None),
    "empty starts": lambda b: changed(b, "patches", starts=np.zeros(0, np.int32)),
    "one component": lambda b: changed(b, "patches", positions=np.zeros((1, 24), np.int32)),
    "no positions": lambda b: changed(b, "patches", positions=None),
    "positions of other rows": lambda b: changed(b, "patches", positions=np.zeros((2, 23), np.int32)),
    "two components of tokens": lambda b: changed(b, "tokens", positions=np.zeros((2, 17), np.int32)),
    "more patches than the limit": lambda b: changed(b, "patches", count=41),
    "fewer patches than inputs": lambda b: changed(b, "patches", count=23),
    "an unknown domain": lambda b: replace(b, domains={**b.domains, "frames": DomainRows(1)}),
    "falling query_start_loc": lambda b: replace(b, query_start_loc=np.array([0, 20, 17], np.int32)),
    "short seq_lens": lambda b: replace(b, seq_lens=np.array([11, 5], np.int32)),
}


@pytest.mark.parametrize("name", ["reference", "torch", _native.detected_isa()])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_rows_are_refused_before_anything_runs(case: str, name: str) -> None:
    graph = whole_graph()
    executor = reference.compile(graph, weights(), LIMITS) if name == "reference" else compiled(name, graph)
    executor.allocate_cache(4, 16)
    batch = batch_of()
    with pytest.raises((ValueError, UsageError)):
        executor.submit(HOSTILE[case](batch))
    assert executor.submit(batch).wait().logits is not None
    executor.close()


@pytest.mark.parametrize("name", ["torch", _native.detected_isa()])
@pytest.mark.parametrize("wrong", ["query_start_loc", "seq_lens"])
def test_a_graph_without_a_cache_is_checked_like_any_other(wrong: str, name: str) -> None:
    g = Graph(SHAPES)
    g.output = tower(g, g.add(Input(0, TOKENS, COLORS)), replace(PLANE, axes=None))
    batch = replace(batch_of(with_images=False), inputs=(np.zeros((17, COLORS), np.float32),), return_logits=False)
    broken = {"query_start_loc": np.array([0, 19, 17], np.int32), "seq_lens": np.array([12, 70], np.int32)}
    executor = compiled(name, g)
    with pytest.raises(ValueError, match=wrong):
        executor.submit(replace(batch, **{wrong: broken[wrong]}))


@pytest.mark.parametrize("name", ["reference", "torch", _native.detected_isa()])
def test_a_domain_without_a_limit_is_refused_by_name(name: str) -> None:
    limits = ExecutorLimits(32, 4, 32, 64, further_rows={MERGED: 10})
    with pytest.raises(UsageError, match=r"rows of patches.*further_rows"):
        get_backend("torch:cpu" if name == "torch" else name if name == "reference" else "cpu").compile(
            whole_graph(), weights(), limits
        )


def test_what_a_graph_may_not_do_with_domains() -> None:
    g = Graph(SHAPES)
    patches, selected = g.add(Input(0, PATCHES, WIDTH)), g.select_rows(g.embedding("embed"))
    with pytest.raises(GraphError, match="no positions"):
        g.add(Rope(selected, DIM, PLANE))
    with pytest.raises(GraphError, match="belong to no sequence"):
        g.add(EncoderAttention(selected, selected, selected, ENCODER))
    with pytest.raises(GraphError, match="does not select rows of x"):
        g.add(Splice(patches, selected, SOFT))
    with pytest.raises(GraphError, match="one row a token"):
        g.select_rows(patches)
    with pytest.raises(GraphError, match="not one component for each"):
        g.add(Rope(patches, DIM, replace(PLANE, axes=(0, 1))))
    g.add(Gather(patches, CORNERS, 4))
    g.add(Gather(patches, CORNERS, 2))
    with pytest.raises(GraphError, match="differently"):
        domain_needs(g)
    other = Graph(SHAPES)
    other.add(Input(0, RowDomain("tokens"), 1))
    with pytest.raises(GraphError, match="declare each domain once"):
        domain_needs(other)
