"""Quantized safetensors checkpoints, packed by the published formula of each format, with the numbers they
represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

Floats = NDArray[np.float32]
Tensors = dict[str, Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_NF4 = "-1 -0.69619280 -0.52507305 -0.39491749 -0.28444138 -0.18477343 -0.09105004 0 0.07958030 0.16093020 0.24611230"
NF4 = np.array(f"{_NF4} 0.33791524 0.44070983 0.56261700 0.72295684 1".split(), np.float32)
FP4 = np.array([0, 0.005208333, 0.6666667, 1, 0.3333333, 0.5, 0.1666667, 0.25], np.float32)
FP4 = np.concatenate([FP4, -FP4])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Packed:
    """The stored tensors of a layer by their last names, and the matrix that they represent."""

    tensors: Tensors
    meaning: Floats


def tiny_model(width: int = 128, inner: int = 256, heads: int = 4, kv_heads: int = 2) -> PreTrainedModel:
    """Make a two-layer Qwen 2 with random weights.

    width, inner: columns of the hidden states and of the MLP.
    """
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            parameter += float("norm" in name)
    return model


Rng = np.random.Generator
Packer = Callable[[Floats, Rng], Packed]


def words(values: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack codes [n, m] along n without gaps, with the first in the lowest bits: [n * bits / 32, m]."""
    out = np.zeros((-(-len(values) * bits // 32), values.shape[1]), np.uint64)
    for i, row in enumerate(values.astype(np.uint64)):
        word, shift = divmod(i * bits, 32)
        out[word] |= row << np.uint64(shift) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            out[word + 1] |= row >> np.uint64(32 - shift)
    return out.astype(np.uint32).view(np.int32)


def quantize(w: Floats, groups: NDArray[Any], bits: int, zeros: NDArray[Any]) -> tuple[Any, ...]:
    """Return codes [out, in], scales [out, groups] and scale * (code - zero), given the group of each column."""
    scales = np.stack([np.abs(w[:, groups == g]).max(1) for g in range(zeros.shape[1])], 1) * 2.2 / ((1 << bits) - 1)
    scales = scales.astype(np.float16)
    each, zero = scales[:, groups].astype(np.float32), zeros[:, groups].astype(np.float32)
    codes = np.clip(np.rint(w / each) + zero, 0, (1 << bits) - 1)
    return codes.astype(np.int64), scales, (each * (codes.astype(np.float32) - zero)).astype(np.float32)


def some_zeros(rng: Rng, shape: tuple[int, int], bits: int, symmetric: bool) -> NDArray[Any]:
    half = 1 << (bits - 1)
    return np.full(shape, half) if symmetric else rng.integers(max(half - 4, 0), half + min(half, 4), shape)


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, version: int = 1) -> Packer:
    """Pack AutoGPTQ's format: scale * (code - (stored zero + 1)); version 2 stores the zero itself."""

    def pack(w: Floats, rng: Rng) -> Packed:
        width = group if group > 0 else w.shape[1]
        groups = np.arange(w.shape[1]) // width
        if act_order:
            groups = rng.permutation(groups)
        zeros = some_zeros(rng, (len(w), groups.max() + 1), bits, symmetric)
        codes, scales, meaning = quantize(w, groups, bits, zeros)
        stored = (zeros - (version == 1)) % (1 << bits)
        tensors = {
            "qweight": words(codes.T, bits),
            "qzeros": words(stored, bits).T,
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
        return Packed(tensors, meaning)

    return pack


def awq(group: int) -> Packer:
    """Pack AutoAWQ's format: nibble i of a word holds the code of row AWQ_ORDER[i]."""

    def interleaved(values: NDArray[Any]) -> NDArray[np.int32]:
        out = np.zeros((len(values), values.shape[1] // 8), np.uint32)
        for column in range(out.shape[1]):
            for i, row in enumerate(AWQ_ORDER):
                out[:, column] |= values[:, column * 8 + row].astype(np.uint32) << np.uint32(4 * i)
        return out.view(np.int32)

    def pack(w: Floats, rng: Rng) -> Packed:
        groups = np.arange(w.shape[1]) // (group if group > 0 else w.shape[1])
        zeros = some_zeros(rng, (len(w), groups.max() + 1), 4, False)
        codes, scales, meaning = quantize(w, groups, 4, zeros)
        return Packed({"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T}, meaning)

    return pack


def fp8(
    scale_name: str, block: tuple[int | None, int | None], dtype: Any = torch.float32, *, flat: bool = False
) -> Packer:
    """Pack data * scale with one scale per block; None means all rows or columns."""

    def pack(w: Floats, _: Rng) -> Packed:
        rows, columns = block[0] or len(w), block[1] or w.shape[1]
        scales = np.zeros((-(-len(w) // rows), -(-w.shape[1] // columns)), np.float32)
        for i, j in np.ndindex(scales.shape):
            part = w[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = np.abs(part).max() / 448
        scales = torch.from_numpy(scales).to(dtype).float().numpy()
        each = np.repeat(np.repeat(scales, rows, 0)[: len(w)], columns, 1)[:, : w.shape[1]]
        data = torch.from_numpy(w / each).to(torch.float8_e4m3fn)
        stored = torch.from_numpy(scales).to(dtype)
        tensors = {"weight": data, scale_name: stored.reshape(-1) if flat else stored, "input_scale": np.float32([0.5])}
        return Packed(tensors, data.float().numpy() * each)

    return pack


def integers(bits: int, group: int | None, *, packed: bool, symmetric: bool = True, act_order: bool = False) -> Packer:
    """Pack compressed-tensors' format: signed codes and zeros; packed ones are stored plus half their range."""

    def pack(w: Floats, rng: Rng) -> Packed:
        groups = np.arange(w.shape[1]) // (group or w.shape[1])
        if act_order:
            groups = rng.permutation(groups)
        zeros = some_zeros(rng, (len(w), groups.max() + 1), bits, symmetric)
        codes, scales, meaning = quantize(w, groups, bits, zeros)
        half = 1 << (bits - 1)
        tensors: Tensors = {"weight_scale": scales}
        if act_order:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        if packed:
            tensors |= {"weight_packed": words(codes.T, bits).T, "weight_shape": np.array(w.shape)}
        else:
            tensors["weight"] = (codes - half).astype(np.int8)
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros, bits) if packed else (zeros - half).astype(np.int8)
        return Packed(tensors, meaning)

    return pack


def hqq(bits: int, group: int) -> Packer:
    """Pack (code - zero) * scale with fractional zeros; groups of columns are rows, packed from the highest bits
    down.
    """
    per_number = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    name = "3bit_32" if bits == 3 else f"{bits}bit_u8"

    def pack(w: Floats, _: Rng) -> Packed:
        rows = w.reshape(-1, group)
        low, high = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        scale = ((high - low) / ((1 << bits) - 1)).astype(np.float32)
        zero = (-low / scale).astype(np.float32)
        codes = np.clip(np.rint(rows / scale + zero), 0, (1 << bits) - 1).astype(np.int64)
        step = -(-len(rows) // per_number)
        padded = np.zeros((step * per_number, group), np.int64)
        padded[: len(rows)] = codes
        stored = sum(part << bits * (per_number - 1 - i) for i, part in enumerate(np.split(padded, per_number)))
        numbers = {"nbits": bits, "group_size": group, "axis": 1}
        flags = {"view_as_float": 0, "quant_scale": 0, "quant_zero": 0, "channel_wise": 1, "offload_meta": 0}
        tensors: Tensors = {
            "W_q": np.asarray(stored).astype(np.int32 if bits == 3 else np.uint8),
            "scale": scale,
            "zero": zero,
            "shape": np.array(w.shape),
            "packing": np.frombuffer(name.encode(), np.uint8).copy(),
            **{part: np.array(value, np.int32) for part, value in numbers.items()},
            **{part: np.array(value, np.uint8) for part, value in flags.items()},
        }
        return Packed(tensors, ((codes - zero) * scale).reshape(w.shape).astype(np.float32))

    return pack


def nearest(values: Floats, table: Floats) -> NDArray[np.uint8]:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def nvfp4(w: Floats, _: Rng) -> Packed:
    """Pack E2M1 with an E4M3 scale per 16 columns, all divided by one float."""
    blocks = w.reshape(len(w), -1, 16)
    overall = np.float32(6 * 448 / np.abs(w).max())
    local = torch.from_numpy(np.abs(blocks).max(-1) / 6 * overall).to(torch.float8_e4m3fn)
    scales = local.float().numpy() / overall
    codes = nearest(blocks / scales[..., None], E2M1)
    pairs = codes.reshape(len(w), -1, 2)
    tensors = {
        "weight_packed": pairs[..., 0] | pairs[..., 1] << 4,
        "weight_scale": local,
        "weight_global_scale": np.array([overall]),
    }
    return Packed(tensors, (E2M1[codes] * scales[..., None]).reshape(w.shape))


def mxfp4(w: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Floats]:
    """Return codes with two columns per byte [*, in / 32, 16], exponents [*, in / 32], and the numbers they
    represent.
    """
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    codes = nearest(blocks / 2 ** exponents[..., None], E2M1)
    pairs = codes.reshape(*codes.shape[:-1], 16, 2)
    meaning = E2M1[codes] * np.float32(2) ** exponents[..., None].astype(np.float32)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).astype(np.uint8), meaning.reshape(w.shape)


def mxfp4_packed(w: Floats, _: Rng) -> Packed:
    codes, exponents, meaning = mxfp4(w)
    return Packed({"weight_packed": codes.reshape(len(w), -1), "weight_scale": exponents}, meaning)


def llm_int8(w: Floats, _: Rng) -> Packed:
    """Pack code * scale / 127 with one scale per row."""
    scb = np.abs(w).max(1).astype(np.float32)
    codes = np.rint(w / scb[:, None] * 127).astype(np.int8)
    tensors = {"weight": codes, "SCB": scb, "weight_format": np.array(0, np.uint8)}
    return Packed(tensors, codes.astype(np.float32) * (scb[:, None] / np.float32(127)))


def bitnet(*, divides: bool) -> Packer:
    """Pack codes of -1, 0 and 1, four rows per byte, with one scale that divides or multiplies the product."""

    def pack(w: Floats, _: Rng) -> Packed:
        scale = np.float32(np.float16(np.abs(w).mean()))
        codes = np.clip(np.rint(w / scale), -1, 1)
        quarters = (codes + 1).astype(np.uint8).reshape(4, -1, w.shape[1])
        packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        stored = np.float32(1) / scale if divides else scale
        return Packed({"weight": packed, "weight_scale": np.array([stored], np.float32)}, codes * scale)

    return pack


def four_bits(kind: str, block: int, *, nested: bool, table: Floats | None = None) -> Packer:
    """Pack scale * table[code] in blocks over the flattened matrix.

    table: None means the published table of `kind`.
    """
    table = (NF4 if kind == "nf4" else FP4) if table is None else table

    def pack(w: Floats, _: Rng) -> Packed:
        flat = np.concatenate([w.reshape(-1), np.zeros(-w.size % block, np.float32)]).reshape(-1, block)
        absmax = np.abs(flat).max(1)
        state: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
        tensors: Tensors = {"weight.absmax": absmax, "weight.quant_map": table}
        if nested:
            offset = np.float32(absmax.mean())
            nested_map = np.linspace(-1, 1, 256, dtype=np.float32)
            padded = np.concatenate([absmax - offset, np.zeros(-len(absmax) % 256, np.float32)]).reshape(-1, 256)
            maxima = np.abs(padded).max(1)
            codes = nearest(padded / maxima[:, None], nested_map)
            absmax = (nested_map[codes] * maxima[:, None] + offset).reshape(-1)[: len(absmax)]
            state |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
            tensors |= {"weight.absmax": codes.reshape(-1)[: len(absmax)]}
            tensors |= {"weight.nested_absmax": maxima, "weight.nested_quant_map": nested_map}
        codes = nearest(flat / absmax[:, None], table)
        pairs = codes.reshape(-1)[: w.size].reshape(-1, 2)
        tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        return Packed(tensors, (table[codes] * absmax[:, None]).reshape(-1)[: w.size].reshape(w.shape))

    return pack


def compressed(form: str, weights: Mapping[str, object], targets: tuple[str, ...] = ("Linear",)) -> dict[str, object]:
    groups = {"group_0": {"targets": list(targets), "weights": dict(weights), "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def _gptq(bits: int, group: int, **options: Any) -> tuple[dict[str, object], Packer]:
    packer = gptq(bits, group, **options)
    version = "gptq_v2" if options.get("version") == 2 else "gptq"
    config: dict[str, object] = {"quant_method": "gptq", "bits": bits, "group_size": group}
    config |= {"checkpoint_format": version, "sym": options["symmetric"], "desc_act": options.get("act_order", False)}
    return config, packer


def integer_case(bits: int, group: int | None, **options: Any) -> tuple[dict[str, object], Packer]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group" if group else "channel", "group_size": group}
    form = "pack-quantized" if options["packed"] else "int-quantized"
    return compressed(form, weights), integers(bits, group, **options)


_BITSANDBYTES: dict[str, object] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_FLOAT8 = {"num_bits": 8, "type": "float"}

# Names of layouts, with the configuration and the packer of a layer.
CASES: dict[str, tuple[dict[str, object], Packer]] = {
    **{f"gptq-{bits}": _gptq(bits, 64, symmetric=False) for bits in (2, 3, 4, 8)},
    "gptq-4-symmetric-v2": _gptq(4, 128, symmetric=True, version=2),
    "gptq-4-act-order": _gptq(4, 32, symmetric=True, act_order=True),
    "gptq-3-act-order": _gptq(3, 32, symmetric=False, act_order=True),
    "gptq-8-row": _gptq(8, -1, symmetric=True),
    "awq-64": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(64)),
    "awq-row": ({"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True}, awq(-1)),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8("weight_scale_inv", (128, 128), torch.bfloat16),
    ),
    "fp8-small-block": ({"quant_method": "fp8", "weight_block_size": [64, 32]}, fp8("weight_scale_inv", (64, 32))),
    "fp8-tensor": ({"quant_method": "fp8"}, fp8("weight_scale", (None, None), flat=True)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8("weight_scale", (1, None))),
    "w4a16": integer_case(4, 64, packed=True),
    "w4a16-zeros": integer_case(4, 64, packed=True, symmetric=False),
    "w4a16-act-order": integer_case(4, 32, packed=True, act_order=True),
    "w3a16": integer_case(3, 64, packed=True),
    "w8a16": integer_case(8, None, packed=True),
    "w8a8": integer_case(8, None, packed=False),
    "w8a8-zeros": integer_case(8, None, packed=False, symmetric=False),
    "float-row": (compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}), fp8("weight_scale", (1, None))),
    "float-block": (
        compressed("float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]}),
        fp8("weight_scale", (128, 128)),
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), nvfp4),
    "mxfp4": (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float"}), mxfp4_packed),
    **{f"hqq-{bits}": ({"quant_method": "hqq"}, hqq(bits, 64)) for bits in (1, 2, 3, 4, 8)},
    "hqq-4-row": ({"quant_method": "hqq"}, hqq(4, 128)),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, bitnet(divides=False)),
    "bitnet-divided": ({"quant_method": "bitnet", "linear_class": "bitlinear"}, bitnet(divides=True)),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "nf4": (_BITSANDBYTES, four_bits("nf4", 64, nested=False)),
    "nf4-nested": (_BITSANDBYTES, four_bits("nf4", 64, nested=True)),
    "fp4-long-blocks": (_BITSANDBYTES, four_bits("fp4", 512, nested=True)),
}

# Layouts for which there is no kernel, with their stored and their packed type.
SLOWER: dict[str, tuple[dict[str, object], Packer, str, str]] = {
    "group of 16": (*integer_case(4, 16, packed=True), "I4_16", "F16"),
    **{f"{bits} bits": (*integer_case(bits, 64, packed=True), f"I{bits}_64", "I8_64") for bits in (5, 6, 7)},
    "block of 16": (_BITSANDBYTES, four_bits("nf4", 16, nested=False), "NF4_16", "F16"),
    "own table": (
        _BITSANDBYTES,
        four_bits("nf4", 64, nested=False, table=np.linspace(-1, 1, 16, dtype="f4")),
        "CUSTOM4_64",
        "F16",
    ),
}


def as_tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))


def write(model: PreTrainedModel, directory: Path, config: Mapping[str, object], packer: Packer) -> set[str]:
    """Write the model with all linears except `o_proj` and the head quantized, and set its numbers to those they
    represent.

    Returns the names of the quantized weights in the graph.
    """
    rng, tensors, quantized = np.random.default_rng(3), {}, set()
    for name, parameter in model.named_parameters():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj") or ".o_proj" in stem:
            tensors[name] = parameter.detach().clone()
            continue
        layer = packer(parameter.detach().numpy(), rng)
        tensors |= {f"{stem}.{part}": as_tensor(array).contiguous() for part, array in layer.tensors.items()}
        parameter.data = torch.from_numpy(layer.meaning.astype(np.float32))
        quantized.add(name.removeprefix("model."))
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    text = model.config.to_dict() | {"quantization_config": dict(config)}
    (directory / "config.json").write_text(json.dumps(text, default=str))
    return quantized
