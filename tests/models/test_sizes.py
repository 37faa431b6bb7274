"""A configuration that contradicts the shapes of its weights is refused before any of them is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from tests.support import converted_gguf, tiny_models


@pytest.mark.parametrize(
    ("name", "key", "value", "found"),
    [
        ("llama", "hidden_size", 128, "embed_tokens.weight has 64 columns"),
        ("llama", "vocab_size", 200, "embed_tokens.weight has 96 rows"),
        ("gptj", "n_embd", 128, "embed_tokens.weight has 64 columns"),
        ("mixtral", "num_local_experts", 8, "layers.0.mlp.experts.down_proj.weight has 4 experts"),
        ("deepseek3", "n_routed_experts", 16, "layers.1.mlp.experts.down_proj.weight has 8 experts"),
        ("gemma4-experts", "num_experts", 7, "layers.0.mlp.experts.down_proj.weight has 6 experts"),
    ],
)
def test_config_json(name: str, key: str, value: int, found: str, tmp_path: Path) -> None:
    path = tiny_models.save_safetensors(tiny_models.tiny_model(name), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelLoadError, match=rf"config\.json: {key} is {value}: {found}"):
        open_checkpoint(tmp_path)


def test_a_text_section(tmp_path: Path) -> None:
    path = tiny_models.save_safetensors(tiny_models.tiny_model("gemma3"), tmp_path) / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    open_checkpoint(tmp_path).close()
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text | {"hidden_size": 96}}))
    with pytest.raises(ModelLoadError, match=r"text_config\.hidden_size is 96: embed_tokens"):
        open_checkpoint(tmp_path)


GGUF_KEYS = [("hidden_size", "embedding_length"), ("num_local_experts", "expert_count")]


@pytest.mark.parametrize(("key", "written"), GGUF_KEYS)
def test_gguf(key: str, written: str, tmp_path: Path) -> None:
    model = tiny_models.tiny_model("mixtral")
    setattr(model.config, key, 128)
    path = converted_gguf.save_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=rf"llama\.{written} is 128: .*do not belong together"):
        open_checkpoint(path)


def test_narrow_embeddings_of_opt(tmp_path: Path) -> None:
    open_checkpoint(tiny_models.save_safetensors(tiny_models.tiny_model("opt-post-norm"), tmp_path)).close()
