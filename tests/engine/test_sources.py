"""Answers of models with an encoder and a decoder: greedy, by beams, many at once, and after a preemption."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import UsageError
from tests.support.tiny_encoder_decoders import TEXTS, save_encoder_decoder

GREEDY = SamplingParams(max_tokens=24, temperature=0, logprobs=0)
SOURCES = [np.random.default_rng(i).integers(3, 96, n).tolist() for i, n in enumerate((45, 2, 19, 33, 80))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("t5")
    return directory, save_encoder_decoder("t5-silu", directory)


@pytest.fixture(scope="module")
def llm(saved: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(str(saved[0]), max_num_seqs=4, kv_cache_memory="4MiB", num_threads=1, block_size=16) as made:
        yield made


def by_transformers(model: Any, source: list[int], count: int = 24, **options: Any) -> list[int]:
    with torch.no_grad():
        found = model.generate(
            torch.tensor([source]), max_new_tokens=count, do_sample=False, eos_token_id=1, pad_token_id=0, **options
        )
    return found[0, 1:].tolist()


def tokens_of(llm: LLM, sources: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": source} for source in sources], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_greedy_answers_are_those_of_transformers(llm: LLM, saved: tuple[Path, Any]) -> None:
    """More requests than run at once, with sources of all lengths."""
    found = tokens_of(llm, SOURCES * 2)
    expected = [by_transformers(saved[1], source) for source in SOURCES]
    assert found == expected * 2
    assert len({tuple(tokens) for tokens in found}) > 3


def test_beams_are_those_of_transformers(llm: LLM, saved: tuple[Path, Any]) -> None:
    found = tokens_of(llm, SOURCES[:3], BeamSearchParams(beam_width=3, max_tokens=12))
    assert found == [by_transformers(saved[1], source, 12, num_beams=3) for source in SOURCES[:3]]


def test_choices_share_a_source(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3, n=3)
    (output,) = llm.generate([{"prompt_token_ids": SOURCES[0]}], params)
    alone = [tokens_of(llm, [SOURCES[0]], SamplingParams(max_tokens=10, temperature=1.0, seed=3))]
    assert list(output.outputs[0].token_ids) == alone[0][0]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1


def test_a_text_is_the_source_and_ends_with_its_mark(llm: LLM, saved: tuple[Path, Any]) -> None:
    (output,) = llm.generate([TEXTS[0]], GREEDY)
    ids = llm.tokenizer.encode(TEXTS[0])
    assert ids[-1] == 1
    assert list(output.outputs[0].token_ids) == by_transformers(saved[1], ids)
    assert output.prompt_token_ids == ids
    assert output.metrics is not None
    assert output.metrics.num_prompt_tokens == len(ids)


def test_a_cache_too_small_for_all_answers_changes_none(llm: LLM, saved: tuple[Path, Any]) -> None:
    """Some are preempted, and read their source again. All requests are there before the first step."""
    expected, are_there = tokens_of(llm, SOURCES[:4]), threading.Event()
    sizes = llm._session.model().executor.cache_sizes
    few = 13 * sizes.block_bytes(16)
    with LLM(
        str(saved[0]), max_num_seqs=4, kv_cache_memory=few, max_model_len=80, num_threads=1, block_size=16
    ) as small:
        small._session._engine.call(are_there.wait)
        streams = [small.stream({"prompt_token_ids": source}, GREEDY) for source in SOURCES[:4]]
        are_there.set()
        assert [[token for part in stream for token in part.outputs[0].token_ids] for stream in streams] == expected
        assert small.metrics.num_preemptions_total > 0
        pool = small._session.model().engine.admission.kv_cache.pool
        assert pool.num_free_blocks == pool.num_blocks


def test_requests_that_such_a_model_cannot_answer(llm: LLM, saved: tuple[Path, Any]) -> None:
    with pytest.raises(UsageError, match="encoder and a decoder"):
        llm.embed(["a text"])
    with pytest.raises(UsageError, match="log-probabilities"):
        llm.generate(["a text"], SamplingParams(prompt_logprobs=1))
    with pytest.raises(UsageError, match="126"):
        llm.generate([{"prompt_token_ids": [5] * 127}], GREEDY)
    with pytest.raises(UsageError, match="enable_lora is not supported"):
        LLM(str(saved[0]), enable_lora=True)
    with pytest.raises(UsageError, match="tensor_parallel_size"):
        LLM(str(saved[0]), tensor_parallel_size=2)
