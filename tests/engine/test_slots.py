"""Slots: a prompt that was saved is not computed again, and no file does harm."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.slot_files import run_action
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import EngineDeadError, UsageError
from octavo.outputs import OutputDelta
from tests.engine.test_block_tier import CASES, PARAMS, PROMPT, MemoryStore, bits, cached, make_engine
from tests.support.fake_executor import create_request
from tests.support.integrity import check_integrity


class Slotted:
    """An engine in a thread, and its slots."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.thread = engine, EngineThread(engine)
        self._count = 0

    def __enter__(self) -> Slotted:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.close()
        check_integrity(self.engine.scheduler)

    def answer(self, prompt: list[int], salt: str = "", slot: int = -1) -> OutputDelta:
        items: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        self._count += 1
        request = create_request(self.engine, str(self._count), prompt, PARAMS, cache_salt=salt, id_slot=slot)
        self.thread.submit(request, items.put)
        output = items.get(timeout=30)
        while not output.finished:
            output.add(items.get(timeout=30))
        return output

    def act(self, kind: str, path: Path | None = None, slot: int = 0, salt: str = "") -> SlotReport:
        return run_action(self.thread, SlotAction(kind, slot, str(path or ""), salt))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_a_restored_prompt_has_the_bits_of_the_cache(tmp_path: Path, model: str, options: dict[str, str]) -> None:
    with Slotted(make_engine(model, **options)) as first:  # type: ignore[arg-type]
        first.answer(PROMPT)
        saved = first.act("save", tmp_path / "a")
        expected = first.answer(PROMPT)
    with Slotted(make_engine(model, **options)) as second:  # type: ignore[arg-type]
        restored = second.act("restore", tmp_path / "a")
        found = second.answer(PROMPT)
        assert bits(found) == bits(expected)
        # Of hybrids the states after the prompt are known, and no later ones.
        assert saved.num_tokens == restored.num_tokens >= cached(found) == 40
        assert saved.num_bytes == (tmp_path / "a").stat().st_size
        assert 0 < restored.num_bytes < saved.num_bytes
        assert second.act("save", tmp_path / "b").num_tokens in (40, 48)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_slot_has_its_number_or_that_of_its_row(tmp_path: Path) -> None:
    with Slotted(make_engine("llama")) as slots:
        slots.answer(PROMPT, slot=3)
        slots.answer([9, *PROMPT[:20]])
        assert [slots.act("save", tmp_path / "a", slot=i).num_tokens for i in range(4)] == [24, 0, 0, 48]
        assert slots.act("erase", slot=3).num_tokens == 48
        assert slots.act("save", tmp_path / "a", slot=3).num_tokens == 0
        assert cached(slots.answer(PROMPT)) == 0
        with pytest.raises(UsageError, match="id_slot is 4; it must be from 0 to 3"):
            slots.answer(PROMPT, slot=4)


def test_an_empty_slot_is_saved_and_restored_as_nothing(tmp_path: Path) -> None:
    with Slotted(make_engine("llama")) as slots:
        assert slots.act("save", tmp_path / "a").num_tokens == 0
        assert slots.act("restore", tmp_path / "a", slot=2).num_tokens == 0
        assert slots.act("erase", slot=2).num_tokens == 0
        assert cached(slots.answer(PROMPT)) == 0


def test_a_slot_of_another_salt_is_empty(tmp_path: Path) -> None:
    with Slotted(make_engine("llama")) as slots:
        slots.answer(PROMPT, salt="mine")
        assert slots.act("save", tmp_path / "a", salt="other").num_tokens == 0
        assert slots.act("erase", salt="other").num_tokens == 0
        slots.answer(PROMPT, salt="mine")
        assert slots.act("save", tmp_path / "a", salt="mine").num_tokens == 48
    store = MemoryStore()
    store.keeps_private = False
    with Slotted(make_engine("llama", store, num_blocks=9)) as slots:
        assert slots.act("restore", tmp_path / "a").num_tokens == 48
        assert cached(slots.answer(PROMPT)) == 0
        assert slots.act("restore", tmp_path / "a", salt="mine").num_tokens == 48
        assert cached(slots.answer(PROMPT, salt="mine")) == 40
        for i in range(3):
            slots.answer([i, *PROMPT[1:]])
        assert not store.records.keys() & slots.engine.slots.wanted_keys(slots.engine.slots.content(0, "mine").hashes)


FOREIGN = {"no segment": b"GGUF" * 100, "empty": b"", "short": b"OCTKV002"}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
def test_a_foreign_file_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with Slotted(make_engine("llama")) as slots:
        expected = bits(slots.answer(PROMPT))
        with pytest.raises(UsageError, match="is not a saved prompt, or comes from a different version"):
            slots.act("restore", tmp_path / "a")
        assert bits(slots.answer(PROMPT)) == expected
        with pytest.raises(UsageError, match="No such file"):
            slots.act("restore", tmp_path / "none")
        with pytest.raises(UsageError, match="cannot be saved"):
            slots.act("save", tmp_path / "none" / "a")
        assert os.listdir(tmp_path) == ["a"]


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    with Slotted(make_engine("llama")) as slots:
        slots.answer(PROMPT)
        slots.act("save", tmp_path / "a")
    with Slotted(make_engine("llama", identity=CacheIdentity(b"another", b"layout"))) as slots:
        with pytest.raises(UsageError, match="a different model, setting or version"):
            slots.act("restore", tmp_path / "a")
        assert cached(slots.answer(PROMPT)) == 0
    with Slotted(make_engine("llama", identity=None)) as slots, pytest.raises(UsageError, match="modified just now"):
        slots.act("restore", tmp_path / "a")


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_damage_costs_time_and_never_an_answer(tmp_path: Path, model: str) -> None:
    with Slotted(make_engine(model)) as slots:
        expected = bits(slots.answer(PROMPT))
        slots.act("save", tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    counts = []
    with Slotted(make_engine(model)) as slots:
        for i in range(0, len(content), len(content) // 40):
            for damaged in (content[:i] + bytes([content[i] ^ 64]) + content[i + 1 :], content[:i]):
                (tmp_path / "b").write_bytes(damaged)
                try:
                    counts.append(slots.act("restore", tmp_path / "b").num_tokens)
                except UsageError:
                    counts.append(0)
                found = slots.answer(PROMPT)
                assert bits(found) == expected
                assert cached(found) == min(counts[-1], 40)
                slots.act("erase")
    assert 0 in counts
    assert model == "lfm2" or len(set(counts)) > 4


def test_a_prompt_that_does_not_fit_is_restored_in_part(tmp_path: Path) -> None:
    with Slotted(make_engine("llama")) as slots:
        slots.answer(PROMPT)
        slots.act("save", tmp_path / "a")
    with Slotted(make_engine("llama", num_blocks=8)) as slots:
        pool = slots.engine.scheduler.kv_cache.pool
        held = slots.thread.call(lambda: [pool.allocate() for _ in range(5)]).result()
        assert slots.act("restore", tmp_path / "a").num_tokens == 16
        slots.thread.call(lambda: [pool.free(each) for each in held]).result()
        assert cached(slots.answer(PROMPT)) == 16


def test_saving_ends_with_the_engine(tmp_path: Path) -> None:
    slots = Slotted(make_engine("llama"))
    slots.answer(PROMPT)
    slots.thread.close()
    with pytest.raises(EngineDeadError):
        slots.act("save", tmp_path / "a")


def test_a_saved_slot_beside_running_requests(tmp_path: Path) -> None:
    with Slotted(make_engine("llama")) as slots:
        expected = bits(slots.answer([3, *PROMPT[:30]]))
        slots.answer(PROMPT, slot=2)
        items: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        slots.thread.submit(create_request(slots.engine, "beside", [3, *PROMPT[:30]], PARAMS), items.put)
        assert slots.act("save", tmp_path / "a", slot=2).num_tokens == 48
        output = items.get(timeout=30)
        while not output.finished:
            output.add(items.get(timeout=30))
        assert bits(output) == expected
