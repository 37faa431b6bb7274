"""Quantizing while loading: each format against its library and its published formula, alone and in whole models."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.engine.loading.held_weights import held_weights
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.models import build_graph
from octavo.quantization.at_load import METHODS, quantized, quantized_like
from octavo.quantization.packed import CodebookWeight, DenseWeight, Float8Weight, GroupedWeight, Weight
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support import converted_gguf, tiny_models
from tests.support.at_load_formulas import FORMULAS
from tests.support.processes import octavo_here
from tests.support.quantized_checkpoints import CASES, tiny_model, write
from tests.support.tiny_gguf import plain_tensors, tiny_gguf

Floats = NDArray[np.float32]
NATIVE_TOLERANCE = 4e-2
NAMES = list(METHODS)


def random_matrix(rows: int = 96, width: int = 160) -> Floats:
    values = np.random.default_rng(rows * width).standard_t(4, (rows, width)).astype(np.float32)
    values[1] *= 1e-3
    values[2] = 0
    return values


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [160, 96, 576, 4096])
def test_the_formula(name: str, width: int) -> None:
    w = random_matrix(width=width)
    weight, like = quantized(DenseWeight(w), name), quantized_like(w.shape, name)
    assert (like.type_name, like.shape, like.nbytes) == (weight.type_name, weight.shape, weight.nbytes)
    found, expected = weight.dequantize(), FORMULAS[name](w)
    # A number halfway between two codes may go either way: float32 here, float64 there.
    is_equal = np.isclose(found, expected, rtol=1e-5, atol=1e-9)
    assert is_equal.mean() > 0.9999
    assert (np.abs(found - w)[~is_equal] <= np.abs(expected - w)[~is_equal] * 1.001 + 1e-9).all()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("width", [256, 96])
def test_codes_of_bitsandbytes(kind: str, width: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    w = random_matrix(128, width)
    data, state = functional.quantize_4bit(torch.from_numpy(w), blocksize=64, quant_type=kind)
    weight = quantized(DenseWeight(w), kind)
    assert isinstance(weight, CodebookWeight)
    pairs = data.numpy().reshape(128, -1)
    assert weight.table == tuple(functional.get_4bit_type(kind, "cpu").tolist())
    values = np.asarray(weight.table)[np.stack([weight.codes & 15, weight.codes >> 4], -1)]
    expected = np.asarray(weight.table)[np.stack([pairs >> 4, pairs & 15], -1)]  # FP4 has two codes of zero
    np.testing.assert_array_equal(values, expected)
    pieces = state.absmax.numpy().repeat(64 // weight.block).reshape(weight.scales.shape)
    np.testing.assert_array_equal(weight.scales, pieces)


def test_codes_of_llm_int8() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    w = random_matrix().astype(np.float16).astype(np.float32)
    w = np.delete(w, 2, axis=0)  # a row of zeros becomes NaN there
    data, absmax, _ = functional.int8_vectorwise_quant(torch.from_numpy(w).half())
    weight = quantized(DenseWeight(w), "int8")
    assert isinstance(weight, GroupedWeight)
    codes = (weight.codes ^ np.uint8(128)).view(np.int8)
    # The library divides in float16 and leaves halves to chance.
    assert (codes == data.numpy()).mean() > 0.995
    assert np.abs(codes.astype(int) - data.numpy()).max() <= 1
    np.testing.assert_allclose(weight.scales[:, 0] * 127, absmax.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("name", "strategy"), [("int4", "group"), ("fp8", "channel")])
def test_parameters_of_compressed_tensors(name: str, strategy: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    w = torch.from_numpy(np.delete(random_matrix(96, 256), 2, axis=0))
    kind: dict[str, Any] = (
        {"num_bits": 4, "type": "int", "symmetric": False, "group_size": 64}
        if name == "int4"
        else {"num_bits": 8, "type": "float", "symmetric": True}
    )
    parts = w.reshape(len(w), -1, 64) if name == "int4" else w[:, None]
    arguments = quantization.QuantizationArgs(strategy=strategy, **kind)
    scale, zero = utils.calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
    weight = quantized(DenseWeight(w.numpy()), name)
    assert isinstance(weight, (GroupedWeight, Float8Weight))
    np.testing.assert_allclose(weight.scales.astype(np.float32), scale.numpy(), rtol=6e-4 if name == "int4" else 1e-6)
    if isinstance(weight, GroupedWeight):
        assert weight.zeros is not None
        zeros = zero.numpy().astype(int) + 8  # signed there
        assert np.abs(weight.zeros - zeros).max() <= 1  # the rounded scale may move it across a half
        assert (weight.zeros == zeros).mean() > 0.99


def test_memory_is_that_of_the_result_and_a_few_rows() -> None:
    bits = np.random.default_rng(0).integers(0x3C00, 0x3F00, (4096, 4096), np.uint16)
    for name in NAMES:
        tracemalloc.start()
        weight = quantized(DenseWeight(bits), name)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2.1 * weight.nbytes + (16 << 20), name  # in float32 the matrix takes 64 MiB


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite(number: float) -> None:
    w = random_matrix()
    w[5, 7] = number
    for name in NAMES:
        with pytest.raises(ValueError, match="it contains NaN or infinity"):
            quantized(DenseWeight(w), name)


# Whole models.


def graph_of(checkpoint: Checkpoint) -> Any:
    return build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)


def saved(name: str, path: Path) -> tuple[PreTrainedModel, Checkpoint]:
    model = tiny_models.tiny_model(name)
    return model, open_checkpoint(tiny_models.save_safetensors(model, path))


def held(checkpoint: Checkpoint, **options: Any) -> Checkpoint:
    return checkpoint.with_weights(held_weights(checkpoint, graph_of(checkpoint), **options))


@pytest.mark.parametrize("method", NAMES)
def test_a_whole_model(method: str, tmp_path: Path) -> None:
    """transformers computes with the numbers of the formula, Octavo with what it quantized while loading."""
    model = tiny_model()
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(torch.from_numpy(FORMULAS[method](parameter.numpy())))
    expected = tiny_models.expected_logits(model, TOKENS)
    quantized_checkpoint = held(checkpoint, quantization=method)
    assert_close(logits_of(quantized_checkpoint), expected, 2e-3)  # of codes halfway between two
    on_cpu = logits_of(quantized_checkpoint, "cpu")  # activations are rounded to eight bits
    assert np.abs(on_cpu - expected).max() < NATIVE_TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("llama-tied-biased", {"embed_tokens"}),
        ("mixtral", {"embed_tokens", "lm_head", "gate"}),  # the routers too
        ("gpt2", {"embed_tokens", "embed_positions", "lm_head"}),
    ],
)
def test_tables_heads_and_routers_stay_plain(name: str, plain: set[str], tmp_path: Path) -> None:
    _, checkpoint = saved(name, tmp_path)
    weights = held(checkpoint, quantization="int8").weights
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for weight_name, shape in weights.shapes.items():
        if len(shape) > 1:
            weight, info = weights[weight_name], weights.info(weight_name)
            assert (weight.type_name, weight.shape, weight.nbytes) == (info.type_name, info.shape, info.nbytes)
            found[isinstance(weight, DenseWeight)].add(weight_name.removesuffix(".weight").rpartition(".")[2])
    assert found[True] <= plain
    assert not found[False] & plain
    assert found[False]


def test_an_option_on_a_quantized_checkpoint(tmp_path: Path) -> None:
    write(tiny_model(), tmp_path / "a", *CASES["awq-64"])
    with pytest.raises(ModelLoadError, match=r"a/model.safetensors: the weights are already quantized \(awq\); leave"):
        LLM(str(tmp_path / "a"), quantization="nf4")
    result = octavo_here("show", tmp_path / "a", "--quantization", "int8")
    assert (result.returncode, result.stderr.count("\n")) == (3, 1)
    assert "already quantized (awq)" in result.stderr


def test_an_option_on_a_quantized_file(smollm2_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"the weights are already quantized \(Q4_1\)"):
        LLM(str(smollm2_path), quantization="nf4")


def test_show_and_plan_count_what_the_option_makes(tmp_path: Path) -> None:
    tiny_models.save_safetensors(tiny_model(), tmp_path)
    text = octavo_here("show", tmp_path, "--quantization", "nf4").stdout
    assert re.search(r"NF4_64 +4\.50 +64 +NF4_64 +(int8|bfloat16) ", text)
    assert re.search(r"F32 +32\.00 +- +F32 +float32 ", text)
    whole, less = (octavo_here("plan", tmp_path, *options).stdout for options in ((), ("--quantization", "int4")))
    assert whole != less


def test_a_gguf_file_of_plain_numbers_is_quantized(tmp_path: Path) -> None:
    path = converted_gguf.save_gguf(tiny_models.tiny_model("llama"), tmp_path / "plain.gguf")
    checkpoint = open_checkpoint(path)
    types = {info.type_name for info in map(held(checkpoint, quantization="int8").weights.info, checkpoint.weights)}
    assert types == {"I8_ROW_F32", "F32"}


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])  # blocks of 64 are two of these rows, in another order
def test_llm_answers_as_a_file_with_the_rounded_numbers(method: str, tmp_path: Path) -> None:
    tensors = plain_tensors()
    (tmp_path / "plain.gguf").write_bytes(tiny_gguf(tensors=tensors))
    rounded = [
        replace(t, data=FORMULAS[method](np.frombuffer(t.data, np.float32).reshape(t.shape)).tobytes())
        if t.name.startswith("blk") and len(t.shape) > 1
        else t
        for t in tensors
    ]
    (tmp_path / "rounded.gguf").write_bytes(tiny_gguf(tensors=rounded))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=8)
    answers = []
    for name, options in (("rounded.gguf", {}), ("plain.gguf", {"quantization": method})):
        with LLM(str(tmp_path / name), backend="reference", **options) as llm:
            answers.append(llm.generate([[2, 3, 4]], params)[0].outputs[0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].cumulative_logprob == pytest.approx(answers[1].cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("method", NAMES)
def test_the_command(method: str, tmp_path: Path) -> None:
    (tmp_path / "plain.gguf").write_bytes(tiny_gguf(tensors=plain_tensors()))
    command = ("run", tmp_path / "plain.gguf", "ab", "--raw", "--temperature", "0", "--quantization", method)
    with LLM(str(tmp_path / "plain.gguf"), quantization=method) as llm:
        params = SamplingParams(temperature=0, max_tokens=200)
        answer = llm.generate(["ab"], params)[0].outputs[0].text
    result = octavo_here(*command)
    assert (result.returncode, result.stdout) == (0, answer + "\n")


def test_remote_code_is_never_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf())
    with LLM(str(tmp_path / "tiny.gguf"), trust_remote_code=True) as llm:
        assert llm.generate([[2]], SamplingParams(max_tokens=1))
    (record,) = [r for r in caplog.records if "trust_remote_code" in r.message]
    assert "Octavo never runs code from a repository" in record.message
    assert "docs/models.md" in record.message


# The number type of plain weights.


@pytest.mark.parametrize(("dtype", "type_name"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype(dtype: str, type_name: str, stored: torch.dtype, tmp_path: Path) -> None:
    """Every matrix gets the numbers that torch makes of it; vectors stay as they are."""
    model = tiny_models.tiny_model("llama").to(stored)
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path))
    weights = held(checkpoint, dtype=dtype).weights
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    for name, shape in weights.shapes.items():
        weight: Weight = weights[name]
        if len(shape) > 1:
            assert weight.type_name == weights.info(name).type_name == type_name
            assert weight.nbytes == weights.info(name).nbytes
            expected = state[name].to(getattr(torch, dtype)).float().numpy()
            if "q_proj" not in name and "k_proj" not in name:
                np.testing.assert_array_equal(weight.dequantize(), expected)
        else:
            assert weight.type_name == checkpoint.weights.info(name).type_name
    if stored == torch.float32 and dtype != "float32":
        changed = weights.fingerprint("lm_head.weight")
        assert changed != checkpoint.weights.fingerprint("lm_head.weight")


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    values = bits.view(np.float32)[np.abs(bits.view(np.float32)) < 3e38]
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(DenseWeight(values).converted("BF16").data, expected)
    odd = np.array([np.nan, -np.inf, np.inf, 0, -0.0], np.float32)
    converted = DenseWeight(odd).converted("BF16").dequantize()
    np.testing.assert_array_equal(converted, odd)


def test_numbers_beyond_a_type() -> None:
    with pytest.raises(ValueError, match="its numbers reach 70000, which F16 cannot represent"):
        DenseWeight(np.array([[1, -70000]], np.float32)).converted("F16")
    with pytest.raises(ValueError, match="BF16"):
        DenseWeight(np.array([3.4e38], np.float32)).converted("BF16")


def test_the_tensor_is_named(tmp_path: Path) -> None:
    model = tiny_models.tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path))
    with pytest.raises(ModelLoadError, match=r"tensor 'lm_head.weight': its numbers reach 1e\+06"):
        held(checkpoint, dtype="float16").weights["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"up_proj.weight': it contains NaN or infinity"):
        held(checkpoint, quantization="fp4").weights["layers.0.mlp.up_proj.weight"]
