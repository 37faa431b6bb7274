"""Encoders in the layouts of their authors: GTE, and Jina Embeddings v3 with its adapters of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from octavo import LLM, LoRARequest
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from tests.models.test_encoders import TEXTS, assert_close, vectors
from tests.support.text_models import TEXTS as WORDS
from tests.support.text_models import save_tokenizer
from tests.support.tiny_encoders import expected_states, stored_tensors, tiny_encoder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "hidden_act": "gelu",
}
TASKS = ["retrieval.query", "retrieval.passage", "separation"]
RANK, ALPHA = 3, 2.0


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def gte_config(**more: Any) -> dict[str, Any]:
    config = {"model_type": "new", "position_embedding_type": "rope", "type_vocab_size": 1, "layer_norm_eps": 1e-12}
    return {**SIZES, **config, "layer_norm_type": "layer_norm", "logn_attention_scale": False, **more}


def test_gte_of_its_authors(tmp_path: Path) -> None:
    """NTK scaling by 8 enlarges the base by 8 and divides all frequencies by 8^(2 / head_dim)."""
    scaled = {"rope_type": "linear", "rope_theta": 4000.0, "factor": 8 ** (2 / 16)}
    model = tiny_encoder("gte", rope_parameters=scaled)
    tensors = {f"new.{name}": x for name, x in stored_tensors(model).items()}
    assert "new.encoder.layer.2.mlp.up_gate_proj.weight" in tensors
    config = gte_config(rope_theta=500.0, rope_scaling={"type": "ntk", "factor": 8.0})
    checkpoint = open_checkpoint(save(tmp_path, config, tensors))
    assert checkpoint.architecture == "gte"
    expected = [expected_states(model, text)[0] for text in TEXTS]
    assert_close(vectors(checkpoint, "cpu", "cls"), expected, 1e-4)


@pytest.mark.parametrize("name", ["gte", "jina-v3"])
def test_names_of_transformers(name: str, tmp_path: Path) -> None:
    """Those of its modules, not of the files that it saves."""
    model = tiny_encoder(name)
    config = {**model.config.to_dict(), "dtype": "float32"}
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    assert "layers.2.post_mlp_layernorm.weight" in tensors
    expected = [expected_states(model, text)[0] for text in TEXTS]
    assert_close(vectors(open_checkpoint(save(tmp_path, config, tensors)), "cpu", "cls"), expected, 1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_embedding_type", "absolute"),
        ("layer_norm_type", "rms_norm"),
        ("logn_attention_scale", True),
        ("rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}),
        ("rope_scaling", {"type": "ntk", "factor": -2.0}),
    ],
)
def test_what_gte_does_not_support_is_refused_by_its_key(key: str, value: object, tmp_path: Path) -> None:
    name = key if not isinstance(value, dict) else "mixed_b" if "mixed_b" in value else "factor"
    with pytest.raises(ModelLoadError, match=name):
        open_checkpoint(save(tmp_path, gte_config(**{key: value}), {"x": np.zeros(1, np.float32)}))


def jina_checkpoint(folder: Path) -> tuple[Path, PreTrainedModel]:
    """The authors' layout with low-rank products for tasks beside every matrix, and the model without them."""
    model, rng = tiny_encoder("jina-v3", type_vocab_size=1), np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, array in stored_tensors(model).items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or array.ndim != 2:
            tensors[f"roberta.{name}"] = array
            continue
        out, width = array.shape
        shapes = ((width, RANK), (RANK, out)) if "mbeddings" not in name else ((RANK, out), (width, RANK))
        tensors[f"roberta.{stem}.parametrizations.weight.original"] = array
        for factor, shape in zip("AB", shapes, strict=True):
            random = rng.normal(0, 0.3, (len(TASKS), *shape[::-1])).astype(np.float32)
            tensors[f"roberta.{stem}.parametrizations.weight.0.lora_{factor}"] = random
    config = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 300.0}
    config |= {"lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA, "layer_norm_eps": 1e-12}
    save(folder, {**SIZES, **config, "type_vocab_size": 1}, tensors)
    save_tokenizer("xlm-roberta", folder)
    return folder, model


def with_task(model: PreTrainedModel, folder: Path, task: int) -> PreTrainedModel:
    """The model whose matrices have the products of a task in them, as transformers reads the authors' names."""
    stored, merged = load_file(folder / "model.safetensors"), {}
    for name, array in stored.items():
        if name.endswith(".original"):
            stem = name.removesuffix("original")
            a, b = (stored[f"{stem}0.lora_{factor}"][task] for factor in "AB")
            change = (a @ b if "mbeddings" in name else b @ a) * np.float32(ALPHA / RANK)
            merged[name.replace(".parametrizations.weight.original", ".weight")] = array + change
        elif ".lora_" not in name:
            merged[name] = array
    model.config.save_pretrained(folder / "merged")
    save_file(merged, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    return AutoModel.from_pretrained(folder / "merged", dtype=torch.float32, attn_implementation="eager").eval()


def test_jina_embeddings_v3_of_its_authors(tmp_path: Path) -> None:
    folder, model = jina_checkpoint(tmp_path)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.architecture == "jina_embeddings_v3"
    expected = [expected_states(model, text).mean(axis=0) for text in TEXTS]
    assert_close(vectors(checkpoint, "cpu", "mean"), expected, 1e-4)


def test_tasks_of_jina_embeddings_v3_are_adapters(tmp_path: Path) -> None:
    """One of each task in one batch: the weights with its products, those of the token type included."""
    folder, model = jina_checkpoint(tmp_path)
    requests = [LoRARequest(task, i + 1, str(folder)) for i, task in enumerate(TASKS)]
    with LLM(str(folder), enable_lora=True, max_loras=3, num_threads=1) as llm:
        outputs = llm.embed([WORDS[0]] * 3, lora_request=requests)
        for i, output in enumerate(outputs):
            expected = expected_states(with_task(model, folder, i), output.prompt_token_ids).mean(axis=0)
            found = np.array(output.outputs.embedding)
            # Factors of adapters are bfloat16.
            assert np.abs(found - expected).max() < 1.5e-2 * np.abs(expected).max()
        [plain] = llm.embed(WORDS[0])
        assert np.abs(np.array(plain.outputs.embedding) - np.array(outputs[0].outputs.embedding)).max() > 0.05
        with pytest.raises(
            ModelLoadError, match=r"no task 'fly'; the adapter's name must be one of retrieval\.query, "
        ):
            llm.embed("x", lora_request=LoRARequest("fly", 9, str(folder)))
