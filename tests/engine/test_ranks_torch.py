"""Ranks on torch tensors, which exchange values over torch.distributed: the answers of one rank of the CPU backend."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
from octavo.outputs import RejectedPromptsError, RequestOutput
from tests.engine.test_ranks import OPTIONS, children, generate_for_ever
from tests.support.engine_answers import PROMPTS
from tests.support.text_models import save_decoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_the_answers_of_one_rank(model: str, tensor: int, pipeline: int) -> None:
    found = []
    for options in ({}, {"backend": "torch:cpu", "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}):
        with LLM(model, kv_cache_memory=256 << 10, **OPTIONS, **options) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert found[1] == found[0]
    assert not children()


def test_a_request_without_an_outcome_ends_alone(model: str) -> None:
    """The ranks sample together: each finds that no token is allowed, and only the first one says so."""
    good = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    bad = SamplingParams(temperature=0, max_tokens=4, min_tokens=2, stop_token_ids=[3], allowed_token_ids=[3])
    with LLM(model, backend="torch:cpu", tensor_parallel_size=2, **OPTIONS) as llm:
        with pytest.raises(RejectedPromptsError, match="no token may be chosen") as raised:
            llm.generate(PROMPTS[:2], [good, bad])
        answer = raised.value.outputs[0]
        assert isinstance(answer, RequestOutput)
        assert len(answer.outputs[0].token_ids) == 20
        assert llm.generate(PROMPTS[:1], good)[0].outputs[0].token_ids == answer.outputs[0].token_ids


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_ends_all_requests(
    model: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with LLM(model, backend="torch:cpu", tensor_parallel_size=2, **OPTIONS) as llm:
        (rank,) = children()
        running = llm.stream(PROMPTS[0], GREEDY)
        next(running)
        hit_at = time.monotonic()
        os.kill(rank, number)
        with pytest.raises(EngineDeadError, match="rank"):
            generate_for_ever(llm, GREEDY)
        assert time.monotonic() - hit_at < 20
    assert not children()
    assert not [*tmp_path.iterdir()]  # where the ranks have found each other
