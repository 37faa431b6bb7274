"""Declared transforms: files that keep their tensors in other forms give the graph the same weights, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, reference
from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import rotate
from octavo.graph.ops.moe import Routing
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.tensor_names import TensorName
from octavo.models import build_graph, llama
from octavo.models._rope import scaled
from octavo.models._weights import (
    Fold,
    Heads,
    OneRow,
    Permute,
    Split,
    Stack,
    Transform,
    Transpose,
    WeightTable,
    halves_of_pairs,
)
from octavo.quantization.packed import GGMLWeight
from tests.support.batches import Request, step
from tests.support.gguf_writer import Tensor
from tests.support.quantize import random_weight
from tests.support.safetensors_writer import safetensors
from tests.support.tiny_gguf import HIDDEN, VOCABULARY, WIDTH, tiny_gguf, tiny_tensors

Arrays = dict[str, NDArray[np.float32]]
TOKENS = [1, 5, 2, 7, 0, 3, 3, 6]
LAYER = "layers.0."
HEADS, KV_HEADS, HEAD_DIM = 4, 2, WIDTH // 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def plain_tensors() -> Arrays:
    """A llama of one layer with a bias on q, by the names of the graph."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "norm.weight": (WIDTH,),
        LAYER + "input_layernorm.weight": (WIDTH,),
        LAYER + "post_attention_layernorm.weight": (WIDTH,),
        LAYER + "self_attn.q_proj.weight": (WIDTH, WIDTH),
        LAYER + "self_attn.k_proj.weight": (WIDTH // 2, WIDTH),
        LAYER + "self_attn.v_proj.weight": (WIDTH // 2, WIDTH),
        LAYER + "self_attn.q_proj.bias": (WIDTH,),
        LAYER + "self_attn.k_proj.bias": (WIDTH // 2,),
        LAYER + "self_attn.v_proj.bias": (WIDTH // 2,),
        LAYER + "self_attn.o_proj.weight": (WIDTH, WIDTH),
        LAYER + "mlp.gate_proj.weight": (HIDDEN, WIDTH),
        LAYER + "mlp.up_proj.weight": (HIDDEN, WIDTH),
        LAYER + "mlp.down_proj.weight": (WIDTH, HIDDEN),
    }
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def write_directory(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(safetensors({"model." + n: t for n, t in tensors.items()}))
    return path


def logits_of(checkpoint: Checkpoint) -> NDArray[np.float32]:
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    return run(graph, checkpoint)


def run(graph: Graph, checkpoint: Checkpoint) -> NDArray[np.float32]:
    executor = reference.compile(graph, checkpoint.weights, ExecutorLimits(64, 4, 64, 64))
    executor.allocate_cache(4, 16)
    output = executor.submit(step([(Request(TOKENS, [2, 1]), len(TOKENS))], block_size=16)).wait()
    assert output.logits is not None
    return output.logits


def take(tensors: Arrays, *names: str) -> list[NDArray[np.float32]]:
    return [tensors.pop(LAYER + name) for name in names]


def fused(tensors: Arrays) -> Arrays:
    for kind in ("weight", "bias"):
        parts = take(tensors, *(f"self_attn.{n}_proj.{kind}" for n in "qkv"))
        tensors[f"{LAYER}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
    tensors[LAYER + "mlp.gate_up_proj.weight"] = np.concatenate(
        take(tensors, "mlp.gate_proj.weight", "mlp.up_proj.weight")
    )
    return tensors


def with_transposed(tensors: Arrays) -> Arrays:
    """Matrices of the MLP as [in, out], under the names of another library."""
    for graph, stored in (("mlp.up_proj", "c_fc"), ("mlp.down_proj", "c_proj")):
        (matrix,) = take(tensors, graph + ".weight")
        tensors[f"h.0.{stored}.weight"] = np.ascontiguousarray(matrix.T)
    return tensors


def without_one(tensors: Arrays) -> Arrays:
    return {n: t - np.float32(1) if "norm" in n else t for n, t in tensors.items()}


def in_another_order(tensors: Arrays) -> Arrays:
    name = LAYER + "mlp.down_proj.weight"
    return {**tensors, name: tensors[name][::-1]}


SPLITS: tuple[Transform, ...] = (
    Split(
        "layers.*.self_attn.qkv_proj",
        tuple(f"layers.*.self_attn.{n}_proj" for n in "qkv"),
        lambda c: (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim),
    ),
    Split(
        "layers.*.mlp.gate_up_proj",
        ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
        lambda c: (c.mlp.intermediate_size, c.mlp.intermediate_size),
    ),
)
NORMS = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
STORED = {
    "split": (fused, WeightTable(transforms=SPLITS)),
    "transpose": (
        with_transposed,
        WeightTable(
            names={"h.*.c_fc": "layers.*.mlp.up_proj", "h.*.c_proj": "layers.*.mlp.down_proj"},
            transforms=(Transpose("layers.*.mlp.up_proj"), Transpose("layers.*.mlp.down_proj")),
        ),
    ),
    "fold": (without_one, WeightTable(transforms=tuple(Fold(stem, 1.0) for stem in NORMS))),
    "permute": (
        in_another_order,
        WeightTable(transforms=(Permute("layers.*.mlp.down_proj", lambda c: np.arange(c.hidden_size)[::-1]),)),
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_safetensors(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, table = STORED[kind]
    tensors = plain_tensors()
    if kind == "fold":  # what is left of a number when one is taken off and added again
        tensors = {n: t - np.float32(1) + np.float32(1) if "norm" in n else t for n, t in tensors.items()}
    plain = open_checkpoint(write_directory(tmp_path / "plain", tensors))
    expected = logits_of(plain)
    monkeypatch.setattr(llama, "WEIGHTS", table)
    other = open_checkpoint(write_directory(tmp_path / "other", store(dict(tensors))))
    assert set(other.weights) == set(plain.weights)
    for name, weight in other.weights.items():
        info = other.weights.info(name)
        assert (info.type_name, info.shape) == (weight.type_name, weight.shape)
        np.testing.assert_array_equal(weight.dequantize(), plain.weights[name].dequantize())
        other.weights.release(name)
    np.testing.assert_array_equal(logits_of(other), expected)


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized rows are cut and joined as they are."""
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=SPLITS))
    tensors = {tensor.name: tensor for tensor in tiny_tensors()}
    (tmp_path / "plain.gguf").write_bytes(tiny_gguf())
    qkv = [tensors.pop(f"blk.0.attn_{n}.weight") for n in "qkv"]
    content = b"".join(tensor.content() for tensor in qkv)
    together = Tensor("blk.0.attn_qkv.weight", "Q8_0", (2 * WIDTH, WIDTH), content)
    (tmp_path / "fused.gguf").write_bytes(tiny_gguf(tensors=[*tensors.values(), together]))
    plain, other = (open_checkpoint(tmp_path / f"{name}.gguf") for name in ("plain", "fused"))
    assert {*plain.weights} == {*other.weights}
    assert isinstance(other.weights[LAYER + "self_attn.k_proj.weight"], GGMLWeight)
    np.testing.assert_array_equal(logits_of(other), logits_of(plain))


def test_another_way_of_making_a_weight_is_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So packed weights that were kept on disk are not taken for others."""
    name = LAYER + "mlp.down_proj.weight"
    path = write_directory(tmp_path, plain_tensors())
    found = []
    for order in (np.arange(WIDTH)[::-1], np.roll(np.arange(WIDTH), 1)):
        transform = Permute("layers.*.mlp.down_proj", lambda _, order=order: order)
        monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=(transform,)))
        found += [open_checkpoint(path).weights.fingerprint(name) for _ in range(2)]
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable())
    found.append(open_checkpoint(path).weights.fingerprint(name))
    assert found[0] == found[1] != found[2] == found[3] != found[4] != found[0]


def experts(layers: int, count: int) -> Arrays:
    rng = np.random.default_rng(1)
    shapes = {"gate_proj": (HIDDEN, WIDTH), "up_proj": (HIDDEN, WIDTH), "down_proj": (WIDTH, HIDDEN)}
    return {
        f"layers.{layer}.mlp.experts.{expert}.{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32)
        for layer in range(layers)
        for expert in range(count)
        for name, shape in shapes.items()
    }


STACKS = WeightTable(
    transforms=tuple(
        Stack(f"layers.*.mlp.experts.*.{n}_proj", f"layers.*.mlp.experts.{n}_proj") for n in ("gate", "up", "down")
    )
)


def mixture(shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    g = Graph(shapes)
    x = g.moe(g.embedding("embed_tokens"), LAYER + "mlp", Routing(2))
    g.output = g.logits(g.select_rows(x), "embed_tokens")
    return g


def test_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "WEIGHTS", STACKS)
    single = experts(1, 12)  # more than ten: 10 comes after 9, not after 1
    router = np.random.default_rng(2).normal(0, 1, (12, WIDTH)).astype(np.float32)
    tensors = {**plain_tensors(), LAYER + "mlp.gate.weight": router}
    together = dict(tensors)
    for name in ("gate_proj", "up_proj", "down_proj"):
        parts = [single[f"{LAYER}mlp.experts.{e}.{name}.weight"] for e in range(12)]
        together[f"{LAYER}mlp.experts.{name}.weight"] = np.stack(parts)
    other = open_checkpoint(write_directory(tmp_path / "single", {**tensors, **single}))
    plain = open_checkpoint(write_directory(tmp_path / "together", together))
    assert other.weights.shapes == plain.weights.shapes
    other.weights.release(LAYER + "mlp.experts.up_proj.weight")
    np.testing.assert_array_equal(run(mixture(other.weights.shapes), other), run(mixture(plain.weights.shapes), plain))


def test_stack_of_quantized_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older GGUF layout: one tensor for each expert."""
    stored = {"blk.*.ffn_gate.*": "gate", "blk.*.ffn_up.*": "up", "blk.*.ffn_down.*": "down"}
    names = {stem: f"layers.*.mlp.experts.*.{name}_proj" for stem, name in stored.items()}
    monkeypatch.setattr(llama, "WEIGHTS", replace(STACKS, names=names))
    rng = np.random.default_rng(3)
    blocks = {e: random_weight("Q8_0", (HIDDEN, WIDTH), e).data for e in range(3)}
    tensors = [Tensor(f"blk.0.ffn_gate.{e}.weight", "Q8_0", (HIDDEN, WIDTH), blocks[e].tobytes()) for e in range(3)]
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf(tensors=[*tiny_tensors(), *rng.permutation(np.array(tensors, object))]))
    weight = open_checkpoint(path).weights[LAYER + "mlp.experts.gate_proj.weight"]
    assert isinstance(weight, GGMLWeight)
    assert weight.shape == (3, HIDDEN, WIDTH)
    np.testing.assert_array_equal(weight.data, np.stack([blocks[e] for e in range(3)]))


def test_fold_in_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    stored = open_checkpoint(path).weights["norm.weight"].dequantize()
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=(Fold("norm", 1.0, "gguf"),)))
    np.testing.assert_array_equal(open_checkpoint(path).weights["norm.weight"].dequantize(), stored + np.float32(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("layers.0.mlp.experts.1.up_proj.weight"), "expert 1 of layers.0.mlp.experts.up_proj.weight"),
        (
            lambda t: t.update({"layers.0.mlp.experts.2.up_proj.weight": np.zeros((4, 4), np.float32)}),
            r"experts.2.up_proj.weight' is F32 \[4, 4\], but .*experts.0.* is F32 \[64, 32\]; experts must be alike",
        ),
        (
            lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": np.zeros((60, WIDTH), np.float32)}),
            r"qkv_proj.weight' has the shape \[60, 32\]; the configuration asks for 64 rows",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[Arrays], object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "WEIGHTS", replace(STACKS, transforms=STACKS.transforms + SPLITS))
    tensors = {**plain_tensors(), **experts(1, 3)}
    change(tensors)
    with pytest.raises(ModelLoadError, match=reason):
        open_checkpoint(write_directory(tmp_path, tensors))


def test_a_quantized_matrix_cannot_be_transposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=(Transpose("layers.*.mlp.up_proj"),)))
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    with pytest.raises(ModelLoadError, match=r"'blk.0.ffn_up.weight' is Q8_0 and cannot be transposed"):
        open_checkpoint(path).weights[LAYER + "mlp.up_proj.weight"]


def test_a_vector_becomes_one_row_and_a_result_has_another_stem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transforms = (OneRow("norm"), Transpose("layers.*.mlp.up_proj", whole="layers.*.other"))
    tensors = plain_tensors()
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=transforms))
    weights = open_checkpoint(write_directory(tmp_path, tensors)).weights
    np.testing.assert_array_equal(weights["norm.weight"].dequantize(), tensors["norm.weight"][None])
    np.testing.assert_array_equal(
        weights["layers.0.other.weight"].dequantize(), tensors[LAYER + "mlp.up_proj.weight"].T
    )
    assert weights.info("layers.0.other.weight").shape == weights["layers.0.other.weight"].shape


def test_tables_of_biases_have_their_rows_in_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transforms = (
        Permute("layers.*.both", lambda _: np.array([0, 2, 4, 1, 3, 5])),
        Split("layers.*.both", ("layers.*.a", "layers.*.b"), lambda _: (3, 3)),
    )
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=transforms))
    table = np.arange(24, dtype=np.float32).reshape(4, 6)
    path = write_directory(tmp_path, {**plain_tensors(), LAYER + "both.bias": table})
    weights = open_checkpoint(path).weights
    np.testing.assert_array_equal(weights[LAYER + "a.bias"].dequantize(), table[:, ::2])
    np.testing.assert_array_equal(weights[LAYER + "b.bias"].dequantize(), table[:, 1::2])
    assert weights.info(LAYER + "b.bias").shape == (4, 3)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_heads(transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized ones stay as they are; if they are transposed they become numbers."""
    transform = Heads("layers.*.mlp.up_proj", "layers.*.heads", lambda c: c.num_heads, transposed)
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=(transform,)))
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    weights = open_checkpoint(path).weights
    weight, info = weights["layers.0.heads.weight"], weights.info("layers.0.heads.weight")
    assert (info.type_name, info.shape, info.nbytes) == (weight.type_name, weight.shape, weight.nbytes)
    assert weight.type_name == ("F32" if transposed else "Q8_0")
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable())
    whole = open_checkpoint(path).weights["layers.0.mlp.up_proj.weight"].dequantize()
    heads = whole.reshape(HEADS, -1, whole.shape[1])
    np.testing.assert_array_equal(weight.dequantize(), heads.swapaxes(1, 2) if transposed else heads)


def test_rows_that_are_not_those_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = Heads("layers.*.mlp.up_proj", "layers.*.heads", lambda _: 7)
    monkeypatch.setattr(llama, "WEIGHTS", WeightTable(transforms=(transform,)))
    with pytest.raises(ModelLoadError, match=r"up_proj.weight' is \[64, 32\], not a matrix of 7 heads"):
        open_checkpoint(write_directory(tmp_path, plain_tensors()))


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_pairs_side_by_side_become_halves(rotary_dim: int) -> None:
    """Rotating neighbours and permuting is permuting and rotating halves."""
    rng = np.random.default_rng(0)
    rope, positions = scaled(rotary_dim, 100.0), np.arange(7, dtype=np.int32)
    stored = rng.normal(0, 1, (7, HEADS * HEAD_DIM))
    order = halves_of_pairs(HEADS, HEAD_DIM, rotary_dim)
    heads = stored.reshape(7, HEADS, HEAD_DIM)
    turn = np.exp(1j * positions[:, None, None] * np.asarray(rope.frequencies))
    turned = (heads[..., 0:rotary_dim:2] + 1j * heads[..., 1:rotary_dim:2]) * turn
    expected = heads.copy()
    expected[..., 0:rotary_dim:2], expected[..., 1:rotary_dim:2] = turned.real, turned.imag
    found = rotate(stored[:, order], HEAD_DIM, rope, positions)
    np.testing.assert_allclose(found, expected.reshape(7, -1)[:, order], atol=1e-12)


def test_names_taken_apart() -> None:
    name = TensorName.parse("layers.3.mlp.experts.17.up_proj.weight")
    assert name == TensorName("layers.*.mlp.experts.*.up_proj", (3, 17), ".weight")
    assert str(name) == "layers.3.mlp.experts.17.up_proj.weight"
    assert TensorName.parse("layers.007.x2").numbers == ()
