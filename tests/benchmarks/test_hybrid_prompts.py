"""Prompts of hybrids for measurements: models that are written and read, and speeds for their sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from octavo.backends.cpu import ceilings
from tests.support.text_models import save_tokenizer


def test_a_speed_counts_the_parameters(script: Callable[[str], ModuleType]) -> None:
    benchmark = script("hybrid_prompts")
    plain, hybrid = benchmark.lines({"lfm2": 300, "qwen3": 200}, {"lfm2": 3.0, "qwen3": 1.0})
    assert (plain["model"], plain["ratio"]) == ("qwen3", 1.0)
    assert hybrid["ratio"] == pytest.approx(0.5)  # 1.5 times the work in thrice the time


def test_prompts_of_a_written_hybrid(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = script("hybrid_prompts")
    monkeypatch.setattr(ceilings, "_BEYOND_CACHES", 32 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 6)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    save_tokenizer("modernbert", tokenizer)
    for kind in ("qwen3", "lfm2"):
        benchmark.write(kind, tokenizer, tmp_path / kind, 3, 256)
        assert 0 < benchmark.prompt_seconds(tmp_path / kind, 32, 1) < 60
    # q, k, v and o of two heads of 128 with one kv head, and an MLP of 1,024, in three layers.
    assert benchmark.layer_parameters(tmp_path / "qwen3") == 3 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 1024)
