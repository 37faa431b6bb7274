"""`octavo run --lora`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.errors import UsageError
from tests.adapters.test_engine import save_adapter
from tests.support.processes import octavo_here
from tests.support.text_models import save_decoder


def test_run_with_an_adapter(tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "adapter", 0)
    texts = []
    for more in ([], ["--lora", str(adapter)], ["--lora", f"{adapter}:0"]):
        options = ["--raw", "--json", "--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--num-threads", "1"]
        result = octavo_here("run", model, "the quick", *options, *more)
        assert result.returncode == 0, result.stderr
        texts.append(json.loads(result.stdout)["token_ids"])
    assert texts[0] == texts[2] != texts[1]


def test_paths_with_scales() -> None:
    config = EngineConfig(lora_modules={"a": "x:y", "b": "c:/x:-0.5"})
    assert config.adapters == {"a": ("x:y", 1.0), "b": ("c:/x", -0.5)}
    assert config.takes_adapters
    assert not EngineConfig().takes_adapters
    with pytest.raises(UsageError, match="max_loras"):
        EngineConfig(max_loras=0)
    with pytest.raises(UsageError, match="lora_modules is"):
        EngineConfig(lora_modules={"a": 1})  # type: ignore[dict-item]
