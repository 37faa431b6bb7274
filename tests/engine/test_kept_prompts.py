"""Engines over a store in files: the bits of computing, after a restart, in several processes and on ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.engine import engine_thread
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.kv.block_tier import BlockRow
from octavo.engine.kv.disk_store import DiskStore
from octavo.errors import UsageError
from tests.engine.test_block_tier import CASES, PARAMS, PARTS, PROMPT, bits, cached, finish, make_engine, run
from tests.engine.test_disk_store import IDENTITY, open_store
from tests.support.fake_executor import create_request
from tests.support.text_models import save_decoder, save_hybrid


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
