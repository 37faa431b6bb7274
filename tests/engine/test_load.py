"""The size of the KV cache, and the arithmetic of what does not fit."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo import LLM, SamplingParams
from octavo.backends.memory import MemoryBudget
from octavo.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.loading.cache_plan import plan_cache
from octavo.errors import InsufficientMemoryError, OctavoError, UsageError
from octavo.graph.cache import CacheSizes, cache_layout
from tests.support.processes import octavo, octavo_here
from tests.support.tiny_gguf import tiny_gguf

GIB = 2**30
PER_TOKEN = 32 * 1024  # 512 KiB a block of 16
ONE_GROUP = CacheSizes(cache_layout(()), PER_TOKEN, PER_TOKEN)


def test_half_of_the_free_memory_is_taken() -> None:
    plan = plan_cache(EngineConfig(), 8192, ONE_GROUP, 10 * GIB)
    assert plan.max_model_len == 8192
    assert plan.num_blocks == int(4.5 * GIB) // (512 * 1024)


def test_no_more_is_taken_than_can_be_used() -> None:
    plan = plan_cache(EngineConfig(max_num_seqs=2), 1024, ONE_GROUP, 100 * GIB)
    assert plan.num_blocks == 2 * 1024 // 16


def test_one_full_request_may_take_more_than_half_but_leaves_headroom() -> None:
    plan = plan_cache(EngineConfig(), 8192 * 10, ONE_GROUP, 3 * GIB)
    assert plan.num_blocks * 512 * 1024 <= 2.7 * GIB
    assert plan.max_model_len == 81920


def test_a_context_that_does_not_fit_is_reduced_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = plan_cache(EngineConfig(), 131072, ONE_GROUP, 2 * GIB)
    assert plan.max_model_len == plan.num_blocks * 16 < 131072
    (record,) = caplog.records
    assert f"the context is {plan.max_model_len} tokens instead of the model's 131072" in record.getMessage()
    assert "one token takes 32 KiB of cache" in record.getMessage()
    assert record.getMessage().endswith("For the full length, free 2.44 GiB more")  # no option would be taken
    assert plan_cache(EngineConfig(), 131072, ONE_GROUP, int(4.45 * GIB)).max_model_len == 131072


def test_the_advice_of_a_cache_that_is_too_small_works(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = plan_cache(EngineConfig(kv_cache_memory="64MiB"), 8192, ONE_GROUP, 2 * GIB)
    assert plan.max_model_len == 2048
    advice = re.search(r"For the full length, use kv_cache_memory (\w+)$", caplog.text.strip())
    assert advice is not None, caplog.text
    assert plan_cache(EngineConfig(kv_cache_memory=advice[1]), 8192, ONE_GROUP, 2 * GIB).max_model_len == 8192


def test_an_explicit_context_that_does_not_fit_is_an_error_whose_advice_works() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"max_model_len 131072 does not fit: one token") as caught:
        plan_cache(EngineConfig(max_model_len=131072), 131072, ONE_GROUP, 2 * GIB)
    advice = re.search(r"Lower max_model_len to (\d+), or free 2\.44 GiB more", str(caught.value))
    assert advice is not None, caught.value
    fitting = int(advice[1])
    assert plan_cache(EngineConfig(max_model_len=fitting), fitting, ONE_GROUP, 2 * GIB).max_model_len == fitting


def test_explicit_cache_memory_is_taken_exactly() -> None:
    assert plan_cache(EngineConfig(kv_cache_memory="64MiB"), 2048, ONE_GROUP, 10 * GIB).num_blocks == 128
    with pytest.raises(
        InsufficientMemoryError, match=r"kv_cache_memory is 20\.00 GiB, but only 9\.00 GiB of the 10\.00 GiB"
    ):
        plan_cache(EngineConfig(kv_cache_memory="20GiB"), 2048, ONE_GROUP, 10 * GIB)
    with pytest.raises(InsufficientMemoryError, match="lower it to 9216MiB"):
        plan_cache(EngineConfig(kv_cache_memory="20GiB"), 2048, ONE_GROUP, 10 * GIB)
    with pytest.raises(InsufficientMemoryError, match="free some memory or use a smaller model"):
        plan_cache(EngineConfig(kv_cache_memory="20GiB"), 2048, ONE_GROUP, GIB // 5)


def test_where_not_even_a_short_request_fits_the_error_says_how_much_is_missing() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"not even a short .* holds 0 tokens, .* 256 are"):
        plan_cache(EngineConfig(), 8192, ONE_GROUP, 200 * 2**20)


def test_a_tiny_context_of_the_model_itself_is_enough() -> None:
    assert plan_cache(EngineConfig(max_num_seqs=1), 64, ONE_GROUP, 10 * GIB).max_model_len == 64


def test_weights_that_do_not_fit_are_refused_before_they_are_packed(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget(50 * 2**20))
    with pytest.raises(InsufficientMemoryError, match=r"the weights take 9\d\.\d MiB, but only 50\.0 MiB"):
        load_engine(EngineConfig(model=str(smollm2_path)))


def test_a_small_cache_gives_a_small_context_that_is_kept(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path), kv_cache_memory="12MiB") as llm:
        assert 256 <= llm.max_model_len < 1024
        with pytest.raises(UsageError, match=f"the context of {llm.max_model_len} allows"):
            llm.generate([5] * llm.max_model_len)
        (output,) = llm.generate([50] * (llm.max_model_len - 2), SamplingParams(max_tokens=None, ignore_eos=True))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (2, "length")


def test_nothing_is_collected_while_a_model_is_loaded(smollm2_path: Path, tmp_path: Path) -> None:
    during: list[bool] = []
    config = EngineConfig(model=str(smollm2_path), max_model_len=64)
    load_engine(config, lambda *_: during.append(gc.isenabled())).executor.close()
    assert during
    assert not any(during)
    assert gc.isenabled()
    with pytest.raises(OctavoError, match="absent"):
        load_engine(EngineConfig(model=str(tmp_path / "absent.gguf")))
    assert gc.isenabled()


def test_packed_weights_are_kept_and_mapped(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second start takes them from disk; every log-probability is the same to the last bit."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "octavo.backends.kept_files")
    answers = []
    for pack_cache in (False, True, True):
        with LLM(str(smollm2_path), kv_cache_memory="64MiB", pack_cache=pack_cache) as llm:
            params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=5)
            (output,) = llm.generate("The sun is a star, and the moon", params)
            answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs))
    assert answers[0] == answers[1] == answers[2]
    assert caplog.text.count("packed weights kept for the next start") == 1
    assert len([*(tmp_path / "packed").iterdir()]) == 1


def test_the_cache_is_planned_beside_mapped_weights(smollm2_path: Path, tmp_path: Path) -> None:
    """The system would give their pages up for the KV cache, and read them again for every token."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path))
        patch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget(10 * GIB))
        plan = plan_cache
        patch.setattr("octavo.engine.load.plan_cache", lambda *a: seen.append(a[3]) or plan(*a))
        for pack_cache in (False, True):
            load_engine(EngineConfig(model=str(smollm2_path), pack_cache=pack_cache, max_num_seqs=1)).executor.close()
    assert seen[0] == 10 * GIB
    assert 90e6 < seen[0] - seen[1] < 110e6


def test_a_model_that_changed_just_now_is_packed_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "octavo.engine.loading.compile_graph")
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    load_engine(EngineConfig(model=str(path), pack_cache=True, kv_cache_memory="16MiB")).executor.close()
    assert "changed just now" in caplog.text
    assert not (tmp_path / "packed").exists()


def test_the_command_keeps_packed_weights_after_the_answer(smollm2_path: Path, tmp_path: Path) -> None:
    arguments = ("run", smollm2_path, "Hello", "--temperature", "0", "--max-tokens", "5", "--kv-cache-memory", "64MiB")
    environment = {"OCTAVO_CACHE": str(tmp_path)}
    plain = octavo(*arguments, "--no-pack-cache", env=environment)
    assert not (tmp_path / "packed").exists()
    kept = [octavo(*arguments, *option, env=environment) for option in ((), (), ("--pack-cache",))]
    assert plain.returncode == 0
    assert {(run.returncode, run.stdout, run.stderr) for run in kept} == {(0, plain.stdout, plain.stderr)}
    assert len([*(tmp_path / "packed").iterdir()]) == 1
    doctor = octavo("doctor", env=environment).stdout
    assert "packed weights" in doctor
    assert "97.0 MB" in doctor or "92.5 MiB" in doctor


def test_a_program_that_closes_nothing_keeps_packed_weights(smollm2_path: Path, tmp_path: Path) -> None:
    code = f"from octavo import LLM; llm = LLM({str(smollm2_path)!r}, max_model_len=64); llm.generate('Hi')"
    environment = {**os.environ, "OCTAVO_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] == [".packed"]


def test_a_disk_with_little_room_keeps_nothing_unasked(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a tenth of what is free; the oldest files give way, and the answer has no warning."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr("octavo.backends.kept_files.shutil.disk_usage", lambda _: SimpleNamespace(free=900_000_000))
    result = octavo_here("run", smollm2_path, "Hello", "--max-tokens", "2", "--kv-cache-memory", "200MiB")
    assert (result.returncode, result.stderr) == (0, "")
    assert not [*(tmp_path / "packed").glob("*.packed")]


def test_text_alone_imports_nothing_of_images_adapters_and_states(smollm2_path: Path) -> None:
    arguments = ("run", smollm2_path, "Hello", "--max-tokens", "2", "--kv-cache-memory", "64MiB")
    run = octavo(*arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert run.returncode == 0
    imported = set(re.findall(r"^import time: .*\| +([\w.]+)$", run.stderr, re.MULTILINE))
    assert "octavo.engine.engine" in imported
    needless = r"octavo\.(adapters|finetune|media\.(?!settings)|engine\.encoding|models\.towers|loader\.vision$)"
    further = r"octavo\.(graph\.ops\.recurrence|engine\.speculation\.head_drafter|engine\.texts\.chat_images)"
    assert not [name for name in imported if re.match(f"{needless}|{further}", name)]


STATEFUL = CacheSizes(cache_layout(()), PER_TOKEN, PER_TOKEN, state_bytes=16 << 20)


def test_states_take_at_most_half_of_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Two slots for each sequence that may run, as many as fit beside a request of full length."""
    caplog.set_level(logging.WARNING)
    no_drafts = EngineConfig(max_num_seqs=4, speculation="off")
    plan = plan_cache(no_drafts, 1024, STATEFUL, 100 * GIB)
    assert (plan.max_num_seqs, plan.num_states, plan.num_draft_states) == (4, 8, 0)
    assert not caplog.text
    plan = plan_cache(replace(no_drafts, max_num_seqs=64, kv_cache_memory="1GiB"), 1024, STATEFUL, 10 * GIB)
    assert (plan.max_num_seqs, plan.num_states, plan.max_model_len) == (16, 32, 1024)
    assert "at most 16 sequences run at the same time instead of 64: each needs 32.0 MiB for its states" in caplog.text
    assert caplog.text.strip().endswith("To run all of them, use kv_cache_memory 4096MiB")
    caplog.clear()
    assert plan_cache(EngineConfig(kv_cache_memory="4096MiB"), 1024, STATEFUL, 10 * GIB).max_num_seqs == 64
    assert not caplog.text
    blocks = plan.num_blocks * STATEFUL.block_bytes(16)
    assert plan.num_states * STATEFUL.state_bytes + blocks <= GIB
    assert plan_cache(EngineConfig(kv_cache_memory="1GiB"), 1024, ONE_GROUP, 10 * GIB).num_states == 0
    with pytest.raises(InsufficientMemoryError, match=r"the states of a sequence take 32\.0 MiB"):
        plan_cache(EngineConfig(kv_cache_memory="33MiB"), 8192, STATEFUL, 10 * GIB)


def test_states_before_drafts_take_what_sequences_and_a_long_request_leave() -> None:
    """Three for each of four sequences, without fewer sequences or a shorter context."""
    config = EngineConfig(max_num_seqs=8, backend="cpu")
    plan = plan_cache(config, 1024, STATEFUL, 100 * GIB)
    assert (plan.max_num_seqs, plan.num_states, plan.num_draft_states) == (8, 16 + 12, 12)
    request = STATEFUL.sequence_bytes(1024, 16, 1024)
    tight = replace(config, max_num_seqs=1, kv_cache_memory=request + 2 * STATEFUL.state_bytes)
    plan = plan_cache(tight, 1024, STATEFUL, 100 * GIB)
    assert (plan.num_states, plan.num_draft_states, plan.max_model_len) == (2 + 2, 2, 1024)
    assert plan_cache(replace(config, backend="torch:cpu"), 1024, STATEFUL, 100 * GIB).num_draft_states == 0
    assert plan_cache(config, 1024, ONE_GROUP, 100 * GIB).num_draft_states == 0


def test_a_limit_of_addresses_is_one_of_main_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the memory of the device is."""
    (tmp_path / "a.gguf").write_bytes(tiny_gguf())
    monkeypatch.setattr("octavo.engine.load.address_space_limit", lambda: 1 << 40)
    monkeypatch.setattr("octavo.engine.loading.devices.free_memory", lambda _: MemoryBudget(1 << 40))
    monkeypatch.setattr("octavo.engine.load.host_memory", lambda: MemoryBudget(1 << 20))
    with pytest.raises(InsufficientMemoryError, match=r"only 1\.0 MiB of memory is free, but loading needs 192"):
        load_engine(EngineConfig(model=str(tmp_path / "a.gguf"), device="cpu"))
