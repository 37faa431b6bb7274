"""Ranks and stages of models in every format: the logits of the whole, and no more of the file than their share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.parameters import weight_of
from octavo.backends.quantizers import quantize, quantizer_types
from octavo.engine.loading.model_graph import model_graph
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.rowwise import GatedActivation
from octavo.loader.checkpoint import open_checkpoint
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DenseWeight, GGMLWeight, Weight
from tests.graph.test_shard import assert_same, logits_of, ranks_of
from tests.support.quantize import random_weight
from tests.support.quantized_checkpoints import CASES, SLOWER, Packer, tiny_model, write

STAGES = [range(1), range(1, 2)]
GGML = [name for name, (values, _) in BLOCK_SIZES.items() if values > 1]
TERNARY = {"TQ1_0", "TQ2_0"}
FAST_GGML = {"Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ2_XXS", "IQ4_XS", "MXFP4"}
FAST_CASES = {"gptq-4", "gptq-4-act-order", "awq-64", "nf4-nested", "llm-int8", "fp8-block", "w8a8", "mxfp4", "hqq-4"}


def assert_ranks_and_stages_agree(graph: Graph, weights: Mapping[str, Weight], dtype: str) -> None:
    """TP1 = TP2 = TP3 = PP2 = TP2 x PP2."""
    whole = logits_of(graph, weights, 1, dtype=dtype)
    for size, stages in ((2, None), (3, None), (1, STAGES), (2, STAGES)):
        assert_same(logits_of(graph, weights, size, stages, dtype), whole)


HIDDEN, INNER, HEAD_DIM, VOCAB = 256, 768, 64, 96


def weight(type_name: str, shape: tuple[int, int], seed: int) -> GGMLWeight:
    """Of normally distributed numbers, or of three; of random blocks where there is no quantizer."""
    if type_name not in quantizer_types():
        return random_weight(type_name, shape, seed)
    rng, deviation = np.random.default_rng(seed), shape[1] ** -0.5
    values = rng.integers(-1, 2, shape) * deviation if type_name in TERNARY else rng.normal(0, deviation, shape)
    return GGMLWeight.from_bytes(type_name, quantize(type_name, values.astype(np.float32)).ravel(), shape)


def two_layers(type_name: str) -> tuple[Graph, dict[str, Weight]]:
    """Of a Llama, with weights of one type; the down projection has three of a K-quant's 256 columns."""
    shapes = {"q": (HIDDEN, HIDDEN), "k": (128, HIDDEN), "v": (128, HIDDEN), "o": (HIDDEN, HIDDEN)}
    shapes |= {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    weights: dict[str, Weight] = {}
    for seed, name in enumerate(("embed", "head")):
        values = np.random.default_rng(seed).normal(0, HIDDEN**-0.5, (VOCAB, HIDDEN))
        weights[f"{name}.weight"] = DenseWeight(values.astype(np.float32))
    for layer in range(2):
        for seed, (name, shape) in enumerate(shapes.items()):
            weights[f"layers.{layer}.{name}.weight"] = weight(type_name, shape, 10 * layer + seed)
    weights["norm.weight"] = DenseWeight(np.ones(HIDDEN, np.float32))
    g = Graph({name: weight.shape for name, weight in weights.items()})
    x = g.embedding("embed")
    for layer in range(2):
        p = f"layers.{layer}."
        h = g.rms_norm(x, "norm", 1e-5)
        q, k, v = (g.linear(h, p + name) for name in "qkv")
        # Products of random blocks are large: what each adds is brought to the size of the residual.
        out = g.linear(g.attention(q, k, v, AttentionParams(layer, 4, 2, HEAD_DIM, 0.1)), p + "o")
        x = x + g.rms_norm(out, "norm", 1e-5)
        h = g.rms_norm(x, "norm", 1e-5)
        out = g.linear(g.add(GatedActivation(g.linear(h, p + "gate"), g.linear(h, p + "up"), "silu")), p + "down")
        x = x + g.rms_norm(out, "norm", 1e-5)
    g.output = g.logits(g.select_rows(g.rms_norm(x, "norm", 1e-5)), "head")
    return g, weights


def with_slow(names: Iterable[str], fast: set[str]) -> list[object]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("type_name", with_slow(GGML, FAST_GGML))
def test_types_of_gguf(type_name: str) -> None:
    graph, weights = two_layers(type_name)
    # Random blocks make attention choose sharply, where float32 is not exact to 1e-5 in one process either.
    assert_ranks_and_stages_agree(graph, weights, "float32" if type_name in quantizer_types() else "float64")


LAYOUTS: dict[str, tuple[dict[str, object], Packer]] = {
    **CASES,
    **{name: (config, packer) for name, (config, packer, _, _) in SLOWER.items()},
}


@pytest.mark.parametrize("name", with_slow(LAYOUTS, FAST_CASES))
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    """GPTQ, AWQ, bitsandbytes, compressed-tensors, float8, MXFP4, NVFP4 and HQQ, as their files are."""
    quantized = write(tiny_model(256, 768, 8, 4), tmp_path, *LAYOUTS[name])
    checkpoint = open_checkpoint(tmp_path)
    graph = model_graph(checkpoint, 64)
    assert {p.name for p in graph.parameters} >= quantized
    assert_ranks_and_stages_agree(graph, checkpoint.weights, "float32")
    assert_shares(checkpoint.weights, graph, 2 if name != "fp4-long-blocks" else 1)
    checkpoint.close()


def assert_shares(weights: Mapping[str, Weight], graph: Graph, size: int) -> None:
    """The matrices of a rank are at most 1.05 of its share. size: 1: blocks are longer than the parts of a row."""
    total = sum(weight_of(weights, p).nbytes for p in graph.parameters)
    vectors = sum(weight_of(weights, p).nbytes for p in graph.parameters if not p.is_matrix)
    for rank_graph in ranks_of(graph, weights, size):
        held = sum(weight_of(weights, p).nbytes for p in rank_graph.parameters)
        assert held - vectors <= 1.05 * (total - vectors) / size


def test_a_rank_of_a_gguf_file_has_its_share(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert_shares(checkpoint.weights, model_graph(checkpoint, 64), 3)  # it has three heads of keys
    checkpoint.close()
