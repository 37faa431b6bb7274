"""Quantized safetensors checkpoints: each layout as a whole tiny model, single layers, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.bitnet import WeightQuant

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.safetensors import open_safetensors
from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints import Lowered, lowered
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support import quantized_checkpoints, tiny_models
from tests.support.processes import octavo_here
from tests.support.quantized_checkpoints import CASES, as_tensor, gptq, tiny_model, write

RNG = np.random.default_rng(5)
# Kernels quantize activations to eight bits.
NATIVE_TOLERANCE = 4e-2
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def opened(path: Path, name: str) -> tuple[PreTrainedModel, Checkpoint, set[str]]:
    model = tiny_model()
    quantized = write(model, path, *CASES[name])
    return model, open_checkpoint(path), quantized


@pytest.mark.parametrize("name", CASES)
def test_whole_model(name: str, tmp_path: Path) -> None:
    """Exact numbers in the reference backend; type, shape and size are known before a weight is made."""
    model, checkpoint, quantized = opened(tmp_path, name)
    state = {n.removeprefix("model."): t.numpy() for n, t in model.state_dict().items()}
    assert quantized <= set(checkpoint.weights)
    for weight_name in checkpoint.weights:
        weight, info = checkpoint.weights[weight_name], checkpoint.weights.info(weight_name)
        assert (weight.type_name, weight.shape) == (info.type_name, info.shape)
        if weight_name in quantized:
            assert info.type_name not in ("F32", "F16", "BF16")
            atol = 1e-7 if name.startswith("hqq") else 1e-9  # broken zeros become minimums
            np.testing.assert_allclose(weight.dequantize(), state[weight_name], rtol=3e-7, atol=atol)
        else:
            np.testing.assert_array_equal(weight.dequantize(), state[weight_name])
    assert_close(logits_of(checkpoint), tiny_models.expected_logits(model, TOKENS))


@pytest.mark.parametrize("name", CASES)
def test_cpu_backend(name: str, tmp_path: Path) -> None:
    model, checkpoint, _ = opened(tmp_path, name)
    # The rounding of activations to 8 bits weighs more beside weights of two values.
    tolerance = 2 * NATIVE_TOLERANCE if name == "hqq-1" else NATIVE_TOLERANCE
    assert_close(logits_of(checkpoint, "cpu"), tiny_models.expected_logits(model, TOKENS), tolerance)


def layer_file(path: Path, tensors: dict[str, Any], config: dict[str, object], stem: str = "a.b_proj") -> list[Lowered]:
    save_file({f"{stem}.{part}": as_tensor(array).contiguous() for part, array in tensors.items()}, path)
    return list(lowered(ConfigReader({"q": config}).section("q"), open_safetensors(path)))


@pytest.mark.parametrize(("block", "width", "type_name"), [(64, 96, "NF4_32"), (64, 80, "NF4_16"), (128, 64, "NF4_64")])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_run_over_the_ends_of_rows(
    block: int, width: int, type_name: str, nested: bool, tmp_path: Path
) -> None:
    w = RNG.normal(size=(7, width)).astype(np.float32)
    packed = quantized_checkpoints.four_bits("nf4", block, nested=nested)(w, RNG)
    [weight] = layer_file(tmp_path / "x.safetensors", packed.tensors, {"quant_method": "bitsandbytes"})
    assert weight.make().type_name == weight.like.type_name == type_name
    np.testing.assert_array_equal(weight.make().dequantize(), packed.meaning)


def test_mxfp4_experts_keep_the_order_of_their_rows(tmp_path: Path) -> None:
    w = RNG.normal(size=(3, 10, 64)).astype(np.float32)
    blocks, scales, meaning = quantized_checkpoints.mxfp4(w)
    tensors = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales, "gate_up_proj_bias": np.zeros((3, 10))}
    [weight] = layer_file(tmp_path / "x.safetensors", tensors, {"quant_method": "mxfp4"}, "mlp.experts")
    assert weight.name == "mlp.experts.gate_up_proj.weight"
    assert weight.like.shape == weight.make().shape == w.shape
    np.testing.assert_array_equal(weight.make().dequantize(), meaning)
    np.testing.assert_array_equal(weight.make().rows(slice(0, None, 2)).dequantize(), meaning[:, ::2])


@pytest.mark.parametrize(("bits", "rows"), [(1, 24), (3, 7)])
def test_hqq_of_sizes_of_its_own(bits: int, rows: int, tmp_path: Path) -> None:
    """One bit takes two here; 14 groups of three bits do not fill the numbers of ten codes."""
    packed = quantized_checkpoints.hqq(bits, 64)(RNG.normal(size=(rows, 128)).astype(np.float32), RNG)
    [weight] = layer_file(tmp_path / "x.safetensors", packed.tensors, {"quant_method": "hqq"})
    made = weight.make()
    assert (made.type_name, made.nbytes) == (f"I{max(bits, 2)}_64_M_F32", weight.like.nbytes)
    np.testing.assert_allclose(made.dequantize(), packed.meaning, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("width", "type_name"), [(512, "TQ2_0"), (96, "I2_ROW_F32")])
def test_plain_weights_that_bitnet_rounds_itself(width: int, type_name: str, tmp_path: Path) -> None:
    """The nearest of three values times the mean magnitude, which transformers computes at each product."""
    config = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    w = RNG.normal(size=(8, width)).astype(np.float32)
    [weight] = layer_file(tmp_path / "x.safetensors", {"weight": w}, config)
    made, expected = weight.make(), WeightQuant.apply(torch.from_numpy(w)).numpy()
    assert made.type_name == weight.like.type_name == type_name
    np.testing.assert_allclose(made.dequantize(), expected, rtol=1e-6 if type_name != "TQ2_0" else 1e-3)
    assert layer_file(tmp_path / "x.safetensors", {"weight": w}, config, "lm_head") == []


def test_patterns_of_gptqmodel(tmp_path: Path) -> None:
    """`+:` gives layers their own bits and groups, `-:` leaves them plain."""
    w = RNG.normal(size=(32, 64)).astype(np.float32)
    dynamic = {"-:lm_head": {}, r"+:.*\.b_proj": {"bits": 8, "group_size": 32}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "dynamic": dynamic}
    packed = quantized_checkpoints.gptq(8, 32, symmetric=True)(w, RNG)
    [weight] = layer_file(tmp_path / "x.safetensors", packed.tensors, config)
    assert weight.like.type_name == "I8_32"
    np.testing.assert_array_equal(weight.make().dequantize(), packed.meaning)


def test_groups_of_compressed_tensors(tmp_path: Path) -> None:
    """A name or a pattern of names comes before the class of all layers."""
    w = RNG.normal(size=(32, 64)).astype(np.float32)
    config: Any = quantized_checkpoints.compressed("mixed-precision", {"num_bits": 4, "strategy": "channel"})
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    special = {"num_bits": 8, "strategy": "group", "group_size": 32}
    group = {"targets": [r"re:.*b_proj$"], "weights": special, "format": "pack-quantized"}
    config["config_groups"]["group_1"] = group
    for stem, bits, size in (("a.b_proj", 8, 32), ("a.c_proj", 4, None)):
        packed = quantized_checkpoints.integers(bits, size, packed=True)(w, RNG)
        [weight] = layer_file(tmp_path / "x.safetensors", packed.tensors, config, stem)
        np.testing.assert_array_equal(weight.make().dequantize(), packed.meaning)
    config["config_groups"].pop("group_0")
    with pytest.raises(ModelLoadError, match=r"'a\.c_proj' is quantized, but no target"):
        layer_file(tmp_path / "x.safetensors", packed.tensors, config, "a.c_proj")


def test_older_gptq_files_have_a_configuration_of_their_own(tmp_path: Path) -> None:
    model, _, _ = opened(tmp_path, "gptq-4")
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization.pop("quant_method")
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization))
    assert_close(logits_of(open_checkpoint(tmp_path)), tiny_models.expected_logits(model, TOKENS))


def test_show_and_plan_name_the_method(tmp_path: Path) -> None:
    opened(tmp_path, "awq-64")
    text = octavo_here("show", tmp_path).stdout
    assert "qwen2 (safetensors, awq)" in text
    assert "I4_64_Z" in text
    facts = json.loads(octavo_here("show", tmp_path, "--json").stdout)
    num_weights = facts["formats"]["I4_64_Z"]["weights"]
    assert num_weights == 2 * (128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)
    assert facts["formats"]["I4_64_Z"]["bytes"] * 8 / num_weights == 4 + 20 / 64
    assert "awq" in octavo_here("plan", tmp_path).stdout


def test_settings_are_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The pack cache must not serve the zeros of version 1 for version 2."""
    name = "layers.0.mlp.up_proj.weight"
    found = []
    for version in ("gptq", "gptq_v2"):
        model = tiny_model()
        write(model, tmp_path, CASES["gptq-4"][0] | {"checkpoint_format": version}, CASES["gptq-4"][1])
        found.append(open_checkpoint(tmp_path).weights.fingerprint(name))
    assert found[0] != found[1]


def damaged(name: str, change: dict[str, object], reason: str) -> Any:
    return pytest.param(name, change, {}, reason, id=reason[:40])


def broken(name: str, tensors: dict[str, Any], reason: str) -> Any:
    return pytest.param(name, {}, tensors, reason, id=reason[:40])


@pytest.mark.parametrize(
    ("name", "change", "tensors", "reason"),
    [
        damaged(
            "gptq-4", {"quant_method": "aqlm"}, "quant_method is 'aqlm': is not supported; supported are awq, .*; use"
        ),
        damaged("gptq-4", {"quant_method": None}, "quant_method is missing; supported are awq, .*; use"),
        damaged("gptq-4", {"bits": 5}, "bits is 5: is not supported; supported: 2, 3, 4, 8"),
        damaged("gptq-4", {"bits": True}, "bits is True"),
        damaged("gptq-4", {"bits": None}, r"quantization_config.bits is missing; supported: 2, 3, 4, 8"),
        damaged("gptq-4", {"group_size": 0}, "group_size is 0"),
        damaged("gptq-4", {"group_size": 48}, "group_size is 48: must be -1 or a divisor of the width"),
        damaged("gptq-4", {"group_size": 32}, "scales' has the shape"),
        damaged("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'.*gptq, gptq_v2"),
        damaged("gptq-4", {"sym": "yes"}, "sym is 'yes'"),
        damaged("gptq-4", {"dynamic": {"+:(a+)+": {}}}, "repeated groups"),
        damaged("gptq-4", {"dynamic": {"+:(": {}}}, "is not a regular expression"),
        damaged("awq-64", {"bits": 8}, "bits is 8: is not supported; supported: 4"),
        damaged("awq-64", {"version": "gemv"}, "version is 'gemv'"),
        damaged("awq-64", {"zero_point": False}, "zero_point is False"),
        damaged("bitnet", {"linear_class": "linear"}, "linear_class is 'linear'.*bitlinear, autobitlinear"),
        damaged("bitnet", {"quantization_mode": "late"}, "quantization_mode is 'late'.*offline, online"),
        damaged("bitnet", {"use_rms_norm": True}, "use_rms_norm is True: must be false"),
        damaged("fp8-block", {"weight_block_size": [128, 0]}, "weight_block_size is .*two whole numbers"),
        damaged("w4a16", {"format": "marlin-24"}, "format is 'marlin-24': is not supported; supported: pack-quantized"),
        damaged("w4a16", {"sparsity_config": {"format": "sparse"}}, "sparsity_config.format is 'sparse'"),
        damaged("w4a16", {"transform_config": {"config_groups": {"a": 1}}}, "transforms of activations"),
        damaged("w4a16", {"config_groups": {"g": {"targets": 7}}}, "config_groups.g.targets is 7"),
        damaged("w4a16", {"config_groups": {}}, "no target in config_groups matches"),
        broken("gptq-4", {"qzeros": None}, "has no tensor 'qzeros'"),
        broken("gptq-4", {"qweight": np.zeros((16, 128), np.int64)}, "has the type I64; it must be I32"),
        broken("gptq-4-act-order", {"g_idx": np.zeros(128, np.int32)}, "does not put 32 columns into each group"),
        broken("fp8-block", {"weight_scale_inv": np.zeros((7, 3), np.float32)}, r"shape \[7, 3\]; it must be"),
        broken("w4a16", {"weight_shape": np.array([128, -5])}, "weight_packed' has the shape"),
        broken(
            "bitnet", {"weight_scale": np.ones(2, np.float32)}, r"weight_scale' has the shape \[2\]; it must be \[1\]"
        ),
        broken("nf4", {NF4_STATE: np.frombuffer(b"[" * 900, np.uint8)}, "not a quantization state"),
        broken("nf4", {NF4_STATE: np.frombuffer(b'{"quant_type":"x"}', np.uint8)}, "supported: nf4, fp4"),
        broken("nf4", {"weight.absmax": np.zeros(3, np.float32)}, r"absmax' has the shape \[3\]"),
        broken("hqq-4", {"axis": np.array(0, np.int32)}, r"axis' is \[0\]; only 1 is supported"),
        broken("hqq-4", {"quant_zero": np.array(1, np.uint8)}, r"quant_zero' is \[1\]; only 0 is supported"),
        broken(
            "hqq-4", {"packing": np.frombuffer(b"5bit", np.uint8)}, "packing' is '5bit'; supported: 8bit_u8, 4bit_u8"
        ),
        broken("hqq-4", {"shape": np.array([128, -1])}, r"shape' is \[128, -1\]; it must be two numbers"),
        broken("hqq-4", {"W_q": np.zeros((7, 64), np.uint8)}, "W_q' does not hold 128 rows of 128 codes of 4 bits"),
        broken("hqq-4", {"scale": np.zeros((129, 1), np.float32)}, r"scale' has the shape \[129, 1\]"),
        broken("llm-int8", {"SCB": None}, r"but the scales of quant_method 'bitsandbytes' are missing"),
        broken("nf4", {NF4_STATE: None}, r"weight' has the type U8, but the scales .*weight.absmax"),
        broken(
            "fp8-block",
            {"weight_scale_inv": None},
            r"has the type F8_E4M3, but the scales of quant_method 'fp8' are missing .*input_scale",
        ),
        broken("fp8-tensor", {"weight_scale": None}, r"has the type F8_E4M3, but the scales of quant_method"),
        broken("w8a8", {"weight_scale": None}, r"type I8, .*'compressed-tensors'.*this layer has nothing else"),
        broken("w4a16", {"weight_scale": None}, r"weight_packed' has the type I32, .*also has weight_shape"),
        broken("llm-int8", {"weight_format": np.array(1, np.uint8)}, "is not 0"),
    ],
)
def test_damaged(name: str, change: dict[str, object], tensors: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Errors name the file and the key or the tensor, before any weight is made."""
    write(tiny_model(), tmp_path, {k: v for k, v in (CASES[name][0] | change).items() if v is not None}, CASES[name][1])
    stored = load_file(tmp_path / "model.safetensors")
    for part, array in tensors.items():
        stored.pop(f"model.layers.0.self_attn.q_proj.{part}")
        if array is not None:
            stored[f"model.layers.0.self_attn.q_proj.{part}"] = as_tensor(array)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=reason) as raised:
        open_checkpoint(tmp_path)
    assert str(raised.value).startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["gptq-4", "fp8-block", "w4a16", "llm-int8", "nf4", "hqq-4"])
def test_codes_without_a_configuration(name: str, tmp_path: Path) -> None:
    """They are never taken for plain numbers."""
    write(tiny_model(), tmp_path, *CASES[name])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"config.json: tensor .*no quantization_config explains it"):
        open_checkpoint(tmp_path)


def test_a_configuration_without_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that no tool has quantized are used as they are, which is said; they may be quantized while loading."""
    model = tiny_models.tiny_model("qwen2")
    tiny_models.save_safetensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": CASES["gptq-4"][0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantization is None
    (note,) = caplog.messages
    assert "quant_method is 'gptq', but no weight is quantized: the weights are used as they are" in note
    assert_close(logits_of(checkpoint), tiny_models.expected_logits(model, TOKENS))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "offset 1: not valid JSON"),
        ("[]", "a JSON object is needed"),
        ('{"group_size": 64}', "bits is missing; supp"),
    ],
)
def test_a_damaged_quantize_config(text: str, reason: str, tmp_path: Path) -> None:
    write(tiny_model(), tmp_path, *CASES["gptq-4"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=reason) as raised:
        open_checkpoint(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/quantize_config.json: ")


def test_zeros_that_are_not_symmetric(tmp_path: Path) -> None:
    config, packer = CASES["gptq-4"]
    w = RNG.normal(size=(32, 64)).astype(np.float32)
    [weight] = layer_file(tmp_path / "x.safetensors", packer(w, RNG).tensors, config | {"sym": True})
    with pytest.raises(ModelLoadError, match=r"zeros other than .* 7 in version 1 of the format and 8 in version 2"):
        weight.make()


@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
def test_a_symmetric_file_of_either_version(stored: int, said: str, tmp_path: Path) -> None:
    """Its zeros are known, so a file that names the wrong version means the same."""
    packed = gptq(4, 64, symmetric=True, version=stored)(RNG.normal(size=(32, 64)).astype(np.float32), RNG)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "checkpoint_format": said}
    [weight] = layer_file(tmp_path / "x.safetensors", packed.tensors, config)
    np.testing.assert_allclose(weight.make().dequantize(), packed.meaning, rtol=1e-6)


@pytest.mark.parametrize("where", ["config.json", "quant_config.json"])
def test_older_keys_of_awq(where: str, tmp_path: Path) -> None:
    config, packer = CASES["awq-64"]
    older = {"zero_point": True, "q_group_size": config["group_size"], "w_bit": 4, "version": "GEMM"}
    model = tiny_model()
    write(model, tmp_path, {"quant_method": "awq", **older}, packer)
    if where != "config.json":
        (tmp_path / where).write_text(json.dumps(older))
        text = json.loads((tmp_path / "config.json").read_text())
        del text["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(text))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantization == "awq"
    name = "layers.0.mlp.up_proj.weight"
    expected = dict(model.named_parameters())[f"model.{name}"].detach().numpy()
    np.testing.assert_allclose(checkpoint.weights[name].dequantize(), expected, rtol=1e-3)
