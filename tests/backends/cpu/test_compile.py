"""Whole graphs on the cpu backend: against the reference, and batches that do not fit."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, cpu, reference
from octavo.backends.cpu import CompileOptions, CpuExecutor, choose_isa
from octavo.backends.cpu.compiler import cache_sizes
from octavo.batch import Batch, SamplingBatch, greedy_rows
from octavo.config import CPU_KV_DTYPES, KVDtype
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.layer_formats import LayerFormat
from octavo.graph.ops.attention import AttentionParams, Rope, RopeParams
from octavo.graph.ops.base import StepSizes
from octavo.graph.ops.rowwise import GatedActivation
from octavo.quantization.packed import DenseWeight, GGMLWeight, Weight
from tests.backends.cpu.conftest import available_isas
from tests.support.batches import Request, step
from tests.support.native_attention import block_bytes_of
from tests.support.sampling_batches import sampling_batch

BLOCK = 16
LIMITS = ExecutorLimits(max_num_batched_tokens=64, max_num_seqs=4, max_num_outputs=64, max_model_len=128)
VOCAB, WIDTH, LAYERS = 90, 64, 2
HEADS = RopeParams(tuple(10000 ** (-i / 8) for i in range(8)))


def shapes() -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH), "norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        weights |= {
            f"layers.{i}.norm.weight": (WIDTH,),
            f"layers.{i}.q.weight": (WIDTH, WIDTH),
            f"layers.{i}.k.weight": (WIDTH // 2, WIDTH),
            f"layers.{i}.v.weight": (WIDTH // 2, WIDTH),
            f"layers.{i}.v.bias": (WIDTH // 2,),
            f"layers.{i}.o.weight": (WIDTH, WIDTH),
            f"layers.{i}.mlp_norm.weight": (WIDTH,),
            f"layers.{i}.gate.weight": (96, WIDTH),
            f"layers.{i}.up.weight": (96, WIDTH),
            f"layers.{i}.down.weight": (WIDTH, 96),
        }
    return weights


def tiny_llama() -> Graph:
    """With tied embeddings."""
    g = Graph(shapes())
    h = g.embedding("embed")
    for i in range(LAYERS):
        p = f"layers.{i}."
        x = g.rms_norm(h, p + "norm", 1e-5)
        q, k, v = (g.linear(x, p + n) for n in "qkv")
        q, k = g.add(Rope(q, 16, HEADS)), g.add(Rope(k, 16, HEADS))
        h = h + g.linear(g.attention(q, k, v, AttentionParams(i, 4, 2, 16, 0.25)), p + "o")
        x = g.rms_norm(h, p + "mlp_norm", 1e-5)
        h = h + g.linear(g.add(GatedActivation(g.linear(x, p + "gate"), g.linear(x, p + "up"), "silu")), p + "down")
    g.output = g.logits(g.select_rows(g.rms_norm(h, "norm", 1e-5)), "embed")
    return g


def tiny_weights(seed: int = 0) -> dict[str, Weight]:
    rng = np.random.default_rng(seed)
    return {
        name: DenseWeight((rng.standard_normal(shape) * (0.1 if len(shape) > 1 else 1)).astype(np.float32))
        for name, shape in shapes().items()
    }


def compiled(
    weights: Mapping[str, Weight] | None = None,
    threads: int = 2,
    kv_dtype: KVDtype = "float16",
    **options: object,
) -> CpuExecutor:
    executor = cpu.compile(
        tiny_llama(),
        weights or tiny_weights(),
        LIMITS,
        num_threads=threads,
        kv_dtype=kv_dtype,
        options=CompileOptions(**options),
    )
    executor.allocate_cache(24, BLOCK)
    return executor


def batch(tokens: int = 5) -> Batch:
    request = Request(list(range(1, tokens + 1)), [3, 1, 4])
    return step([(request, tokens)], block_size=BLOCK)


def mixed_steps() -> list[Batch]:
    """Prefill of two requests, then one goes on while the other continues its prefill in a chunk, then both decode."""
    rng = np.random.default_rng(5)
    a, b = (Request([int(t) for t in rng.integers(0, VOCAB, 40)], blocks) for blocks in ([5, 2, 9], [7, 0, 1]))
    schedule = [[(a, 18), (b, 7)], [(a, 1), (b, 20)], [(b, 1), (a, 1)], [(a, 1)]]
    return [step(parts, block_size=BLOCK) for parts in schedule]


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_small_model_agrees_with_the_reference(isa, threads, optimized):
    judge = reference.compile(tiny_llama(), tiny_weights(), LIMITS, dtype=np.float64)
    judge.allocate_cache(24, BLOCK)
    executor = compiled(isa=isa, threads=threads, optimized=optimized)
    for each in mixed_steps():
        expected = judge.submit(each).wait().logits
        np.testing.assert_allclose(executor.submit(each).wait().logits, expected, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_the_cache_rounds_as_the_reference_does(isa, kv_dtype):
    """Closer to it than to a reference with an exact cache, where the rounding is coarse enough to be seen."""
    exact, judge = (reference.compile(tiny_llama(), tiny_weights(), LIMITS, kv_dtype=k) for k in (None, kv_dtype))
    for each in (exact, judge):
        each.allocate_cache(24, BLOCK)
    executor = compiled(isa=isa, kv_dtype=kv_dtype)
    for each in mixed_steps():
        found, expected, unrounded = (e.submit(each).wait().logits for e in (executor, judge, exact))
        assert np.abs(found - expected).max() < 4e-3 * np.abs(expected).max()
        if kv_dtype == "int8":
            assert np.abs(found - expected).mean() < np.abs(unrounded - expected).mean()


@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_bytes_of_the_cache_are_known_before_it_is_compiled(kv_dtype):
    executor = compiled(kv_dtype=kv_dtype)
    formats = dict.fromkeys(range(LAYERS), LayerFormat(kv_dtype))
    assert executor.cache_sizes == cache_sizes(tiny_llama(), formats)
    assert block_bytes_of(executor.submit) == BLOCK * executor.cache_sizes.token_bytes


@pytest.mark.parametrize("levels", [("avx2", "scalar"), ("amx", "amx")])
def test_instruction_sets_threads_and_checks_change_no_bit(levels: tuple[str, str]):
    """Of levels with the same arithmetic: the tiles of AMX have their own."""
    if not {*levels} <= {*available_isas()}:
        pytest.skip("not on this machine")
    single = compiled(threads=1, isa=levels[0])
    plain = [single.submit(each).wait().logits for each in mixed_steps()]
    for options in ({"isa": levels[1]}, {"isa": levels[0], "checked": True}):
        executor = compiled(threads=3, **options)
        for each, expected in zip(mixed_steps(), plain, strict=True):
            np.testing.assert_array_equal(executor.submit(each).wait().logits, expected)


def test_a_weight_that_is_used_twice_is_packed_once():
    executor = compiled()
    matrices = sum(np.prod(shape) for shape in shapes().values()) * 4
    assert executor.weight_bytes < matrices + 32 * WIDTH * 4
    assert executor.cache_sizes.token_bytes == LAYERS * 2 * 2 * 16 * 2


def test_progress_rises_to_the_total():
    seen: list[tuple[int, int]] = []
    cpu.compile(tiny_llama(), tiny_weights(), LIMITS, progress=lambda _, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == sum(int(np.prod(s)) * 4 for s in shapes().values() if len(s) > 1)


class FileWeights(dict[str, Weight]):
    """Notes which weights were given back."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__(weights)
        self.released: list[str] = []

    def info(self, name: str) -> Weight:
        return self[name]

    def fingerprint(self, name: str) -> bytes:
        return name.encode()

    def release(self, name: str) -> None:
        self.released.append(name)


def test_source_pages_are_given_back():
    weights = FileWeights(tiny_weights())
    compiled(weights)
    assert sorted(weights.released) == sorted(name for name, shape in shapes().items() if len(shape) > 1)


@pytest.mark.parametrize(("type_name", "largest"), [("TQ2_0", 1.0), ("TQ2_0", 60000.0), ("I8", 127.0), ("F64", 1e9)])
def test_types_without_a_kernel_run_as_floats(type_name, largest, isa):
    rng = np.random.default_rng(0)
    k = 256
    if type_name == "TQ2_0":  # 64 bytes of codes, a half as scale
        blocks = rng.integers(0, 85, (VOCAB, 66), np.uint8) * 0 + rng.choice([0, 1, 2, 4, 8, 0x55], (VOCAB, 66))
        data = blocks.astype(np.uint8)
        data[:, 64:] = np.frombuffer(np.float16(largest).tobytes(), np.uint8)
    elif type_name == "I8":
        data = rng.integers(-127, 128, (VOCAB, k)).astype(np.int8).view(np.uint8)
    else:
        data = (rng.standard_normal((VOCAB, k)) * largest).view(np.uint8)
    weight = GGMLWeight.from_bytes(type_name, data.reshape(-1), (VOCAB, k))
    g = Graph({"embed.weight": (VOCAB, k)})
    g.output = g.logits(g.select_rows(g.embedding("embed")), "embed")
    executor = cpu.compile(g, {"embed.weight": weight}, LIMITS, options=CompileOptions(isa=isa))
    dense = weight.dequantize().astype(np.float64)
    tokens = batch().token_ids
    expected = dense[tokens] @ dense.T
    executed = executor.submit(replace(batch(), return_logits=True)).wait().logits
    np.testing.assert_allclose(executed, expected, atol=5e-3 * np.abs(expected).max())


def test_a_profile_has_times_and_costs():
    executor = compiled()
    sizes = StepSizes(tokens=5, requests=1, outputs=5, context=5)
    plain = executor.submit(batch()).wait().logits
    assert executor.profile(sizes) == []
    executor.start_profile()
    np.testing.assert_array_equal(executor.submit(batch()).wait().logits, plain)
    executor.submit(batch()).wait()
    *rows, sampling = executor.profile(sizes)
    assert [row.calls for row in rows] == [2] * len(rows)
    assert rows[0].kernel == "embedding"
    assert rows[0].label == "embed: embedding"
    assert all(row.seconds > 0 and row.busy_seconds > 0 for row in rows)
    assert sum(row.busy_seconds for row in rows) <= 2.2 * sum(row.seconds for row in rows)
    assert rows[-1].cost.flops >= 2 * 5 * VOCAB * WIDTH
    assert rows[-1].cost.activation_bytes == 4 * 5 * (VOCAB + WIDTH)
    assert sampling.label == "sampling: sample"
    assert sampling.calls == 0
    executor.start_profile()
    assert all(row.calls == row.seconds == 0 for row in executor.profile(sizes))


SAMPLING = sampling_batch(1, num_logprobs=2)


def test_a_step_samples_in_the_same_call():
    executor = compiled()
    one = replace(batch(), logits_indices=np.array([4], np.int32), sampling=SAMPLING)
    output = executor.submit(one).wait()
    assert output.token_ids[0] == output.logits[0].argmax() == output.top_ids[0, 0]
    assert output.ranks[0] == 1
    unsampled = executor.submit(replace(one, sampling=None)).wait()
    assert unsampled.token_ids[0] == -1
    assert np.isnan(unsampled.logprobs[0])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_logits_that_are_not_held_at_once_are_the_same_in_turns(threads, checked):
    """Of 23 rows, held 5 at a time: tokens, log-probabilities, ranks, tops and logits, bit for bit.

    In checked mode a guard page lies behind the rows that are held.
    """
    wanted = sampling_batch(23, num_logprobs=3)
    wanted.rows["target"][::2] = np.arange(23)[::2]
    whole, turns = (
        cpu.compile(
            tiny_llama(),
            tiny_weights(),
            replace(LIMITS, max_logits_rows=held),
            num_threads=threads,
            options=CompileOptions(checked=checked),
        )
        for held in (None, 5)
    )
    for executor in (whole, turns):
        executor.allocate_cache(24, BLOCK)
    outputs = [executor.submit(replace(batch(23), sampling=wanted)).wait() for executor in (whole, turns)]
    for name in ("logits", "token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(*(getattr(output, name) for output in outputs), err_msg=name)
    unsampled = turns.submit(batch(23)).wait()
    np.testing.assert_array_equal(unsampled.logits, outputs[0].logits)
    everything, nothing = np.arange(23, dtype=np.int32), i32()
    hidden = [
        executor.submit(replace(batch(23), logits_indices=nothing, hidden_indices=everything)).wait().hidden_states
        for executor in (whole, turns)
    ]
    np.testing.assert_array_equal(*hidden)
    # Rows of both kinds in one step: the logits come in turns, the hidden states of other tokens lie behind them.
    of_twelve = sampling_batch(12, num_logprobs=3)
    of_twelve.rows["target"] = wanted.rows["target"][:12]
    both = replace(batch(23), logits_indices=everything[:12], hidden_indices=everything[9:], sampling=of_twelve)
    mixed = turns.submit(both).wait()
    np.testing.assert_array_equal(mixed.logits, outputs[0].logits[:12])
    np.testing.assert_array_equal(mixed.token_ids, outputs[0].token_ids[:12])
    np.testing.assert_array_equal(mixed.hidden_states, hidden[0][9:])
    few = replace(batch(), sampling=sampling_batch(5, num_logprobs=3))
    np.testing.assert_array_equal(*(executor.submit(few).wait().token_ids for executor in (whole, turns)))
    turns.start_profile()
    turns.submit(replace(batch(23), sampling=wanted)).wait()
    if not checked:
        profile = turns.profile(StepSizes(tokens=23, requests=1, outputs=23, context=23))
        assert [row.calls for row in profile] == [1] * len(profile)


def i32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


WRONG_BATCHES: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "token": (lambda b: replace(b, token_ids=i32(1, 2, VOCAB, 3, 4)), r"token_ids\[2\] is 90, must be below 90"),
    "negative token": (
        lambda b: replace(b, token_ids=i32(1, -2, 3, 3, 4)),
        r"token_ids\[1\] is -2, must be at least 0",
    ),
    "dtype": (
        lambda b: replace(b, token_ids=b.token_ids.astype(np.int64)),
        "token_ids must be a contiguous int32 array",
    ),
    "list": (lambda b: replace(b, token_ids=[1, 2, 3, 4, 5]), "token_ids must be"),
    "strided": (lambda b: replace(b, positions=np.zeros(10, np.int32)[::2]), "positions must be a contiguous"),
    "dimensions": (lambda b: replace(b, block_tables=b.block_tables[0]), "block_tables must be .* three dimensions"),
    "short positions": (lambda b: replace(b, positions=i32(0, 1)), "positions has 2 entries, must have 5"),
    "short slots": (lambda b: replace(b, slot_mapping=i32(0)[None]), r"slot_mapping must be \[1 cache groups, 5 to"),
    "groups": (
        lambda b: replace(b, block_tables=np.zeros((0, 1, 3), np.int32), slot_mapping=np.zeros((0, 5), np.int32)),
        "block_tables have 0 cache groups, the graph takes 1",
    ),
    "slot": (lambda b: replace(b, slot_mapping=i32(0, 1, 2, 3, 24 * 16)[None]), r"slot_mapping\[4\] is 384, must be"),
    "negative slot": (lambda b: replace(b, slot_mapping=i32(0, 1, 2, 3, -1)[None]), r"slot_mapping\[4\] is -1"),
    "block": (lambda b: replace(b, block_tables=i32(24, 0, 0)[None, None]), r"request 0: block_tables row\[0\] is 24"),
    "negative block": (lambda b: replace(b, block_tables=i32(-1, 0, 0)[None, None]), "block_tables"),
    "few blocks": (lambda b: replace(b, block_tables=np.zeros((1, 1, 0), np.int32)), "the tokens in its block_tables"),
    "table rows": (lambda b: replace(b, block_tables=np.zeros((1, 2, 3), np.int32)), "one row per request"),
    "length": (lambda b: replace(b, seq_lens=i32(200)), r"seq_lens\[0\] is 200, must be at most 128"),
    "short length": (lambda b: replace(b, seq_lens=i32(2)), r"seq_lens\[0\] is 2, must be at least"),
    "positions": (lambda b: replace(b, positions=i32(0, 1, 2, 3, 9)), r"positions\[4\] is 9"),
    "no starts": (lambda b: replace(b, query_start_loc=i32(), seq_lens=i32()), "query_start_loc is empty"),
    "first start": (lambda b: replace(b, query_start_loc=i32(1, 5)), r"query_start_loc\[0\] is 1"),
    "last start": (lambda b: replace(b, query_start_loc=i32(0, 4)), r"query_start_loc\[1\] is 4"),
    "falling starts": (
        lambda b: replace(
            b,
            query_start_loc=i32(0, 7, 5),
            seq_lens=i32(7, 5),
            block_tables=np.zeros((1, 2, 3), np.int32),
            state_slots=i32(0, 0),
        ),
        "query_start_loc",
    ),
    "output row": (lambda b: replace(b, logits_indices=i32(5)), r"logits_indices\[0\] is 5, must be below 5"),
    "copied block": (lambda b: replace(b, block_copies=i32(3, 24)[None]), r"block_copies\[1\] is 24, must be below 24"),
    "copied pairs": (lambda b: replace(b, block_copies=i32(3, 4, 5)[None]), r"block_copies must be \[copies, 2\]"),
    "sampling rows": (lambda b: replace(b, sampling=SAMPLING), "rows has 1 entries, must have 5"),
    "sampling dtype": (
        lambda b: replace(
            b, logits_indices=i32(1), sampling=replace(SAMPLING, rows=np.zeros(1, [("num_logprobs", np.int32)]))
        ),
        "rows must be a contiguous array of SAMPLING_ROW",
    ),
    "strided sampling rows": (
        lambda b: replace(b, logits_indices=i32(1, 2), sampling=SamplingBatch.plain(greedy_rows(4)[::2])),
        "rows must be a contiguous array of SAMPLING_ROW",
    ),
    "mask": (
        lambda b: replace(
            b, logits_indices=i32(1), sampling=replace(SAMPLING, allowed_mask=np.zeros((1, 2), np.uint32))
        ),
        r"allowed_mask must be \[1, 3\]",
    ),
    "history": (
        lambda b: replace(b, logits_indices=i32(1), sampling=replace(SAMPLING, history_start=i32(0, 3))),
        "history_start must rise from 0 to the number of entries, 0",
    ),
}


@pytest.fixture(scope="module")
def executor() -> CpuExecutor:
    return compiled()


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_a_batch_that_does_not_fit_is_refused_before_anything_runs(name, executor):
    change, message = WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        executor.submit(change(batch())).wait()
    executor.submit(batch()).wait()


def test_a_step_beyond_the_limits_is_refused(executor):
    with pytest.raises(ValueError, match="65 tokens in one step, the executor was compiled for at most 64"):
        executor.submit(replace(batch(40), **_wide(65))).wait()


def _wide(tokens: int) -> dict[str, np.ndarray]:
    numbers = np.arange(tokens, dtype=np.int32)
    return {
        "token_ids": numbers % VOCAB,
        "positions": numbers,
        "slot_mapping": numbers[None],
        "query_start_loc": i32(0, tokens),
        "seq_lens": i32(tokens),
        "logits_indices": i32(0),
    }


def test_cache_sizes_that_make_no_sense_are_refused():
    executor = cpu.compile(tiny_llama(), tiny_weights(), LIMITS)
    with pytest.raises(RuntimeError, match="no cache was allocated"):
        executor.submit(batch()).wait()
    with pytest.raises(UsageError, match="the block size is 12, must be 8 or a multiple of 16"):
        executor.allocate_cache(4, 12)
    with pytest.raises(UsageError, match="at least one block"):
        executor.allocate_cache(0, 16)
    executor.allocate_cache(24, 16)
    with pytest.raises(UsageError, match="allocated already"):
        executor.allocate_cache(24, 16)


def test_weights_and_graph_must_fit():
    weights = tiny_weights()
    weights["layers.1.up.weight"] = DenseWeight(np.zeros((95, WIDTH), np.float32))
    with pytest.raises(GraphError, match=r"layers.1.up.weight has shape \[95, 64\], the graph uses it as \[96, 64\]"):
        compiled(weights)


def test_the_cap_on_instruction_sets(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "scalar")
    assert choose_isa() == "scalar"
    assert compiled().isa == "scalar"
    monkeypatch.setenv("OCTAVO_ISA", "amx")
    assert choose_isa() == compiled().isa
    monkeypatch.delenv("OCTAVO_ISA")
    with pytest.raises(UsageError, match="'avx9' is unknown; use one of scalar, avx2, avx512, avx512vnni, amx"):
        choose_isa("avx9")


def test_close_gives_memory_back():
    executor = compiled()
    executor.submit(batch()).wait()
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="the executor is closed"):
        executor.submit(batch()).wait()


def test_a_step_without_output_rows_or_without_tokens():
    executor = compiled()
    silent = executor.submit(replace(batch(), logits_indices=i32())).wait()
    assert silent.logits is not None
    assert silent.logits.shape == (0, VOCAB)
    nothing = Batch(i32(), i32(), i32(0), i32(), np.zeros((1, 0, 3), np.int32), np.zeros((1, 0), np.int32), i32())
    assert executor.submit(nothing).wait().token_ids.shape == (0,)
