"""Every encoder against transformers: from safetensors and GGUF, in numpy and on the cpu, alone and among others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.batch import Batch
from octavo.errors import ModelLoadError
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.models import build_graph
from octavo.models._encoder import EncoderConfig
from tests.support.batches import Request, step
from tests.support.tiny_encoders import (
    CONFIGS,
    GGUF_CONFIGS,
    WITHOUT_LABELS,
    expected_states,
    save_gguf,
    save_tensors,
    stored_tensors,
    tiny_encoder,
)

TEXTS = [np.random.default_rng(i).integers(4, 96, n).tolist() for i, n in enumerate((30, 1, 17, 64))]
TYPES = [[0] * 12 + [1] * 18, [0], [0] * 5 + [1] * 12, [0] * 64]
LIMITS = ExecutorLimits(128, 4, 128, 64)
BACKENDS = [("reference", 1e-4), ("cpu", 1e-4), ("torch:cpu", 1e-4)]


@pytest.mark.parametrize(("backend", "tolerance"), BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states(name: str, backend: str, tolerance: float, tmp_path: Path) -> None:
    model = tiny_encoder(name)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    expected = [expected_states(model, text) for text in TEXTS]
    for pooling, wanted in (("cls", [x[0] for x in expected]), ("mean", [x.mean(axis=0) for x in expected])):
        assert_close(vectors(checkpoint, backend, pooling), wanted, tolerance)


@pytest.mark.parametrize(("backend", "tolerance"), BACKENDS)
@pytest.mark.parametrize("name", GGUF_CONFIGS)
def test_gguf(name: str, backend: str, tolerance: float, tmp_path: Path) -> None:
    model = tiny_encoder(name)
    checkpoint = open_checkpoint(save_gguf(model, tmp_path / "model.gguf", "cls"))
    assert isinstance(checkpoint.config, EncoderConfig)
    assert checkpoint.config.pooling == "cls"
    expected = [expected_states(model, text)[0] for text in TEXTS]
    assert_close(vectors(checkpoint, backend), expected, tolerance)


@pytest.mark.parametrize("name", ["bert", "bert-tanh-gelu", "nomic-bert", "roberta", "jina-bert"])
def test_token_types(name: str, tmp_path: Path) -> None:
    model = tiny_encoder(name, **({"type_vocab_size": 2} if name == "roberta" else {}))
    model.save_pretrained(tmp_path)
    expected = [expected_states(model, text, types)[0] for text, types in zip(TEXTS, TYPES, strict=True)]
    for backend in ("reference", "cpu"):
        assert_close(vectors(open_checkpoint(tmp_path), backend, "cls", TYPES), expected, 1e-4)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITHOUT_LABELS])
def test_sequence_classification(name: str, tmp_path: Path) -> None:
    model = tiny_encoder(name, labels=3)
    model.save_pretrained(tmp_path)
    expected = [expected_states(model, text) for text in TEXTS]
    for backend in ("reference", "cpu"):
        assert_close(vectors(open_checkpoint(tmp_path), backend), expected, 1e-4)


def test_gguf_of_a_cross_encoder(tmp_path: Path) -> None:
    model = tiny_encoder("xlm-roberta", labels=1)
    checkpoint = open_checkpoint(save_gguf(model, tmp_path / "model.gguf", "rank"))
    assert_close(vectors(checkpoint, "cpu"), [expected_states(model, text) for text in TEXTS], 1e-4)


@pytest.mark.parametrize("name", ["jina-bert", "jina-bert-code"])
def test_older_gguf_of_jina(name: str, tmp_path: Path) -> None:
    """Converters before June 2025 wrote gate and up apart."""
    model = tiny_encoder(name)
    tensors = {}
    for tensor, array in stored_tensors(model).items():
        halves = np.split(array, 2)
        if tensor.endswith(("gated_layers.weight", "up_gated_layer.weight")):
            gate, up = halves if "gated_layers" in tensor else halves[::-1]
            block = f"blk.{tensor.split('.')[2]}"
            tensors |= {f"{block}.ffn_gate.weight": gate, f"{block}.ffn_up.weight": up}
        else:
            tensors[tensor] = array
    checkpoint = open_checkpoint(save_tensors(model, tensors, tmp_path / "model.gguf", "cls"))
    expected = [expected_states(model, text)[0] for text in TEXTS]
    assert_close(vectors(checkpoint, "cpu"), expected, 1e-4)


def test_dense_layers_in_gguf_files(tmp_path: Path) -> None:
    """EmbeddingGemma's, which the converter takes from the modules of sentence-transformers."""
    model, rng = tiny_encoder("gemma-embedding"), np.random.default_rng(0)
    dense = {"dense_2": rng.normal(0, 0.1, (160, 64)), "dense_3": rng.normal(0, 0.1, (64, 160))}
    tensors = {n: array + n.endswith("norm.weight") for n, array in stored_tensors(model).items()}
    tensors |= {f"{stem}.weight": array.astype(np.float32) for stem, array in dense.items()}
    checkpoint = open_checkpoint(save_tensors(model, tensors, tmp_path / "model.gguf"))
    means = np.array([expected_states(model, text).mean(axis=0) for text in TEXTS])
    for backend, tolerance in BACKENDS:
        assert_close(vectors(checkpoint, backend), list(means @ dense["dense_2"].T @ dense["dense_3"].T), tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_is_the_same_alone_and_among_others(name: str, tmp_path: Path) -> None:
    tiny_encoder(name).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    together = vectors(checkpoint, "cpu", "mean")
    for text, expected in zip(TEXTS, together, strict=True):
        (alone,) = vectors(checkpoint, "cpu", "mean", texts=[text])
        np.testing.assert_array_equal(alone, expected)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "hidden_act", "mish"),
        ("bert", "num_attention_heads", 5),
        ("xlm-roberta", "max_position_embeddings", 2),
        ("modernbert", "layer_types", ["linear_attention"] * 4),
        ("modernbert", "classifier_pooling", "max"),
        ("modernbert", "hidden_activation", "relu"),
        ("modernbert", "local_attention", 1),
        ("nomic-bert", "hidden_act", "gelu"),
        ("nomic-bert", "head_dim", 8),
        ("nomic-bert", "num_attention_heads", 64),
        ("xlm-roberta", "position_embedding_type", "alibi"),
        ("mpnet", "relative_attention_num_buckets", 16),
        ("deberta-v3", "conv_kernel_size", 3),
        ("deberta-v3", "relative_attention", False),
        ("deberta-v3", "pos_att_type", ["p2p"]),
        ("deberta-v3", "embedding_size", 32),
        ("deberta-v3", "position_buckets", 200),
        ("deberta-v3", "pooler_hidden_act", "mish"),
        ("jina-bert", "feed_forward_type", "swiglu"),
        ("jina-bert", "is_decoder", True),
        ("gemma-embedding", "architectures", ["Gemma3TextForSequenceClassification"]),
        ("gemma-embedding", "attn_logit_softcapping", 50.0),
        ("gemma-embedding", "hidden_activation", "gelu"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(name: str, key: str, value: object, tmp_path: Path) -> None:
    import json

    tiny_encoder(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(tmp_path)


def test_the_older_configuration_of_nomic(tmp_path: Path) -> None:
    import json

    model = tiny_encoder("nomic-bert")
    model.save_pretrained(tmp_path)
    older = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_inner": 96, "n_positions": 64, "layer_norm_epsilon": 1e-12}
    older |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "activation_function": "swiglu", "prenorm": False}
    config = {"model_type": "nomic_bert", "vocab_size": 96, **older}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = [expected_states(model, text)[0] for text in TEXTS]
    assert_close(vectors(open_checkpoint(tmp_path), "cpu", "cls"), expected, 1e-4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"prenorm": True}))
    with pytest.raises(ModelLoadError, match="prenorm is True: must be False"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_older_names_of_norms(name: str, tmp_path: Path) -> None:
    """`gamma` and `beta`, as bert-base-uncased has them: transformers reads the same file."""
    tiny_encoder(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for tensor_name, tensor in load_file(file).items():
        norm = ".".join(tensor_name.split(".")[-2:])
        tensors[tensor_name.removesuffix(norm) + older.get(norm, norm)] = tensor
    assert sum(tensor_name.endswith(("gamma", "beta")) for tensor_name in tensors) == 14
    save_file(tensors, file, metadata={"format": "pt"})
    expected = [expected_states(AutoModel.from_pretrained(tmp_path).eval(), text)[0] for text in TEXTS]
    assert_close(vectors(open_checkpoint(tmp_path), "cpu", "cls"), expected, 1e-4)


def vectors(
    checkpoint: Checkpoint,
    backend: str,
    pooling: str | None = None,
    types: list[list[int]] | None = None,
    texts: list[list[int]] | None = None,
) -> NDArray[np.float32]:
    """One row a text. pooling: in place of that of the checkpoint."""
    texts = TEXTS if texts is None else texts
    config = checkpoint.config if pooling is None else replace(checkpoint.config, pooling=pooling)  # type: ignore[call-arg]
    assert isinstance(config, EncoderConfig)
    graph = optimize(build_graph(checkpoint.architecture, config, checkpoint.weights.shapes), PASSES)
    assert graph.takes_whole_texts
    assert not graph.generates
    assert not graph.kv_caches
    executor = get_backend(backend).compile(graph, checkpoint.weights, LIMITS)
    executor.allocate_cache(32, 16)
    batch: Batch = step([(Request(text, [0, 1, 2, 3]), len(text)) for text in texts], block_size=16)
    if config.pooling == "cls":
        batch.hidden_indices = np.ascontiguousarray(batch.query_start_loc[:-1])
    else:
        batch.hidden_indices = batch.query_start_loc[1:] - np.int32(1)
    batch.return_logits, batch.logits_indices = False, np.zeros(0, np.int32)
    batch.token_types = None if types is None else np.array([kind for each in types for kind in each], np.int32)
    output = executor.submit(batch).wait()
    executor.close()
    assert output.hidden_states is not None
    return output.hidden_states


def assert_close(
    actual: NDArray[np.float32], expected: list[NDArray[np.float32]] | list[torch.Tensor], tolerance: float
) -> None:
    """The largest error relative to the largest number."""
    wanted = np.array(expected)
    assert wanted.std() > 0.1
    assert np.abs(actual - wanted).max() < tolerance * np.abs(wanted).max()
