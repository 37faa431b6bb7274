"""Quantized weights on torch: the numbers of the canonical weight, bit by bit, and products with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends import ExecutorLimits, get_backend, reference
from octavo.backends.cpu import _native
from octavo.backends.torch.kernels.planes import planes_of
from octavo.backends.torch.quantized import dequantized, matrix_of, product, whole
from octavo.backends.torch.weights import held_type
from octavo.engine.loading.weight_notes import unpacking_notes
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import Routing
from octavo.graph.ops.rowwise import Scale
from octavo.graph.values import Parameter
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import CodebookWeight, DenseWeight, Float8Weight, GGMLWeight, GroupedWeight, Weight
from tests.quantization.test_mixtures import save_tokenizer
from tests.support.batches import Request, step
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight
from tests.support.quantized_checkpoints import integer_case, tiny_model, write

GGML = sorted({*_native.packable_types()} & {*BLOCK_SIZES} - {"F32", "F16", "BF16"})
RNG = np.random.default_rng(0)


def canonical() -> dict[str, Weight]:
    """One of each kind and option."""
    shape, weights = (48, 256), dict[str, Weight]()
    for bits in (2, 3, 4, 5, 6, 8):
        weights[f"I{bits}"] = random_grouped(shape, bits, bits=bits)
    options: tuple[dict[str, Any], ...] = (
        {"mins": "zeros"},
        {"mins": "minima"},
        {"group": None},
        {"dtype": np.float32},
    )
    for option in options:
        weights[f"I4 {option}"] = random_grouped(shape, 1, **option)
    order = RNG.permutation(256).astype(np.int32)
    weights["I4 ordered"] = replace(random_grouped(shape, 2, group=32), column_order=order)
    codes = RNG.integers(0, 256, (48, 128), dtype=np.uint8)
    table = tuple(RNG.standard_normal(16).tolist())
    bits4 = RNG.integers(0, 120, (48, 16), dtype=np.uint8)
    weights["NVFP4"] = CodebookWeight("NVFP4", table, 16, codes, bits4, RNG.random((48, 1)).astype(np.float32))
    weights["NF4"] = CodebookWeight("NF4", table, 64, codes, RNG.random((48, 4)).astype(np.float32))
    bits8 = (RNG.integers(0, 120, shape) | RNG.integers(0, 2, shape) << 7).astype(np.uint8)
    for name, rows, columns, scales in (
        ("ALL", None, None, (1, 1)),
        ("ROW", 1, None, (48, 1)),
        ("BLOCK", 16, 128, (3, 2)),
    ):
        weights[f"F8 {name}"] = Float8Weight("E4M3", bits8, RNG.random(scales).astype(np.float32), rows, columns)
    return weights


@pytest.mark.parametrize("name", GGML)
def test_types_of_ggml_keep_every_bit(name: str) -> None:
    weight = random_weight(name, (48, 256), 0)
    planes = planes_of(weight)
    assert planes is not None
    np.testing.assert_array_equal(whole(planes, torch.float32).numpy(), weight.dequantize())


@pytest.mark.parametrize("special", [None, 0x7F, 0xFF])
def test_scales_of_nvfp4_are_those_of_ggml(special: int | None) -> None:
    """The scale has no sign, 0x7F is zero, and 0xFF is 480, for which E4M3 has no number."""
    data = np.random.default_rng(0).integers(0, 0x7F, (4, 2 * 36), dtype=np.uint8)
    if special is not None:
        data.reshape(-1, 36)[1:6, 2] = special
    planes = planes_of(GGMLWeight("NVFP4", data))
    assert planes is not None
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(whole(planes, torch.float32).numpy(), expected)
    assert planes.scale_bits == ("plain" if special == 0xFF else "e4m3")


@pytest.mark.parametrize("weight", canonical().values(), ids=canonical().keys())
def test_canonical_weights(weight: Weight) -> None:
    planes = planes_of(weight)
    assert planes is not None
    expected = weight.dequantize()
    np.testing.assert_allclose(whole(planes, torch.float32).numpy(), expected, rtol=1e-6, atol=1e-7)
    x = RNG.standard_normal((5, 256)).astype(np.float32)
    np.testing.assert_allclose(product(torch.from_numpy(x), planes).numpy(), x @ expected.T, rtol=0, atol=2e-3)
    rows = torch.tensor([3, 3, 47, 0])
    np.testing.assert_array_equal(
        dequantized(planes, torch.float32, rows).numpy(), dequantized(planes, torch.float32).numpy()[rows]
    )


@pytest.mark.parametrize("weight", canonical().values(), ids=canonical().keys())
def test_what_is_held_is_what_was_said(weight: Weight) -> None:
    weights = {"head.weight": weight, "embed.weight": DenseWeight(np.ones((16, 256), np.float32))}
    g = Graph({name: w.shape for name, w in weights.items()})
    g.output = g.logits(g.select_rows(g.embedding("embed")), "head")
    backend, limits = get_backend("torch:cpu"), ExecutorLimits(16, 2, 16, 64)
    sizes = backend.sizes(g, weights, limits)
    assert sizes.weight_bytes == backend.compile(sizes, weights, limits).weight_bytes
    head = next(held for p, held in sizes.matrices.items() if p.name == "head.weight")
    assert head.packed_as == weight.type_name


def test_products_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    planes = planes_of(random_weight("Q4_K", (48, 256), 0))
    assert planes is not None
    x = torch.randn(3, 256)
    expected = product(x, planes)
    monkeypatch.setattr("octavo.backends.torch.quantized._TILE", 256 * 7)
    torch.testing.assert_close(product(x, planes), expected, rtol=1e-4, atol=1e-3)


def test_one_matrix_of_a_stack() -> None:
    planes = planes_of(random_weight("Q6_K", (3, 32, 256), 0))
    assert planes is not None
    for index in range(3):
        one = whole(matrix_of(planes, index), torch.float32)
        torch.testing.assert_close(one, whole(planes, torch.float32)[index], rtol=0, atol=0)


@pytest.mark.parametrize("type_name", ["Q4_K", "I4_128"])
def test_a_step_with_quantized_weights(type_name: str) -> None:
    """Embedding, head, linears and experts, beside the specification."""

    def random(*shape: int) -> Weight:
        return random_grouped(shape, 5) if type_name == "I4_128" else random_weight(type_name, shape, 5)

    shapes = {"embed": (64, 256), "head": (64, 256), "square": (256, 256)}
    weights = {f"{n}.weight": random(*s) for n, s in shapes.items()}
    weights["moe.gate.weight"] = DenseWeight(RNG.standard_normal((4, 256)).astype(np.float32))
    weights |= {f"moe.experts.{n}_proj.weight": random(4, 256, 256) for n in ("gate", "up", "down")}
    g = Graph({n: w.shape for n, w in weights.items()})
    x = g.embedding("embed")
    x = g.add(Scale(x + g.moe(g.linear(x, "square"), "moe", Routing(2)), 0.1))
    g.output = g.logits(g.select_rows(x), "head")
    limits, found = ExecutorLimits(16, 1, 16, 16), []
    for backend in (get_backend("torch:cpu"), reference):
        executor = backend.compile(g, weights, limits)
        executor.allocate_cache(4, 8)
        found.append(executor.submit(step([(Request(list(range(9)), [0, 1]), 9)], block_size=8)).wait().logits)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5 * np.abs(found[1]).max())


def test_stacks_whose_experts_order_columns_differently_are_held_as_numbers() -> None:
    weight = random_grouped((2, 32, 128), 0)
    order = np.stack([RNG.permutation(128) for _ in range(2)]).astype(np.int32)
    found = GroupedWeight(4, 128, weight.codes, weight.scales, 8, column_order=order)
    assert planes_of(found) is None
    held = held_type({"w": found}, Parameter("w", found.shape), torch.bfloat16)
    assert (held.packed_as, held.packed_bytes) == ("BF16", 2 * 2 * 32 * 128)


def test_rows_of_a_table_whose_columns_have_an_order() -> None:
    order = RNG.permutation(256).astype(np.int32)
    weights: dict[str, Weight] = {"embed.weight": replace(random_grouped((64, 256), 2, group=32), column_order=order)}
    g = Graph({n: w.shape for n, w in weights.items()})
    g.output = g.select_rows(g.embedding("embed"))
    executor = get_backend("torch:cpu").compile(g, weights, ExecutorLimits(16, 1, 16, 16))
    executor.allocate_cache(4, 8)
    found = executor.submit(step([(Request([3, 63, 0], [0]), 3)], block_size=8)).wait()
    assert found.logits is not None
    np.testing.assert_array_equal(found.logits, weights["embed.weight"].dequantize()[[3, 63, 0]])


class TestNotesOfUnpackedWeights:
    """A product without a kernel writes numbers out in each step: that is said at the start, with its cost."""

    LIMITS = ExecutorLimits(16, 1, 16, 16)

    @staticmethod
    def graph() -> tuple[Graph, dict[str, Weight]]:
        shapes = {"embed": (64, 256), "heads": (4, 32, 64), "head": (64, 128)}
        weights: dict[str, Weight] = {f"{n}.weight": random_grouped(s, 5, group=32) for n, s in shapes.items()}
        g = Graph({n: w.shape for n, w in weights.items()})
        g.output = g.logits(g.select_rows(g.head_linear(g.embedding("embed"), "heads")), "head")
        return g, weights

    def test_without_kernels_all_products_but_no_table(self) -> None:
        sizes = get_backend("torch:cpu").sizes(*self.graph(), self.LIMITS)
        (found,) = sizes.unpacked
        assert (found.type_name, found.unpacked_bytes) == ("I4_32", 4 * (4 * 32 * 64 + 64 * 128))
        (note,) = unpacking_notes(sizes)
        assert note == (
            "I4_32 has no kernel here: its weights stay quantized in memory, and each step dequantizes them tile by "
            "tile. It reads 13.0 KiB of codes, and writes and reads 64.0 KiB of floats: 11 times what a kernel would "
            "read"
        )

    def test_with_kernels_the_products_of_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from octavo.backends.torch import compile as compile_module

        class Kernels:
            angles_bytes = staticmethod(lambda _graph, _limits: 0)

        monkeypatch.setattr(compile_module, "triton_calls", lambda _: Kernels)
        sizes = get_backend("torch:cpu").sizes(*self.graph(), self.LIMITS)
        assert [t.unpacked_bytes for t in sizes.unpacked] == [4 * 4 * 32 * 64]
        assert not get_backend("cpu").sizes(*TestNotesOfUnpackedWeights.dense(), self.LIMITS).unpacked

    @staticmethod
    def dense() -> tuple[Graph, dict[str, Weight]]:
        graph, weights = TestNotesOfUnpackedWeights.graph()
        return graph, {n: DenseWeight(w.dequantize()) for n, w in weights.items()}

    def test_it_is_said_once_at_the_start(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        write(tiny_model(), tmp_path, *integer_case(4, 64, packed=True))
        save_tokenizer(tmp_path)
        with LLM(str(tmp_path), backend="torch:cpu", max_model_len=32) as llm:
            llm.generate(["a b c"], SamplingParams(max_tokens=2))
        assert sum("has no kernel here" in record.getMessage() for record in caplog.records) == 1
