"""Blocks in files: the bits of computing them after any end of the process, and with any damage to the files."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import engine_thread
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.kv import disk_store
from octavo.engine.kv.block_tier import BlockRow, as_one, opened
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.disk_store import DiskStore, open_disk_store
from octavo.engine.kv.segment import RecordHead, SegmentHead
from octavo.errors import UsageError
from tests.engine.test_block_tier import CASES, PARAMS, PARTS, PROMPT, bits, cached, finish, make_engine, run
from tests.support.fake_executor import create_request
from tests.support.text_models import save_decoder, save_hybrid

IDENTITY = bytes(range(32))
KEYS = [bytes([i]) * 32 for i in range(4)] + [b"w" * 34, b"s" * 38]  # also of a window's group, and of states
BLOCK = 24


def block(i: int, size: int = BLOCK) -> BlockRow:
    return np.arange(i, i + size).astype(np.uint8)


def open_store(folder: Path, limit: int = 1 << 20) -> DiskStore:
    return DiskStore(folder, IDENTITY, limit)


def found(store: DiskStore) -> dict[bytes, BlockRow | None]:
    """The records as the tier takes them; None: with a wrong digest."""
    records = store.load(KEYS).wait(10)
    assert records is not None
    return {key: opened(key, record, BLOCK) for key, record in zip(KEYS, records, strict=True) if record is not None}


def fill(folder: Path) -> Path:
    """A folder with a segment of all KEYS. Returns the segment."""
    store = open_store(folder)
    for i, key in enumerate(KEYS):
        store.save(key, block(i))
    store.close()
    [segment] = folder.glob("*.octkv")
    return segment


def check(store: DiskStore) -> int:
    """Checks that nothing is wrong. Returns the number of records that are right."""
    records = {key: data for key, data in found(store).items() if data is not None}
    assert all((data == block(KEYS.index(key))).all() for key, data in records.items())
    return len(records)


def test_records_are_there_while_they_are_written_and_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    store.save(KEYS[0], block(0))
    assert store.has(KEYS[0])
    assert not store.has(KEYS[1])
    assert check(store) == 1
    store.close()
    assert check(open_store(tmp_path / "a")) == 1
    assert check(open_store(fill(tmp_path / "b").parent)) == len(KEYS)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "a").iterdir())


def test_records_of_one_load_are_an_array_without_a_copy(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    records = open_store(tmp_path / "a").load(KEYS).wait(10)
    rows = [opened(key, record, BLOCK) for key, record in zip(KEYS, records or (), strict=True)]  # type: ignore[arg-type]
    wanted = np.stack([block(i) for i in range(len(KEYS))])
    for chosen in ([0, 1, 2, 3], [0, 2, 4], [3], [1, 1], [0, 1, 3], [2, 1]):
        array = as_one([rows[i] for i in chosen])  # type: ignore[misc]
        assert (array == wanted[chosen]).all()
        assert np.shares_memory(array, rows[chosen[0]]) == (chosen in ([0, 1, 2, 3], [0, 2, 4], [1, 1]))  # type: ignore[arg-type]
    assert not np.shares_memory(as_one([block(0), block(0)]), block(0))


def test_a_discarded_record_does_not_come_back(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    store = open_store(tmp_path / "a")
    store.discard(KEYS[2])
    assert not store.has(KEYS[2])
    store.close()
    again = open_store(tmp_path / "a")
    assert not again.has(KEYS[2])
    assert check(again) == len(KEYS) - 1
    again.save(KEYS[2], block(2))
    again.close()
    assert check(open_store(tmp_path / "a")) == len(KEYS)


def test_a_record_that_is_discarded_in_the_queue_is_not_written_behind_its_note(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    with store._scanning:  # the writer waits
        for i in range(2):
            store.save(KEYS[i], block(i))
        store.discard(KEYS[1])
        assert not store.has(KEYS[1])
        store.pin([KEYS[2]], 60)
        store.save(KEYS[2], block(2))  # is written before those that came first
    store.close()
    again = open_store(tmp_path / "a")
    assert [again.has(key) for key in KEYS[:3]] == [True, False, True]


def test_any_byte_of_a_segment_may_be_wrong(tmp_path: Path) -> None:
    segment = fill(tmp_path / "a")
    content = segment.read_bytes()
    for i in range(len(content)):
        segment.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        store = open_store(tmp_path / "a")
        assert check(store) < len(KEYS)
        store.close()


def test_a_segment_may_end_anywhere_and_more_is_kept_behind_it(tmp_path: Path) -> None:
    segment = fill(tmp_path / "a")
    content = segment.read_bytes()
    counts = []
    for i in range(len(content)):
        segment.write_bytes(content[:i])
        store = open_store(tmp_path / "a")
        counts.append(check(store))
        if i % 37 == 0:
            for j, key in enumerate(KEYS):
                store.save(key, block(j))
            store.close()
            assert check(open_store(tmp_path / "a")) == len(KEYS)
            for other in tmp_path.glob("a/*.octkv"):
                if other != segment:
                    other.unlink()
        store.close()
    assert counts == sorted(counts)
    assert counts[-1] == len(KEYS) - 1


def test_a_fuzzed_segment_gives_right_records_or_none(tmp_path: Path) -> None:
    segment, rng = fill(tmp_path / "a"), random.Random(0)
    content = segment.read_bytes()
    for _ in range(300):
        data = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            start, count = rng.randrange(len(data)), rng.randint(0, 60)
            data[start : start + count] = rng.choice([rng.randbytes(count), b"", content[:count], b"\xff" * count])
        segment.write_bytes(data)
        store = open_store(tmp_path / "a")
        check(store)
        store.close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a").parent
    (folder / "notes.txt").write_text("mine")
    (folder / "00000001.octkv").write_bytes(b"no segment" * 100)
    (folder / "00000002.octkv").mkdir()
    (folder / "00000003.octkv").symlink_to("/etc/passwd")
    os.mkfifo(folder / "00000004.octkv")
    other = DiskStore(tmp_path / "b", bytes(32), 1 << 20)
    other.save(KEYS[0], block(9))  # under the same key, of another model
    other.close()
    (tmp_path / "b" / "00000000.octkv").rename(folder / "00000005.octkv")
    store = open_store(folder)
    assert check(store) == len(KEYS)
    store.save(b"x" * 32, block(7))
    store.close()
    assert open_store(folder).has(b"x" * 32)
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_oldest_segments_give_way(tmp_path: Path) -> None:
    limit = 16 << 10
    store, keys = open_store(tmp_path / "a", limit), [i.to_bytes(32, "big") for i in range(100)]
    for i, key in enumerate(keys):
        store.save(key, block(i, 500))
        store.flush()
        assert sum(file.stat().st_size for file in tmp_path.glob("a/*.octkv")) <= limit
    kept = [store.has(key) for key in keys]
    assert kept == sorted(kept)
    assert 12 < sum(kept) < 30
    store.close()
    again = open_store(tmp_path / "a", limit)
    assert [again.has(key) for key in keys] == kept
    again.save(b"y" * 32, block(0, 5000))  # larger than a segment
    again.flush()
    assert not again.has(b"y" * 32)


def test_what_was_used_outlives_its_segment(tmp_path: Path) -> None:
    limit = 16 << 10
    store, keys = open_store(tmp_path / "a", limit), [i.to_bytes(32, "big") for i in range(100)]
    for i, key in enumerate(keys):
        store.save(key, block(i, 500))
        store.flush()
        if i < 50:
            store.touch(keys[1:3])
        assert sum(file.stat().st_size for file in tmp_path.glob("a/*.octkv")) <= limit
        if 30 < i < 50:
            assert [store.has(each) for each in keys[:4]] == [False, True, True, False]
    assert not store.has(keys[1])  # it was used no more
    records = store.load(keys[-3:]).wait(10)
    assert records is not None
    for i, record in zip(range(97, 100), records, strict=True):
        assert record is not None
        assert (opened(keys[i], record, 500) == block(i, 500)).all()
    for i, key in enumerate(keys[:40]):  # loading is a use, too
        store.save(key, block(i, 500))
        store.load(keys[-1:]).wait(10)
        store.flush()
    assert store.has(keys[-1])
    assert not store.has(keys[-4])
    for key in keys:  # if all are used, half of a segment goes on
        store.touch(keys)
        store.save(key, block(keys.index(key), 500))
    store.close()
    again = open_store(tmp_path / "a", limit)
    assert sum(again.has(key) for key in keys) > 12


def test_one_process_writes_and_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_store(tmp_path / "a"), open_store(tmp_path / "a")
    first.save(KEYS[0], block(0))
    first.flush()
    second.save(KEYS[1], block(1))
    second.flush()
    monkeypatch.setattr(disk_store, "_REFRESH_S", -1.0)
    second.has(KEYS[0])  # begins to look for it
    second.load([]).wait(10)
    assert second.has(KEYS[0])
    assert not second.has(KEYS[1])
    assert check(second) == 1
    first.close()
    second.save(KEYS[1], block(1))  # now it is the writer
    second.close()
    [_] = tmp_path.glob("a/*.octkv")
    assert check(open_store(tmp_path / "a")) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_more_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    segment = fill(tmp_path / "a")
    content = segment.read_bytes()
    write, opens = os.pwritev, os.open

    def full(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        if sum(map(len, pieces)) < 60:
            raise OSError(code, os.strerror(code))
        return write(file, [b"".join(pieces)[:50]], offset)

    def read_only(path: Path, flags: int, *args: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(code, os.strerror(code))
        return opens(path, flags, *args)

    monkeypatch.setattr(os, "open" if code == errno.EROFS else "pwritev", read_only if code == errno.EROFS else full)
    store = open_store(tmp_path / "a")
    for i in range(6, 12):
        store.save(bytes([i]) * 32, block(i))
    store.flush()
    assert check(store) == len(KEYS)
    assert not store.has(bytes([6]) * 32)
    assert caplog.text.count("no more prompts are kept") == 1
    assert os.strerror(code) in caplog.text
    store.close()
    assert segment.read_bytes() == content


def test_a_folder_of_others_or_none_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity = CacheIdentity(b"model", b"layout")
    store = open_disk_store(tmp_path, identity, 1 << 20, "tiny")
    assert store is not None
    store.close()
    [folder] = tmp_path.iterdir()
    folder.chmod(0o777)
    assert open_disk_store(tmp_path, identity, 1 << 20, "tiny") is None
    assert "others may write to it" in caplog.text
    (tmp_path / "file").write_text("")
    assert open_disk_store(tmp_path / "file", identity, 1 << 20, "tiny") is None


def test_a_writer_pauses_beside_decoding_but_not_if_the_queue_fills_or_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write takes 10 ms of a clock that the test moves, of which the writer may use a hundredth."""
    clock, pauses = iter(i * 0.01 for i in range(1000)), []
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(disk_store, "_MAX_QUEUED_BYTES", 4 * BLOCK)
    store, may_write = open_store(tmp_path / "a"), threading.Event()
    store._writing.submit(may_write.wait)
    monkeypatch.setattr(store._is_hurried, "wait", pauses.append)
    for i in range(4):
        assert store.save(KEYS[i], block(i))
    may_write.set()
    store.flush()
    assert pauses == pytest.approx([0.25, 0.5, 0.75, 1.0])
    monkeypatch.undo()
    store.save(KEYS[4], block(4))
    store.close()  # ends the pause
    assert len(found(open_store(tmp_path / "a"))) == 5


_ENDING = """
import sys
import numpy as np
from pathlib import Path
from octavo.engine.kv import disk_store
disk_store._WRITING_SHARE = 1e-9
store = disk_store.DiskStore(Path(sys.argv[1]), bytes(range(32)), 1 << 30)
for i in range(20):
    store.save(i.to_bytes(32, "big"), np.full(20_000, i, np.uint8))
"""


def test_a_program_that_ends_without_close_writes_all_without_pauses(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _ENDING, tmp_path / "a"], check=True, timeout=60)
    store = open_store(tmp_path / "a", 1 << 30)
    assert all(store.has(i.to_bytes(32, "big")) for i in range(20))


def test_heads_are_what_they_were() -> None:
    head = SegmentHead(IDENTITY, "é" * 200)
    assert SegmentHead.read(head.content) == SegmentHead(IDENTITY, "é" * 100)
    assert RecordHead.read(RecordHead(b"k" * 38, 7, True).content) == RecordHead(b"k" * 38, 7, True)
    assert RecordHead.read(b"") is None


_WRITER = """
import sys
import numpy as np
from pathlib import Path
from octavo.engine.kv.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), bytes(range(32)), 1 << 30)
for i in range(10**6):
    store.save(i.to_bytes(32, "big"), np.full(20_000, i % 251, np.uint8))
    if i % 50 == 0:
        store.flush()
        print(i, flush=True)
"""


def test_a_writer_that_is_killed_leaves_what_it_had_written(tmp_path: Path) -> None:
    for _ in range(2):  # the second goes on where the first was
        with subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path / "a"], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(3):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        store, keys = open_store(tmp_path / "a", 1 << 30), [i.to_bytes(32, "big") for i in range(last + 1)]
        assert all(store.has(key) for key in keys)
        records = store.load(keys).wait(60)
        assert records is not None
        for i, (key, record) in enumerate(zip(keys, records, strict=True)):
            assert record is not None
            data = opened(key, record, 20_000)
            assert data is not None
            assert (data == i % 251).all()
        store.save(b"z" * 32, block(0))
        store.close()
        assert open_store(tmp_path / "a", 1 << 30).has(b"z" * 32)


def test_another_process_reads_while_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_REFRESH_S", -1.0)
    reader = open_store(tmp_path / "a", 1 << 30)
    with subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path / "a"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(4):
                last = int(writer.stdout.readline())
                key = last.to_bytes(32, "big")
                reader.has(key)  # begins to look for it
                reader.load([]).wait(10)
                assert reader.has(key)
                [record] = reader.load([key]).wait(10) or [None]
                assert record is not None
                data = opened(key, record, 20_000)
                assert data is not None
                assert (data == last % 251).all()
                reader.save(b"r" * 32, block(0))
                reader.flush()
                assert not reader.has(b"r" * 32)  # the other one holds the lock
            assert writer.poll() is None
        finally:
            writer.kill()
    reader.save(b"r" * 32, block(0))
    reader.close()
    assert open_store(tmp_path / "a", 1 << 30).has(b"r" * 32)


# --- under an engine ---


def restarted(model: str, folder: Path, prompt: list[int], **options: str) -> tuple[object, int]:
    store = open_store(folder, 1 << 26)
    engine = make_engine(model, store, **options)  # type: ignore[arg-type]
    [output] = run(engine, prompt)
    engine.close()
    return bits(output), cached(output)


@pytest.mark.parametrize(("model", "options"), CASES, ids=str)
def test_bits_are_equal_computed_from_memory_and_from_disk(tmp_path: Path, model: str, options: dict[str, str]) -> None:
    alone = make_engine(model, **options)  # type: ignore[arg-type]
    computed, memory = (run(alone, PROMPT)[0] for _ in range(2))
    first = restarted(model, tmp_path / "a", PROMPT, **options)
    assert first == (bits(computed), 0)
    assert restarted(model, tmp_path / "a", PROMPT, **options) == (bits(memory), 40)
    for segment in tmp_path.glob("a/*.octkv"):
        content = bytearray(segment.read_bytes())
        half = len(content) // 2
        content[half::64] = bytes(len(content[half::64]))
        segment.write_bytes(content)
    found, num_cached = restarted(model, tmp_path / "a", PROMPT, **options)
    assert num_cached < 40
    if options.get("backend") not in ("reference", "torch:cpu"):  # where the split of a prompt changes no bits
        assert found == bits(memory)


def test_the_last_block_of_a_prompt_is_kept_when_the_engine_ends(tmp_path: Path) -> None:
    engine = make_engine("llama", open_store(tmp_path / "a"))
    engine.add_request(create_request(engine, "0", PROMPT[:41], replace(PARAMS, max_tokens=1)))
    finish(engine)
    engine.close()
    assert restarted("llama", tmp_path / "a", PROMPT[:41])[1] == 40


def test_an_idle_engine_keeps_the_last_block_too(tmp_path: Path) -> None:
    has_last = threading.Event()

    class WatchedStore(DiskStore):
        def save(self, key: bytes, data: BlockRow) -> bool:
            is_kept = super().save(key, data)
            if len(self._queued.keys() | self._index.keys()) == 5:
                has_last.set()
            return is_kept

    engine = make_engine("llama", WatchedStore(tmp_path / "a", IDENTITY, 1 << 20))
    thread = EngineThread(engine)
    thread.submit(create_request(engine, "0", PROMPT[:41], replace(PARAMS, max_tokens=1)), lambda _: None)
    assert has_last.wait(20)  # as long as nobody asks for more
    thread.close()
    assert restarted("llama", tmp_path / "a", PROMPT[:41])[1] == 40


def test_who_asks_on_at_once_does_not_wait_for_the_step_of_an_idle_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the next request saves; one of its own is made after a while without requests."""
    monkeypatch.setattr(engine_thread, "_SAVE_AFTER_S", 60.0)
    engine = make_engine("llama", open_store(tmp_path / "a"))
    saves: list[int] = []
    save = engine.save_computed
    monkeypatch.setattr(engine, "save_computed", lambda: (saves.append(1), save()))
    thread = EngineThread(engine)
    for i in range(4):
        has_answer = threading.Event()
        request = create_request(engine, str(i), [i, *PROMPT[:40]], replace(PARAMS, max_tokens=1))
        thread.submit(request, lambda _, has_answer=has_answer: has_answer.set())
        assert has_answer.wait(20)
    assert not saves
    thread.close()  # which saves
    assert restarted("llama", tmp_path / "a", [3, *PROMPT[:40]])[1] == 40


def test_a_conversation_is_kept_with_the_answers_in_it(tmp_path: Path) -> None:
    engine = make_engine("llama", open_store(tmp_path / "a"))
    engine.add_request(create_request(engine, "0", PROMPT[:20], replace(PARAMS, max_tokens=14)))
    [answer] = finish(engine)
    second = [*PROMPT[:20], *answer.outputs[0].token_ids, 5, 6]
    run(engine, second)
    engine.close()
    assert restarted("llama", tmp_path / "a", second)[1] == 32


def run_salted(engine: Engine) -> int:
    engine.add_request(create_request(engine, "0", PROMPT, PARAMS, cache_salt="tenant"))
    [output] = finish(engine)
    run(engine, *([i, *PROMPT[1:]] for i in range(3)))  # evicts it
    engine.close()
    return cached(output)


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_what_belongs_to_a_salt_is_written_only_if_asked(tmp_path: Path, model: str) -> None:
    for _ in range(2):
        assert run_salted(make_engine(model, open_store(tmp_path / "a"), num_blocks=9)) == 0
    for expected in (0, 40):
        store = open_store(tmp_path / "a", 1 << 26)
        store.keeps_private = True
        assert run_salted(make_engine(model, store, num_blocks=9)) == expected


def test_a_model_keeps_its_prompts_through_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    model, text = save_decoder(tmp_path / "model"), "one two three four five six seven"
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    options = {"max_model_len": 96, "max_num_seqs": 2, "num_threads": 1, "kv_cache_memory": 1 << 20}

    def answer(**more: object) -> tuple[object, int]:
        with LLM(str(model), **options, **more) as llm:  # type: ignore[arg-type]
            [output] = llm.generate(text, params)
            return (output.outputs[0].token_ids, output.outputs[0].logprobs), output.num_cached_tokens or 0

    kept = {"prompt_cache_dir": str(tmp_path / "kept"), "prompt_cache_size": "1MiB"}
    computed = answer()
    assert computed[1] == 0
    assert answer(**kept) == computed
    found, num_cached = answer(**kept)
    assert (found, num_cached >= 16) == (computed[0], True)
    assert answer(**kept, kv_dtype="int8")[1] == 0  # another identity
    assert len(list((tmp_path / "kept").iterdir())) == 2
    for wrong in ({"prompt_cache_size": "big"}, {"prompt_cache_dir": ""}, {"prompt_cache_private": 1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            answer(**wrong)


_OTHER_ENGINE = """
import itertools, json, sys
import octavo.loader.mapped_file
from octavo import LLM, SamplingParams
octavo.loader.mapped_file._RACY_NS = 0
model, options = sys.argv[1], json.loads(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
with LLM(model, **options) as llm:
    for i in itertools.count():
        [output] = llm.generate([[i % 90 + 5, *range(20, 60)]], params, use_tqdm=False)
        llm._session.model().engine._kv_cache.tier._store.flush()
        print(json.dumps(output.outputs[0].token_ids), flush=True)
"""


@pytest.mark.usefixtures("keeps_prompts")
def test_two_engines_in_two_processes_share_a_folder(tmp_path: Path) -> None:
    """One answers prompt after prompt, and writes them; the other one finds them meanwhile."""
    model, params = str(save_decoder(tmp_path / "model")), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    sizes = {"max_model_len": 96, "max_num_seqs": 2, "num_threads": 1, "kv_cache_memory": 1 << 20}
    options = {"prompt_cache_dir": str(tmp_path / "kept"), **sizes}
    command = [sys.executable, "-c", _OTHER_ENGINE, model, json.dumps(options)]
    with LLM(model, **options) as llm, subprocess.Popen(command, stdout=subprocess.PIPE) as other:  # type: ignore[arg-type]
        assert other.stdout is not None
        try:
            for i in range(3):
                expected = json.loads(other.stdout.readline())
                llm._session.model().engine._kv_cache.tier._store.refresh()  # type: ignore[union-attr]
                [output] = llm.generate([[i + 5, *range(20, 60)]], params)
                assert output.metrics is not None
                assert (output.outputs[0].token_ids, output.metrics.num_loaded_tokens) == (expected, 32)
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("save", [save_decoder, save_hybrid])
@pytest.mark.parametrize("options", PARTS, ids=str)
def test_parts_of_a_model_keep_their_parts_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], save: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    model, params = save(tmp_path / "model"), SamplingParams(temperature=0, max_tokens=1)
    sizes = {"max_model_len": 96, "max_num_seqs": 2, "num_threads": 1, "kv_cache_memory": 1 << 20}
    answers = []
    for _ in range(2):
        with LLM(str(model), prompt_cache_dir=str(tmp_path / "kept"), **sizes, **options) as llm:  # type: ignore[arg-type]
            [output] = llm.generate("one two three four five six seven", params)
            answers.append((output.outputs[0].token_ids, output.num_cached_tokens))
    (first, before), (second, after) = answers
    assert (first, before) == (second, 0)
    assert after >= 16
