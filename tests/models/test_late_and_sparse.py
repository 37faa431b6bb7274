"""Vectors of tokens (ColBERT) and of the vocabulary (SPLADE), judged by transformers and the published formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM

from octavo import LLM, UsageError
from octavo.errors import ModelLoadError
from tests.support.text_models import TEXTS, save_decoder, save_pooling, save_tokenizer
from tests.support.tiny_encoders import CONFIGS, expected_states, tiny_encoder

WIDTH = 24
PROJECTION = np.random.default_rng(3).normal(0, 0.2, (WIDTH, 64)).astype(np.float32)


def save_masked(name: str, folder: Path, **modules: Any) -> Any:
    """A model with the head of the pretraining, and the modules of a sparse encoder."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.25)
            if "norm" in parameter_name.lower() and parameter_name.endswith("weight"):
                parameter += 1.0
    model.save_pretrained(folder)
    save_tokenizer("bert" if name == "distilbert" else name, folder)
    package = "sentence_transformers.sparse_encoder.models."
    kinds = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    listed = [{"idx": i, "path": path, "type": package + kind} for i, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "max", **modules}))
    return model


@pytest.mark.parametrize(
    ("name", "activation", "num_logs"),
    [
        ("bert", "relu", 1),
        ("distilbert", "log1p_relu", 2),
        ("xlm-roberta", "relu", 1),
        ("modernbert", "relu", 1),
    ],
)
def test_sparse_vectors(name: str, activation: str, num_logs: int, tmp_path: Path) -> None:
    """log(1 + relu) of the largest logit of each token of the vocabulary. Scores are products."""
    model = save_masked(name, tmp_path, activation_function=activation)
    with LLM(str(tmp_path), num_threads=1) as llm:
        outputs = llm.embed(TEXTS[:3], use_tqdm=False)
        found = np.array([output.outputs.embedding for output in outputs])
        [score] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    logits = [expected_states(model, output.prompt_token_ids).max(axis=0) for output in outputs]
    expected = np.maximum(np.array(logits), 0)
    for _ in range(num_logs):
        expected = np.log1p(expected)
    assert found.shape == (3, 96)
    assert 0.1 < (expected > 0).mean() < 0.9999
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * expected.max())
    assert score.outputs.score == pytest.approx(float(expected[0] @ expected[1]), rel=1e-3)


@pytest.mark.parametrize(("key", "value"), [("pooling_strategy", "sum"), ("activation_function", "gelu")])
def test_other_poolings_of_sparse_vectors_are_refused(key: str, value: str, tmp_path: Path) -> None:
    save_masked("bert", tmp_path, **{key: value})
    with pytest.raises(ModelLoadError, match=f"{key} is '{value}'"):
        LLM(str(tmp_path))


def save_late(folder: Path, kind: str) -> Any:
    """The layout of ColBERT, with the projection among the tensors, or modules of PyLate or sentence-transformers."""
    model = tiny_encoder("bert")
    model.save_pretrained(folder)
    save_tokenizer("bert", folder)
    if kind == "HF_ColBERT":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["HF_ColBERT"]}))
        tensors = {f"bert.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
        save_file(tensors | {"linear.weight": PROJECTION}, folder / "model.safetensors", metadata={"format": "pt"})
        return model
    package = "pylate.models.Dense." if kind == "pylate" else "sentence_transformers.base.modules."
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", package + "Dense")]
    if kind != "pylate":
        kinds += [("2_Mask", "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask")]
        kinds += [("3_Normalize", "sentence_transformers.models.Normalize")]
    listed = [{"idx": i, "path": path, "type": each} for i, (path, each) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    config = {"in_features": 64, "out_features": WIDTH, "bias": False}
    config |= {"activation_function": "torch.nn.modules.linear.Identity"}
    if kind != "pylate":
        config |= {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": PROJECTION}, folder / "1_Dense" / "model.safetensors")
    return model


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


@pytest.mark.parametrize("kind", ["HF_ColBERT", "pylate", "sentence_transformers"])
def test_vectors_of_tokens(kind: str, tmp_path: Path) -> None:
    """Projected and of length 1; a score is the sum of the largest products of the query's tokens."""
    model = save_late(tmp_path, kind)
    with LLM(str(tmp_path), num_threads=1) as llm:
        outputs = llm.token_embed(TEXTS, use_tqdm=False)
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
        with pytest.raises(UsageError, match=r"a vector for each token, not one for a text; use LLM\.token_embed"):
            llm.embed("x")
    expected = [unit_rows(expected_states(model, each.prompt_token_ids) @ PROJECTION.T) for each in outputs]
    for output, rows in zip(outputs, expected, strict=True):
        assert output.outputs.data.shape == (len(output.prompt_token_ids), WIDTH)
        np.testing.assert_allclose(output.outputs.data, rows, rtol=0, atol=1e-4)
    largest = [(expected[0] @ rows.T).max(axis=1).sum() for rows in expected[1:]]
    np.testing.assert_allclose(scores, largest, rtol=1e-4)


def test_a_decoder_of_late_interaction_needs_no_projection(tmp_path: Path) -> None:
    path = save_decoder(tmp_path)
    package = "sentence_transformers.base.modules."
    listed = [{"idx": i, "path": "", "type": package + kind} for i, kind in enumerate(["Transformer", "Normalize"])]
    listed.append({"idx": 2, "path": "", "type": "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"})
    (path / "modules.json").write_text(json.dumps(listed))
    with LLM(str(path), num_threads=1, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        query, document = (output.outputs.data for output in llm.token_embed(TEXTS[:2], use_tqdm=False))
        [score] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert np.linalg.norm(query, axis=1) == pytest.approx(np.ones(len(query)), abs=1e-5)
    assert score.outputs.score == pytest.approx((query @ document.T).max(axis=1).sum(), rel=1e-4)


def test_a_decoder_has_vectors_of_tokens_and_a_pooling_encoder_has_none(tmp_path: Path) -> None:
    path = save_decoder(tmp_path / "decoder")
    tokens = list(range(20, 60))
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with LLM(str(path), num_threads=1, max_num_batched_tokens=16, max_num_seqs=4) as llm:  # in chunks
        [output] = llm.token_embed([tokens], use_tqdm=False)
    expected = expected_states(model, tokens)
    assert np.abs(output.outputs.data - expected).max() < 5e-3 * np.abs(expected).max()
    tiny_encoder("bert").save_pretrained(tmp_path / "encoder")
    save_tokenizer("bert", tmp_path / "encoder")
    save_pooling(tmp_path / "encoder", "mean")
    with LLM(str(tmp_path / "encoder"), num_threads=1) as llm, pytest.raises(UsageError, match="pools its texts"):
        llm.token_embed("x")
