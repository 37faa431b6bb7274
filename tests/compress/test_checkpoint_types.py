"""Hugging Face checkpoints that Octavo writes, read by the published formulas and by the libraries of the formats."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.cli.quantize import quantize
from octavo.loader.checkpoint import open_checkpoint
from octavo.quantization.checkpoints.bitsandbytes import dynamic_table
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support.directory_tokenizers import save_tokenizer
from tests.support.tiny_models import expected_logits, tiny_model

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789 def f(x): return x + 1\n"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "num_hidden_layers": 3}


def save_source(directory: Path, name: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    """A model with a tokenizer, a template and sampling."""
    directory.mkdir(exist_ok=True)
    count = save_tokenizer("smollm", directory)
    model = tiny_model(name, vocab_size=count, **{**SIZES, **changes}).to(dtype)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    (directory / "calibration.md").write_text(TEXT * 60)
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("checkpoint") / "model")


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and error of the command; errors of Octavo as text."""
    result = CliRunner().invoke(quantize, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


def bit_fields(words: torch.Tensor, bits: int) -> NDArray[np.int64]:
    """The codes of each row of int32 words: one long number a row, as AutoGPTQ packs them, of 3 bits too."""
    found = []
    for row in words.numpy().astype("<i4"):
        number, count = int.from_bytes(row.tobytes(), "little"), len(row) * 32 // bits
        found.append([number >> i * bits & (1 << bits) - 1 for i in range(count)])
    return np.array(found)


def gptq(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> NDArray[np.float32]:
    """`QuantLinear` of AutoGPTQ: scales[g_idx] * (code - (zero + 1)[g_idx])."""
    bits = config["bits"]
    codes = bit_fields(parts["qweight"].T, bits).T
    zeros = bit_fields(parts["qzeros"], bits) + 1
    groups = parts["g_idx"].numpy()
    weight: NDArray[np.float32] = (parts["scales"].float().numpy()[groups] * (codes - zeros[groups])).T
    return weight


def awq(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> NDArray[np.float32]:
    """`dequantize_gemm` of AutoAWQ."""
    shifts, order = torch.arange(0, 32, 4), torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        codes = (words[:, :, None] >> shifts) & 15
        return codes[:, :, order].reshape(len(words), -1)

    codes, zeros = unpacked(parts["qweight"]), unpacked(parts["qzeros"])
    size = config["group_size"] if config["group_size"] > 0 else len(codes)
    scales = parts["scales"].float()
    weight = (codes - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)
    return weight.T.numpy()


def four_bits(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> NDArray[np.float32]:
    """`dequantize_4bit` of bitsandbytes: the high four bits come first, blocks run over the flattened matrix.

    The scales are codes: of a table, times a scale of their own, plus an offset.
    """
    [state] = [json.loads(bytes(t.tolist())) for name, t in parts.items() if name.startswith("weight.quant_state.")]
    assert state["quant_type"] == config["bnb_4bit_quant_type"]
    pairs = parts["weight"].reshape(-1)
    codes = torch.stack([pairs >> 4, pairs & 15], 1).reshape(-1)
    values = parts["weight.quant_map"][codes.long()]
    assert config["bnb_4bit_use_double_quant"]
    codes = parts["weight.absmax"]
    nested = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(codes)]
    scales = parts["weight.nested_quant_map"][codes.long()] * nested + state["nested_offset"]
    scales = scales.repeat_interleave(state["blocksize"])[: len(values)]
    return (values * scales).reshape(state["shape"]).numpy()


def by_rows(parts: dict[str, torch.Tensor], _: dict[str, Any]) -> NDArray[np.float32]:
    """Numbers with a scale for each row: FP8 and int8 of compressed-tensors, LLM.int8 of bitsandbytes."""
    scale = parts["SCB"][:, None] / 127 if "SCB" in parts else parts["weight_scale"]
    return (parts["weight"].float() * scale.float()).numpy()


def mxfp4(parts: dict[str, torch.Tensor], _: dict[str, Any]) -> NDArray[np.float32]:
    """OCP Microscaling: E2M1 with a power of two for 32 numbers; the low four bits come first."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = parts["weight_packed"]
    values = table[torch.stack([pairs & 15, pairs >> 4], 2).reshape(len(pairs), -1).long()]
    return (values * torch.exp2(parts["weight_scale"].float() - 127).repeat_interleave(32, 1)).numpy()


CALIBRATION = ("--calibration", "calibration.md", "--calibration-chunks", 4)
CASES = {
    **{f"gptq-{bits}": (f"gptq-{bits}bit", CALIBRATION, gptq) for bits in (2, 3, 4, 8)},
    "gptq-order": ("gptq-4bit", (*CALIBRATION, "--act-order", "--group-size", 32), gptq),
    "gptq-order-3": ("gptq-3bit", (*CALIBRATION, "--act-order", "--asymmetric", "--group-size", 64), gptq),
    "gptq-row": ("gptq-4bit", (*CALIBRATION, "--group-size", -1, "--asymmetric", "--act-order"), gptq),
    "rtn": ("rtn-4bit", ("--asymmetric",), gptq),
    "awq": ("awq", (*CALIBRATION, "--group-size", 64), awq),
    "nf4": ("nf4", (), four_bits),
    "fp4": ("fp4", (), four_bits),
    "int8": ("int8", (), by_rows),
    "fp8": ("fp8", (), by_rows),
    "w8a8": ("w8a8", CALIBRATION, by_rows),
    "mxfp4": ("mxfp4", (), mxfp4),
}
LARGEST_ERROR = {"gptq-2": 1.2, "gptq-3": 0.5, "gptq-order-3": 0.5, "gptq-8": 0.02, "int8": 0.02, "w8a8": 0.02}
"""Of the weights' root mean square, relative to that of the weights; 0.3 for all others."""


def parts_of(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The tensors of each quantized layer by part, and the others by name."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    plain = {}
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    marks = ("qweight", "weight_scale", "SCB", "weight.absmax")
    stems = {name.removesuffix(f".{mark}") for name in tensors for mark in marks if name.endswith(f".{mark}")}
    for name, tensor in tensors.items():
        stem = next((stem for stem in stems if name.startswith(f"{stem}.")), None)
        if stem is None:
            plain[name] = tensor
        else:
            layers.setdefault(stem, {})[name.removeprefix(f"{stem}.")] = tensor
    return layers, plain


@pytest.mark.parametrize("case", CASES)
def test_the_published_formula_and_our_reader_agree(case: str, source: Path, tmp_path: Path) -> None:
    """Every matrix means the same by both, and transformers with these numbers has the logits that Octavo has."""
    type_name, options, formula = CASES[case]
    options = tuple(source / o if o == "calibration.md" else o for o in options)
    code, out, err = run(source, tmp_path / "out", "--type", type_name, *options)
    assert (code, err.count("\n") <= 2) == (0, True), err
    assert "21 matrices" in out
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    layers, plain = parts_of(tmp_path / "out")
    assert len(layers) == 21
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    before = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    meanings = {f"{stem}.weight": formula(parts, config) for stem, parts in layers.items()}
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        for name, meaning in meanings.items():
            found = checkpoint.weights[name.removeprefix("model.")].dequantize()
            np.testing.assert_allclose(found, meaning, rtol=1e-6, atol=1e-7)
            if type_name not in ("awq", "w8a8"):  # whose columns are scaled
                error = np.sqrt(np.square(meaning - before[name]).mean() / np.square(before[name]).mean())
                assert error < LARGEST_ERROR.get(case, 0.3), name
        state = {name: torch.from_numpy(np.array(meaning)) for name, meaning in meanings.items()}
        state |= {name: tensor.float() for name, tensor in plain.items()}
        model.load_state_dict(state, strict=False)
        assert_close(logits_of(checkpoint), expected_logits(model.eval(), TOKENS))


def test_the_folder_has_all_that_the_source_has(source: Path, tmp_path: Path) -> None:
    code, _, err = run(source, tmp_path / "out", "--type", "fp8", "--max-part-size", "200KB")
    assert code == 0, err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert "model.safetensors" not in names
    assert "calibration.md" not in names
    assert (tmp_path / "out/generation_config.json").read_text() == '{"temperature": 0.5}'
    assert not (tmp_path / "out.partial").exists()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    before = json.loads((source / "config.json").read_text())
    assert {key: config[key] for key in before} == before
    layers, plain = parts_of(tmp_path / "out")
    original = load_file(source / "model.safetensors")
    assert plain.keys() | {f"{stem}.weight" for stem in layers} == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in plain.items())


def reloaded(folder: Path) -> PreTrainedModel:
    """The model as transformers reads it, by the library of its format."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", device_map="cpu"
    )
    return model.eval()


@pytest.mark.parametrize("type_name", ["fp8", "w8a8", "mxfp4"])
def test_compressed_tensors_reads_it(type_name: str, source: Path, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    options = ("--calibration", source / "calibration.md") if type_name == "w8a8" else ()
    assert run(source, tmp_path / "out", "--type", type_name, *options)[0] == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    [scheme] = parsed.config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    layers, _ = parts_of(tmp_path / "out")
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        for stem, parts in layers.items():
            expected = compressor.decompress(dict(parts), scheme)["weight"].float().numpy()
            found = checkpoint.weights[f"{stem.removeprefix('model.')}.weight"].dequantize()
            np.testing.assert_allclose(found, expected, rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("type_name", ["nf4", "fp4", "int8"])
def test_bitsandbytes_reads_it(type_name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    source = save_source(tmp_path / "source", dtype=torch.float32)
    assert run(source, tmp_path / "out", "--type", type_name)[0] == 0
    model = reloaded(tmp_path / "out")
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        # LLM.int8 rounds the activations, too, and the library's products of four bits on CPUs are in bfloat16.
        assert_close(logits_of(checkpoint), expected_logits(model, TOKENS), 0.05)


@pytest.mark.parametrize("type_name", ["nf4", "fp4"])
def test_bitsandbytes_dequantizes_the_same_numbers(type_name: str, source: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    assert run(source, tmp_path / "out", "--type", type_name)[0] == 0
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        for stem, parts in parts_of(tmp_path / "out")[0].items():
            described = {name.removeprefix("weight."): part for name, part in parts.items() if name != "weight"}
            state = functional.QuantState.from_dict(described, device=torch.device("cpu"))
            state.dtype = torch.float32
            found = checkpoint.weights[f"{stem.removeprefix('model.')}.weight"].dequantize()
            expected = functional.dequantize_4bit(parts["weight"], state).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["gptq-4", "gptq-3", "gptq-8", "gptq-order", "rtn", "awq"])
def test_gptqmodel_reads_it(case: str, source: Path, tmp_path: Path) -> None:
    """The library through which transformers reads GPTQ and AWQ, on the CPU: its modules' own dequantization."""
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    type_name, options, _ = CASES[case]
    options = tuple(source / o if o == "calibration.md" else o for o in options)
    assert run(source, tmp_path / "out", "--type", type_name, *options)[0] == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]

    def theirs(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        if type_name == "awq":
            return dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, config["group_size"])
        rows, columns = len(parts["g_idx"]), parts["scales"].shape[1]
        module = TorchLinear(config["bits"], config["group_size"], config["sym"], config["desc_act"], rows, columns)
        module.load_state_dict(parts)
        convert_gptq_v1_to_v2_format_module(module, config["bits"], torch.int32)
        return module.eval().dequantize_weight()

    found_parts = parts_of(tmp_path / "out")[0]
    if type_name.startswith("gptq") and config["sym"]:  # whose scales may be negative
        assert any(bool((parts["scales"] < 0).any()) for parts in found_parts.values())
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        for stem, parts in found_parts.items():
            found = checkpoint.weights[f"{stem.removeprefix('model.')}.weight"].dequantize()
            expected = theirs(parts).T.float().numpy()
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)


def test_the_table_of_scales_is_bitsandbytes() -> None:
    table = dynamic_table()
    assert len(table) == len(set(table.tolist())) == 256
    assert (table[0], table[-1]) == (pytest.approx(-0.9929688), 1)
    functional = pytest.importorskip("bitsandbytes.functional")
    np.testing.assert_allclose(table, functional.create_dynamic_map().numpy(), rtol=1e-6)


def test_transformers_reads_it_through_compressed_tensors(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    source = save_source(tmp_path / "source", dtype=torch.float32)
    assert run(source, tmp_path / "out", "--type", "fp8")[0] == 0
    model = reloaded(tmp_path / "out")
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        # The scheme rounds the activations, too.
        assert_close(logits_of(checkpoint), expected_logits(model, TOKENS), 0.1)
