"""Blocks in a store beyond the cache: the bits of computing them, whatever the store does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.backends import ExecutorLimits, get_backend
from octavo.engine.engine import Engine
from octavo.engine.kv import load_rates
from octavo.engine.kv.block_tier import BlockRow, BlockStore, opened, sealed
from octavo.engine.kv.cache_identity import CacheIdentity, is_states_key
from octavo.engine.limits import EngineLimits
from octavo.engine.request import RequestStatus
from octavo.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from tests.engine.test_model_runs import VOCAB_SIZE, Tokenizer
from tests.support.fake_executor import create_request
from tests.support.integrity import check_integrity
from tests.support.text_models import save_decoder, save_hybrid
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import tiny_graph

PROMPT = [i * 7 % 90 for i in range(1, 46)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
IDENTITY = CacheIdentity(b"tiny", b"layout")


class MemoryStore:
    """Records in a dictionary. is_slow: nothing arrives."""

    keeps_prompts = False
    keeps_private = True

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.touched: set[bytes] = set()
        self.pinned: dict[bytes, float] = {}
        self.is_slow = False
        self.num_loaded = 0

    def has(self, key: bytes) -> bool:
        return key in self.records

    def load(self, keys: Sequence[bytes]) -> MemoryArrival:
        self.num_loaded += len(keys)
        return MemoryArrival(self, keys)

    def save(self, key: bytes, data: BlockRow) -> bool:
        self.records[key] = sealed(key, data)
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        self.touched.update(keys)

    def pin(self, keys: Iterable[bytes], seconds: float) -> None:
        self.pinned.update(dict.fromkeys(keys, seconds))

    def discard(self, key: bytes) -> None:
        self.records.pop(key, None)

    def close(self) -> None: ...


class MemoryArrival:
    seconds = 0.001

    def __init__(self, store: MemoryStore, keys: Sequence[bytes]) -> None:
        self._store, self._keys = store, keys

    def wait(self, timeout_s: float) -> list[bytes | None] | None:  # noqa: ARG002 - a protocol's
        return None if self._store.is_slow else [self._store.records.get(key) for key in self._keys]


def make_engine(
    model: str,
    store: BlockStore | None = None,
    *,
    identity: CacheIdentity | None = IDENTITY,
    kv_dtype: str = "float16",
    backend: str = "cpu",
    num_blocks: int = 64,
) -> Engine:
    graph, weights = tiny_graph(model)
    limits = ExecutorLimits(16, 4, 8, 64)
    executor = get_backend(backend).compile(graph, weights, limits, num_threads=2, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    num_states = 8 if graph.state_caches else 0
    executor.allocate_cache(num_blocks, 8, num_states)
    engine_limits = EngineLimits(64, 4, 16, 8, 8, num_blocks, VOCAB_SIZE, num_states=num_states)
    return Engine(executor, Tokenizer(), engine_limits, identity=identity, store=store)


def run(engine: Engine, *prompts: list[int]) -> list[OutputDelta]:
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, str(i), prompt, PARAMS))
    return finish(engine)


def finish(engine: Engine) -> list[OutputDelta]:
    outputs: dict[str, OutputDelta] = {}
    while engine.has_work:
        take_step(engine, outputs)
    check_integrity(engine.scheduler)
    return [outputs[key] for key in sorted(outputs)]


def take_step(engine: Engine, outputs: dict[str, OutputDelta]) -> None:
    """Adds what a step of the engine gives to the outputs of its requests."""
    for output in engine.step():
        assert isinstance(output, OutputDelta)
        if output.request_id in outputs:
            outputs[output.request_id].add(output)
        else:
            outputs[output.request_id] = output


def cached(output: OutputDelta) -> int:
    assert output.metrics is not None
    return output.metrics.num_cached_tokens


def bits(output: OutputDelta) -> object:
    choice = output.outputs[0]
    assert choice.logprobs
    return choice.token_ids, [[(k, v.logprob) for k, v in row.items()] for row in choice.logprobs]


def filled_store(model: str, **options: str) -> MemoryStore:
    """The blocks that an engine with few of them has evicted after PROMPT."""
    store = MemoryStore()
    groups = 7 if model == "gemma3" else 1
    engine = make_engine(model, store, num_blocks=9 * groups, **options)  # type: ignore[arg-type]
    run(engine, PROMPT)
    run(engine, [89, 88, 87, *PROMPT[3:]])
    run(engine, [79, 78, 77, *PROMPT[3:]])
    if model in HYBRIDS:  # also the slots for states are given to others
        run(engine, *([i, *PROMPT[4:35]] for i in range(4, 8)))
    assert store.records
    return store


CASES = [
    ("llama", {}),
    ("llama", {"kv_dtype": "int8"}),
    ("gemma3", {}),
    ("llama", {"backend": "torch:cpu"}),
    ("llama", {"backend": "reference"}),
    *((name, {}) for name in HYBRIDS),
    ("lfm2", {"backend": "torch:cpu"}),
    ("lfm2", {"backend": "reference"}),
]


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_a_prefix_moves_through_bytes_to_another_engine(model: str, options: dict[str, str]) -> None:
    store = filled_store(model, **options)
    alone = make_engine(model, **options)  # type: ignore[arg-type]
    [computed] = run(alone, PROMPT)
    [expected] = run(alone, PROMPT)
    assert (cached(computed), cached(expected)) == (0, 40)
    engine = make_engine(model, store, **options)  # type: ignore[arg-type]
    [found] = run(engine, PROMPT)
    assert cached(found) == 40
    assert bits(found) == bits(expected)
    # Other products than those of the CPU's kernels have other bits for other numbers of rows.
    assert bits(found) == bits(computed) or options.get("backend") in ("reference", "torch:cpu")
    assert engine.metrics.num_prefix_hits_total == 0  # the cache itself had nothing
    num_loaded = store.num_loaded
    [again] = run(engine, PROMPT)
    assert bits(again) == bits(expected)
    assert store.num_loaded == num_loaded  # now the blocks, and the states of the prefix, are in the cache


def test_another_identity_salt_or_prompt_never_matches() -> None:
    store = filled_store("llama")
    for identity in (None, replace(IDENTITY, model=b"x"), replace(IDENTITY, layout=b"x")):
        [found] = run(make_engine("llama", store, identity=identity), PROMPT)
        assert cached(found) == 0
    engine = make_engine("llama", store)
    engine.add_request(create_request(engine, "salted", PROMPT, PARAMS, cache_salt="s"))
    assert cached(finish(engine)[0]) == 0
    assert cached(run(engine, [89, *PROMPT[1:]])[0]) == 0
    assert store.num_loaded == 0


def flip(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


DAMAGES = {"flipped": flip, "cut": lambda r: r[:-1], "longer": lambda r: r + b"x", "empty": lambda _: b""}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damage_costs_time_and_never_an_answer(damage: Callable[[bytes], bytes]) -> None:
    store = filled_store("llama")
    [expected] = run(make_engine("llama"), PROMPT)
    engine = make_engine("llama", store)
    engine.add_request(create_request(engine, "0", PROMPT, PARAMS))
    [(group, _)] = engine.admission.arriving.items()
    keys, start, end = engine.scheduler.kv_cache.stored_prefix(group.members[0], 44)
    assert (len(keys), start, end) == (5, 0, 40)
    store.records[keys[2]] = damage(store.records[keys[2]])
    [found] = finish(engine)
    assert bits(found) == bits(expected)
    assert cached(found) == 16
    assert keys[2] not in store.records
    # A record of another block is damage, too.
    store.records[keys[2]] = store.records[keys[1]]
    [found] = run(make_engine("llama", store), PROMPT)
    assert bits(found) == bits(expected)


def test_a_sequence_that_waits_for_its_blocks_keeps_no_other_and_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = filled_store("llama")
    engine = make_engine("llama", store)
    store.is_slow = True
    arriving = create_request(engine, "0", PROMPT, PARAMS)
    engine.add_request(arriving)
    assert arriving.sequences[0].status is RequestStatus.ARRIVING
    engine.add_request(create_request(engine, "1", [5, 6, 7], PARAMS))
    [(other, output)] = [(o.request_id, o) for _ in range(20) for o in engine.step() if getattr(o, "finished", False)]
    assert (other, isinstance(output, OutputDelta)) == ("1", True)
    assert arriving.sequences[0].num_computed_tokens == 0
    store.is_slow = False
    [found] = finish(engine)
    assert cached(found) == 40
    # Too late: it is computed.
    store.is_slow = True
    monkeypatch.setattr(load_rates, "_PATIENCE_S", 0.0)
    [late] = run(make_engine("llama", store), PROMPT)
    assert (cached(late), bits(late)) == (0, bits(found))
    # Aborted on the way.
    monkeypatch.undo()
    engine = make_engine("llama", store)
    engine.add_request(create_request(engine, "0", PROMPT, PARAMS))
    engine.abort("0")
    assert not engine.admission.arriving
    assert not engine.has_work


@pytest.mark.parametrize("model", ["llama", *HYBRIDS])
def test_more_requests_than_there_are_blocks_for(model: str) -> None:
    """Preemption and eviction beside loading; every answer is that of an engine without a store."""
    prompts = [[*PROMPT[:32], i, *PROMPT[32:40]] for i in range(6)] + [[i, *PROMPT[:30]] for i in range(6)]
    expected = [bits(run(make_engine(model), prompt)[0]) for prompt in prompts]
    store = MemoryStore()
    for _ in range(3):
        engine = make_engine(model, store, num_blocks=14)
        assert [bits(found) for found in run_in_order(engine, prompts)] == expected
    assert store.num_loaded > 0


def test_figures_of_a_store_are_apart_from_those_of_the_cache() -> None:
    store = filled_store("llama")
    engine = make_engine("llama", store)
    metrics, size = engine.metrics, engine.executor.cache_sizes.moved_bytes(8)
    store.touched.clear()
    [found] = run(engine, PROMPT)
    assert (metrics.num_store_queries_total, metrics.num_store_hits_total) == (44, 40)
    assert (metrics.num_prefix_queries_total, metrics.num_prefix_hits_total) == (45, 0)
    assert metrics.num_store_bytes_read_total == 5 * size
    assert found.metrics is not None
    assert (found.metrics.num_cached_tokens, found.metrics.num_loaded_tokens) == (40, 40)
    [again] = run(engine, PROMPT)
    assert again.metrics is not None
    assert (again.metrics.num_cached_tokens, again.metrics.num_loaded_tokens) == (40, 0)
    assert (metrics.num_store_queries_total, metrics.num_store_hits_total) == (48, 40)
    assert metrics.num_prefix_hits_total == 40
    assert metrics.num_store_records_dropped_total == 0
    keys = store.touched & store.records.keys()
    assert len(keys) == 5
    for key in keys:
        store.records[key] = flip(store.records[key])
    damaged = make_engine("llama", store)
    run(damaged, PROMPT)
    assert damaged.metrics.num_store_records_dropped_total == 5
    assert damaged.metrics.num_store_hits_total == 0
    few = make_engine("llama", MemoryStore(), num_blocks=9)
    run(few, PROMPT)
    run(few, [89, *PROMPT[1:]])
    assert few.metrics.num_store_bytes_written_total >= size


def test_a_store_that_is_slower_than_computing_is_not_asked() -> None:
    store = filled_store("llama")
    engine = make_engine("llama", store)
    [expected] = run(make_engine("llama"), PROMPT)
    engine.scheduler.times.observe(0, 100, 0, 1e-6)
    assert engine.scheduler.kv_cache.tier is not None
    engine.scheduler.kv_cache.tier.give_up([next(iter(store.records))], 10.0)
    [found] = run(engine, PROMPT)
    assert (cached(found), store.num_loaded, bits(found)) == (0, 0, bits(expected))


class BrokenStore(MemoryStore):
    """Raises in the method of this name, or loads records that are none."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        super().__init__()
        self.records, self._name = store.records, name
        self.num_failures = 0

    def fail(self, name: str) -> None:
        if name == self._name:
            self.num_failures += 1
            raise OSError("the disk is gone")

    def has(self, key: bytes) -> bool:
        self.fail("has")
        return super().has(key)

    def load(self, keys: Sequence[bytes]) -> MemoryArrival:
        self.fail("load")
        return BrokenArrival(self, keys)

    def save(self, key: bytes, data: BlockRow) -> bool:
        self.fail("save")
        return super().save(key, data)

    def touch(self, keys: Iterable[bytes]) -> None:
        self.fail("touch")
        super().touch(keys)

    def discard(self, key: bytes) -> None:
        self.fail("discard")
        super().discard(key)

    def changed(self, records: list[bytes | None] | None) -> list[Any] | None:
        if self._name == "discard" and records:
            return [b"damaged" for _ in records]
        if self._name == "fewer" and records:
            return records[1:]
        return [7 for _ in records] if self._name == "numbers" and records else records


class BrokenArrival(MemoryArrival):
    def wait(self, timeout_s: float) -> list[bytes | None] | None:
        assert isinstance(self._store, BrokenStore)
        self._store.fail("wait")
        return self._store.changed(super().wait(timeout_s))


@pytest.mark.parametrize("name", ["has", "load", "wait", "save", "touch", "discard", "fewer", "numbers"])
def test_a_store_that_fails_costs_time_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    others = [[i, *PROMPT[:30]] for i in range(6)]
    expected = [bits(run(make_engine("llama"), prompt)[0]) for prompt in [PROMPT, *others]]
    store = BrokenStore(filled_store("llama"), name)
    engine = make_engine("llama", store, num_blocks=14)
    assert [bits(run(engine, prompt)[0]) for prompt in [PROMPT, *others]] == expected
    assert store.num_failures == (name not in ("fewer", "numbers"))  # then it is left alone
    assert caplog.text.count("the block store failed and will not be used again") == 1
    assert "the disk is gone" in caplog.text or not store.num_failures


def test_a_step_whose_results_do_not_count_saves_all_the_same() -> None:
    store = MemoryStore()
    engine = make_engine("llama", store, num_blocks=9)
    run(engine, PROMPT)
    assert not store.records
    engine.add_request(create_request(engine, "0", [89, *PROMPT[1:]], PARAMS))
    for _ in range(4):
        engine.start()
        if engine._in_flight[0].saved and engine._in_flight[0].saved.blocks:
            break
        engine.finish()
    [step] = engine._in_flight
    assert step.saved is not None
    engine._drop_in_flight()  # as after a step that fails
    assert list(store.records) == step.saved.blocks != []


def test_a_store_without_prefix_caching_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("llama")
    limits = replace(engine.limits, enable_prefix_caching=False)
    without = Engine(engine.executor, Tokenizer(), limits, identity=IDENTITY, store=MemoryStore())
    assert "the block store is not used: prefix caching is off" in caplog.text
    assert without.scheduler.kv_cache.tier is None


def test_states_of_a_request_that_failed_are_not_used_again() -> None:
    store = filled_store("lfm2")
    engine = make_engine("lfm2", store)
    request = create_request(engine, "0", PROMPT, PARAMS)
    engine.add_request(request)
    while not request.sequences[0].num_output_tokens:
        engine.step()
    kept = [key for key in store.records if is_states_key(key)]
    engine.scheduler.kv_cache.quarantine(request.sequences)
    engine.abort("0")
    assert len([key for key in kept if key not in store.records]) == 3  # after each chunk of the prompt
    assert cached(run(engine, PROMPT)[0]) == 0


def run_in_order(engine: Engine, prompts: list[list[int]]) -> list[OutputDelta]:
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, f"{i:02}", prompt, PARAMS))
    return finish(engine)


def test_a_record_opens_only_for_its_key_and_size() -> None:
    import numpy as np

    data = np.arange(64, dtype=np.uint8)
    record = sealed(b"key", data)
    assert (opened(b"key", record, 64) == data).all()  # type: ignore[union-attr]
    assert opened(b"other", record, 64) is None
    assert opened(b"key", record, 63) is None
    for i in range(len(record)):
        assert opened(b"key", record[:i] + bytes([record[i] ^ 64]) + record[i + 1 :], 64) is None


PARTS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"backend": "torch:cpu", "gpu_layers": 1}]


@pytest.mark.parametrize("save", [save_decoder, save_hybrid])
@pytest.mark.parametrize("options", PARTS, ids=str)
def test_each_part_of_a_model_moves_its_own_part_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], save: Callable[[Path], Path]
) -> None:
    model = save(tmp_path)
    stores: list[MemoryStore | None] = [MemoryStore()]
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    monkeypatch.setattr("octavo.engine.load.Engine", lambda *args, **_: Engine(*args[:6], store=stores[0]))
    text = "one two three four five six seven"
    others = [f"{i} eight nine ten eleven twelve thirteen" for i in range(16)]

    def answer(prompts: list[str], memory: int) -> list[object]:
        sizes = {"max_model_len": 96, "max_num_seqs": 2, "num_threads": 1, "block_size": 16}
        with LLM(str(model), kv_cache_memory=memory, **sizes, **options) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
            outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
            return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.num_cached_tokens) for each in outputs]

    few = (28 if "gpu_layers" in options else 14) << 10  # a rank has half of a block's bytes
    answer([text, *others], few)
    assert stores[0] is not None
    assert stores[0].records
    [(tokens, logprobs, cached_tokens)] = answer([text], 1 << 20)  # type: ignore[misc]
    assert cached_tokens >= 16
    stores[0] = None
    assert answer([text], 1 << 20) == [(tokens, logprobs, 0)]
