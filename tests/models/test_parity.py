"""Every architecture against transformers: from safetensors and GGUF in the reference backend, and on the cpu."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.loader.gguf_writer import OutputTensor, typed_metadata, write_gguf
from octavo.models import build_graph
from tests.support import converted_gguf, tiny_models
from tests.support.batches import Request, step

TOKENS = np.random.default_rng(0).integers(0, 96, 30).tolist()
# Divisors of frequencies, rounded to float32 in GGUF files only.
ROPE_TENSORS = (
    "llama-llama3-rope",
    "phi3-longrope",
    "llama4",
    "step35",
    "hunyuan-dense-alpha",
    "apertus",
    "apertus-biased",
)
# Value heads are in another order, and with them the columns of a projection: sums are added up in another order. Or
# the converter multiplies factors into the weights.
REORDERED = ("qwen35", "qwen35moe", "falcon-h1", "falcon-h1-normed")
LIMITS = ExecutorLimits(64, 4, 64, 64)


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_safetensors(name: str, tmp_path: Path) -> None:
    model = tiny_models.tiny_model(name)
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path))
    assert_close(logits_of(checkpoint), tiny_models.expected_logits(model, TOKENS))


@pytest.mark.parametrize("name", tiny_models.GGUF_CONFIGS)
def test_gguf(name: str, tmp_path: Path) -> None:
    model = tiny_models.tiny_model(name)
    checkpoint = open_checkpoint(converted_gguf.save_gguf(model, tmp_path / "model.gguf"))
    assert_close(logits_of(checkpoint), tiny_models.expected_logits(model, TOKENS))


def test_older_files_of_mixtral(tmp_path: Path) -> None:
    """One tensor an expert, as before April 2024, gives the same bits as the stacks of today."""
    model = tiny_models.tiny_model("mixtral")
    path = converted_gguf.save_gguf(model, tmp_path / "stacked.gguf")
    file = open_gguf(path)
    tensors = []
    for name, info in file.tensors.items():
        data, (stem, is_stack, _) = file.array(name), name.partition("_exps")
        for i, part in enumerate(np.split(data, info.shape[0]) if is_stack else [data]):
            own = f"{stem}.{i}.weight" if is_stack else name
            shape = info.shape[1:] if is_stack else info.shape
            tensors.append(OutputTensor(own, info.type_name, shape, lambda part=part: [part]))  # type: ignore[misc]
    write_gguf(tmp_path / "old.gguf", typed_metadata(file.metadata, file.number_types), tensors)
    old = open_checkpoint(tmp_path / "old.gguf")
    assert "blk.0.ffn_gate.3.weight" in old.file.tensors
    np.testing.assert_array_equal(logits_of(old, "cpu"), logits_of(open_checkpoint(path), "cpu"))


@pytest.mark.parametrize("kv_b", ["joined", "both"])
@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_older_files_of_deepseek(name: str, kv_b: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`attn_kv_b`, as before the latent form of attention, gives the same bits as `attn_k_b` and `attn_v_b`."""
    model = tiny_models.tiny_model(name)
    logits = {}
    for form in ("split", kv_b):
        path = converted_gguf.save_gguf(model, tmp_path / f"{form}.gguf", form)
        tensors = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
        assert ("blk.0.attn_kv_b.weight" in tensors, "blk.0.attn_k_b.weight" in tensors) == (
            form != "split",
            form != "joined",
        )
        logits[form] = logits_of(open_checkpoint(path), "cpu")
    np.testing.assert_array_equal(logits[kv_b], logits["split"])
    assert_close(logits["split"], tiny_models.expected_logits(model, TOKENS), 2e-3)
    assert not caplog.records


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_cpu_backend(name: str, tmp_path: Path) -> None:
    """Weights are float32; only the cache rounds, to 16 bits."""
    model = tiny_models.tiny_model(name)
    if name in tiny_models.GGUF_CONFIGS:
        checkpoint = open_checkpoint(converted_gguf.save_gguf(model, tmp_path / "model.gguf"))
    else:
        checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path))
    assert_close(logits_of(checkpoint, "cpu"), tiny_models.expected_logits(model, TOKENS), 2e-3)


@pytest.mark.parametrize("name", [name for name in tiny_models.GGUF_CONFIGS if name not in (*ROPE_TENSORS, *REORDERED)])
def test_both_formats_give_the_same_bits(name: str, tmp_path: Path) -> None:
    """Whatever the converter has changed is changed back."""
    model = tiny_models.tiny_model(name)
    converted = open_checkpoint(converted_gguf.save_gguf(model, tmp_path / "model.gguf"))
    safetensors = open_checkpoint(tiny_models.save_safetensors(model, tmp_path / "directory"))
    for backend in ("reference", "cpu"):
        np.testing.assert_array_equal(logits_of(converted, backend), logits_of(safetensors, backend))


def logits_of(checkpoint: Checkpoint, backend: str = "reference") -> NDArray[np.float32]:
    graph = optimize(build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes), PASSES)
    executor = get_backend(backend).compile(graph, checkpoint.weights, LIMITS)
    num_groups = tiny_models.NUM_CACHE_GROUPS
    executor.allocate_cache(10 * num_groups, 16, 10)
    batch = step([(Request(TOKENS, [9, 2]), len(TOKENS))], block_size=16, num_groups=num_groups)
    output = executor.submit(batch).wait()
    executor.close()
    assert output.logits is not None
    return output.logits


def assert_close(logits: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float = 1e-4) -> None:
    """The largest error relative to the largest logit. Greedy tokens are equal, but for ties within that error."""
    assert logits.std() > 0.1
    allowed = tolerance * np.abs(expected).max()
    assert np.abs(logits - expected).max() < allowed
    chosen = np.take_along_axis(expected, logits.argmax(axis=-1)[:, None], axis=-1)[:, 0]
    assert (expected.max(axis=-1) - chosen).max() < 2 * allowed
