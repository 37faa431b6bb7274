"""Heads that predict a further token, against transformers' layers: from safetensors and GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, reference
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.loader.gguf_writer import OutputTensor, typed_metadata, write_gguf
from octavo.models import build_draft_graph
from tests.support import converted_gguf
from tests.support.batches import Request, step
from tests.support.tiny_heads import HEADS, TinyHead, tiny_head

TOKENS = np.random.default_rng(0).integers(0, 96, 20).tolist()


def head_logits(checkpoint: Checkpoint, hidden: NDArray[np.float32]) -> NDArray[np.floating]:
    """Of a sequence in two steps."""
    graph = build_draft_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    assert graph is not None
    executor = reference.compile(graph, checkpoint.weights, ExecutorLimits(64, 4, 64, 64), dtype="float64")
    executor.allocate_cache(8, 4)
    request, found = Request(TOKENS, [5, 0, 1, 3, 2]), []
    for begin, end in ((0, 13), (13, len(TOKENS))):
        batch = step([(request, end - begin)])
        batch.inputs = (hidden[begin:end],)
        logits = executor.submit(batch).wait().logits
        assert logits is not None
        found.append(logits)
    return np.concatenate(found)


def check(head: TinyHead, checkpoint: Checkpoint) -> None:
    hidden = np.random.default_rng(1).normal(size=(len(TOKENS), head.model.config.hidden_size)).astype(np.float32)
    assert checkpoint.config.num_layers == head.num_layers
    np.testing.assert_allclose(head_logits(checkpoint, hidden), head.logits(TOKENS, hidden), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", HEADS)
def test_safetensors(name: str, tmp_path: Path) -> None:
    head = tiny_head(name)
    check(head, open_checkpoint(head.save(tmp_path)))


@pytest.mark.parametrize("name", ["glm4moe", "qwen3next", "qwen35"])
def test_gguf(name: str, tmp_path: Path) -> None:
    """Blocks count those of heads, whose own tensors are called nextn; norms are stored as they are applied."""
    head = tiny_head(name)
    file = open_gguf(converted_gguf.save_gguf(head.model, tmp_path / "model.gguf"))
    names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm"}
    tensors = [OutputTensor(n, t.type_name, t.shape, lambda n=n: [file.array(n)]) for n, t in file.tensors.items()]  # type: ignore[misc]
    for part, own in names.items():
        array = head.parts[part] + (part != "eh_proj" and name.startswith("qwen"))
        stored = np.ascontiguousarray(array, np.float32)
        full = f"blk.{head.num_layers}.nextn.{own}.weight"
        tensors.append(OutputTensor(full, "F32", stored.shape, lambda stored=stored: [stored]))  # type: ignore[misc]
    architecture = file.metadata["general.architecture"]
    metadata = {**file.metadata, f"{architecture}.nextn_predict_layers": 1}
    types = {**file.number_types, f"{architecture}.nextn_predict_layers": "uint32"}
    write_gguf(tmp_path / "head.gguf", typed_metadata(metadata, types), tensors)
    check(head, open_checkpoint(tmp_path / "head.gguf"))


def test_a_model_without_a_head(tmp_path: Path) -> None:
    head = tiny_head("glm4moe")
    checkpoint = open_checkpoint(TinyHead(head.name, head.model, {}).save(tmp_path))
    assert build_draft_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes) is None
