"""Sizes before loading: what the backend will take, for every stored type, in plans and at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Qwen2Config

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu import _native
from octavo.backends.memory import MemoryBudget
from octavo.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.loading.memory_needs import memory_needs
from octavo.engine.loading.model_graph import model_sizes
from octavo.engine.loading.weight_notes import growth_notes
from octavo.errors import InsufficientMemoryError
from octavo.graph.builder import Graph
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DenseWeight, GroupedWeight, Weight
from tests.quantization.test_mixtures import save_tokenizer
from tests.support.processes import octavo_here
from tests.support.quantize import HALF_OFFSETS, random_weight
from tests.support.quantized_checkpoints import integer_case, write

MIB = 1 << 20
LIMITS = ExecutorLimits(16, 2, 16, 64)
TYPES = sorted({*_native.packable_types(), *HALF_OFFSETS} - {"Q8_1"})


def one_matrix(weight: Weight) -> tuple[Graph, dict[str, Weight]]:
    weights = {"head.weight": weight, "embed.weight": DenseWeight(np.ones((16, weight.shape[1]), np.float32))}
    g = Graph({name: w.shape for name, w in weights.items()})
    g.output = g.logits(g.select_rows(g.embedding("embed")), "head")
    return g, weights


@pytest.mark.parametrize("backend", ["cpu", "reference", "torch:cpu"])
@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_takes_what_was_said(type_name: str, backend: str) -> None:
    rng = np.random.default_rng(0)
    plain = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    weight: Weight
    if type_name in plain:
        weight = DenseWeight(rng.integers(0, 100, (48, 256)).astype(plain[type_name]))
    else:
        weight = random_weight(type_name, (48, 256), 0)
    graph, weights = one_matrix(weight)
    sizes = get_backend(backend).sizes(graph, weights, LIMITS)
    executor = get_backend(backend).compile(sizes, weights, LIMITS)
    executor.allocate_cache(1, 16)
    # Only the numbers tell torch that a scale is 480, for which those of the matrix become float16.
    more = 48 * 256 // 16 if (type_name, backend) == ("NVFP4", "torch:cpu") else 0
    assert sizes.weight_bytes + more == executor.weight_bytes
    assert sizes.cache == executor.cache_sizes
    assert sizes.workspace_bytes <= executor.workspace_bytes
    executor.close()
    grown = {t.type_name for t in sizes.grown}
    has_kernel = type_name in (_native.packable_types() if backend == "cpu" else ["F32"])
    if backend != "torch:cpu" or type_name in plain:  # which keeps codes as codes
        assert grown == (set() if has_kernel else {type_name})


@pytest.mark.parametrize("type_name", sorted({*BLOCK_SIZES} - {"Q8_1", "Q8_K", "F64", "I8", "I16", "I32", "I64"}))
def test_every_type_of_gguf_files_has_a_kernel_of_about_its_size(type_name: str) -> None:
    """The types left out are those of activations and whole numbers, which no matrix has."""
    values, num_bytes = BLOCK_SIZES[type_name]
    assert type_name in _native.packable_types()
    assert _native.packed_nbytes(type_name, 4096, 4096) <= 1.3 * 4096 * 4096 // values * num_bytes


def test_canonical_weights_without_a_kernel_are_counted_as_floats() -> None:
    codes, scales = np.zeros((48, 128), np.uint8), np.zeros((48, 16), np.float16)
    graph, weights = one_matrix(GroupedWeight(4, 16, codes, scales, 8))
    (grown,) = get_backend("cpu").sizes(graph, weights, LIMITS).grown
    assert (grown.type_name, grown.packed_as, grown.packed_bytes) == ("I4_16", "F16", 48 * 256 * 2)
    assert grown.factor == pytest.approx(2 / (0.5 + 2 / 16))


@pytest.fixture
def narrow_path(tmp_path: Path) -> Path:
    """A qwen2 most of whose matrices have four-bit codes in groups of 16, for which there is no kernel."""
    config = Qwen2Config(
        vocab_size=96, hidden_size=256, intermediate_size=1024, num_hidden_layers=1, max_position_embeddings=64,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    write(AutoModelForCausalLM.from_config(config), tmp_path, *integer_case(4, 16, packed=True))
    save_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def narrow(narrow_path: Path) -> Iterator[Checkpoint]:
    checkpoint = open_checkpoint(narrow_path)
    yield checkpoint
    checkpoint.close()


def stored_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.weights.info(name).nbytes for name in checkpoint.weights)


def test_a_type_that_grows_is_noted_with_its_factor(narrow: Checkpoint) -> None:
    (note,) = growth_notes(model_sizes(narrow, EngineConfig(), 64))
    assert note.startswith("I4_16 has no kernel of its own: its weights are kept as F16 and take 3.2 times their size")
    assert "1.8 MiB instead of 560.1 KiB" in note


def test_a_plan_counts_packed_weights(narrow: Checkpoint) -> None:
    """With what the file holds it would fit."""
    roomy = memory_needs(narrow, 64, 1, MemoryBudget(1 << 30))
    assert roomy.fits
    assert roomy.weight_bytes > 1.6 * stored_bytes(narrow)
    by_the_file = roomy.total_bytes - roomy.weight_bytes + stored_bytes(narrow)
    tight = memory_needs(narrow, 64, 1, MemoryBudget(256 * MIB + by_the_file))
    assert not tight.fits
    assert tight.from_disk is not None
    assert roomy.from_disk is None
    assert memory_needs(narrow, 64, 1, MemoryBudget(256 * MIB + roomy.total_bytes)).fits


def test_plan_and_show_warn(narrow_path: Path) -> None:
    for command in ("plan", "show"):
        text = octavo_here(command, narrow_path).stdout
        assert "3.2 times their size in the file" in " ".join(text.split())
        (warning,) = json.loads(octavo_here(command, narrow_path, "--json").stdout)["warnings"]
        assert "I4_16" in warning


def test_the_start_refuses_by_packed_weights(
    narrow_path: Path, narrow: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget(stored_bytes(narrow)))
    with pytest.raises(InsufficientMemoryError, match=r"the weights take 2.1 MiB, but only 917.1 KiB of memory"):
        load_engine(EngineConfig(model=str(narrow_path)))


def test_the_start_warns(narrow_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.engine.loading.compile_graph"):
        loaded = load_engine(EngineConfig(model=str(narrow_path), kv_cache_memory="16MiB"))
    checkpoint = open_checkpoint(narrow_path)
    assert loaded.executor.weight_bytes == model_sizes(checkpoint, EngineConfig(), 64).weight_bytes
    checkpoint.close()
    loaded.executor.close()
    assert "I4_16 has no kernel of its own" in caplog.text
    assert "3.2 times" in caplog.text


def test_models_with_kernels_for_all_types_get_no_warning(smollm2_path: Path) -> None:
    assert json.loads(octavo_here("show", smollm2_path, "--json").stdout)["warnings"] == []
