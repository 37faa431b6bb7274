"""The mixture of experts for measurements: a file that runs, whose experts are chosen evenly, and plausible figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from octavo import LLM, SamplingParams
from octavo.backends.cpu import ceilings
from octavo.loader.checkpoint import open_checkpoint
from tests.support.tiny_gguf import tiny_gguf


def test_a_mixture_is_written_and_measured(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = script("mixture")
    tokenizer, path = tmp_path / "tiny.gguf", tmp_path / "mixture.gguf"
    tokenizer.write_bytes(tiny_gguf())
    sizes = mixture.Sizes(hidden=256, intermediate=2048, layers=2, experts=4, top_k=1)
    mixture.write(str(tokenizer), str(path), sizes)
    assert open_checkpoint(path).weights["layers.1.mlp.experts.down_proj.weight"].shape == (4, 256, 2048)
    with LLM(str(path), max_model_len=64) as llm:
        (output,) = llm.generate("abc", SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0))
        assert len(output.outputs[0].token_ids) == 8

    monkeypatch.setattr(ceilings, "_BEYOND_CACHES", 32 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 6)
    monkeypatch.setattr(mixture, "CONTEXT", 16)
    one, four = mixture.measure(str(path), [1, 4], 2, iterations=4, num_threads=1)
    expert = 3 * 256 * 2048 * 144 / 256 / 1e6
    # Two layers with one expert a row; four rows choose 1 - (3 / 4) ** 4 of four. A tenth is between operations.
    assert four["megabytes"] - one["megabytes"] == pytest.approx(2 * expert * (4 * (1 - 0.75**4) - 1), rel=0.15)
    for line in (one, four):
        assert line["ratio"] == pytest.approx(line["step_ms"] / line["least_ms"])
        assert 0 < line["ratio"] < 1e6
