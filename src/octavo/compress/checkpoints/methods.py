"""The types of quantized checkpoints: how each type quantizes a matrix, and what it writes as `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

from octavo.compress.checkpoints import awq, gptq
from octavo.compress.checkpoints.folding import ColumnFold, smoothing_scale
from octavo.compress.checkpoints.grids import GridForm, nearest
from octavo.compress.checkpoints.input_statistics import InputStatistics
from octavo.errors import UsageError
from octavo.quantization import at_load
from octavo.quantization.checkpoints import awq as awq_layout
from octavo.quantization.checkpoints import bitsandbytes, compressed_tensors
from octavo.quantization.checkpoints import gptq as gptq_layout
from octavo.quantization.checkpoints._stored import StoredTensor
from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import DenseWeight, GGMLWeight, Weight, check_finite

MethodKind = Literal["gptq", "rtn", "awq", "nf4", "fp4", "int8", "fp8", "w8a8", "mxfp4"]
TYPES: Mapping[str, tuple[MethodKind, int]] = {
    **{f"gptq-{bits}bit": ("gptq", bits) for bits in (2, 3, 4, 8)},
    **{f"rtn-{bits}bit": ("rtn", bits) for bits in (2, 3, 4, 8)},
    "awq": ("awq", 4),
    "nf4": ("nf4", 4),
    "fp4": ("fp4", 4),
    "int8": ("int8", 8),
    "fp8": ("fp8", 8),
    "w8a8": ("w8a8", 8),
    "mxfp4": ("mxfp4", 4),
}
"""Type name -> (method, bits)."""

GROUPS = (128, 64, 32)
_WITH_GROUPS: tuple[MethodKind, ...] = ("gptq", "rtn", "awq")
_WITH_INPUTS: tuple[MethodKind, ...] = ("gptq", "awq", "w8a8")
_EVENNESS: Mapping[MethodKind, float] = {"gptq": 1.0, "awq": 0.5}
_MXFP4_BLOCK = 32
_STEPS: Mapping[MethodKind, tuple[int, int]] = {"awq": (8, 1), "mxfp4": (1, _MXFP4_BLOCK), "nf4": (1, 2), "fp4": (1, 2)}
"""The numbers of rows and columns of a matrix must be multiples of these."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of a type; None means the type's default.

    group_size: 32, 64, 128, or -1 for a whole row.
    strength: strength of smoothing, from 0 (none) to 1.
    """

    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    damping: float | None = None
    strength: float | None = None


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A quantization type with its options.

    model_dtype: dtype of the model's other weights, such as `bfloat16`.
    """

    kind: MethodKind
    form: GridForm
    options: gptq.GPTQOptions
    strength: float
    model_dtype: str

    @property
    def needs_inputs(self) -> bool:
        return self.kind in _WITH_INPUTS

    @property
    def evenness(self) -> float:
        """Fraction by which the weights of input rows are evened out; see `input_statistics.evened`."""
        return _EVENNESS.get(self.kind, 0.0)

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Check that the type can hold a matrix [rows, columns]. Raises UsageError."""
        width = shape[1]
        remedy = f"or leave it as it is with --keep '{re.escape(tensor.removesuffix('.weight'))}'"
        if self.kind in _WITH_GROUPS and width % self.form.columns(width):
            fitting = [str(size) for size in GROUPS if width % size == 0] + ["-1"]
            raise UsageError(
                f"tensor {tensor!r:.100} has rows of {width} numbers, not a multiple of the group size "
                f"{self.form.group}; use --group-size {' or '.join(fitting)}, {remedy}",
                param="group_size",
            )
        steps = (32 // gcd(32, self.form.bits),) * 2 if self.kind in ("gptq", "rtn") else _STEPS.get(self.kind, (1, 1))
        for what, count, step in zip(("rows", "columns"), shape, steps, strict=True):
            if count % step:
                raise UsageError(
                    f"tensor {tensor!r:.100} has {count} {what}; {self.kind} needs a multiple of {step}: use int8 or "
                    f"fp8, {remedy}",
                    param="type",
                )

    def scale(self, fold: ColumnFold, statistics: InputStatistics, matrices: Sequence[Floats]) -> Floats | None:
        """Return the scale for the columns of these matrices, which share an input, or None to leave them unscaled."""
        if self.kind == "awq":
            return awq.searched_scale(fold, statistics, matrices, self.form)
        if self.kind == "w8a8" and fold.is_norm and self.strength > 0:
            return smoothing_scale(statistics.largest, matrices, self.strength)
        return None

    def weight(self, matrix: Floats, statistics: InputStatistics | None) -> Weight:
        """Return the canonical weight of a matrix. Raises ValueError for numbers that the type cannot represent.

        statistics: None for a method that needs no inputs, or for an expert that no token chose.
        """
        check_finite(matrix)
        if self.kind == "gptq" and statistics is not None:
            if statistics.factor is None:
                statistics.factor = gptq.factor_of(statistics.gram, self.options)
            return gptq.quantized(matrix, statistics.factor, self.form)
        if self.kind == "awq" and statistics is not None:
            return awq.quantized(matrix, statistics, self.form)
        if self.kind in _WITH_GROUPS:
            return nearest(matrix, self.form)
        if self.kind == "mxfp4":
            from octavo.backends.quantizers import quantize

            return GGMLWeight.from_bytes("MXFP4", quantize("MXFP4", matrix), matrix.shape)
        return at_load.quantized(DenseWeight(matrix), "int8" if self.kind == "w8a8" else self.kind)

    def tensors(self, weight: Any) -> dict[str, StoredTensor]:
        """Return the stored tensors of a weight made by `weight`, named without the layer's prefix, such as
        `qweight`.
        """
        if self.kind == "awq":
            return awq_layout.tensors(weight)
        if self.kind in ("gptq", "rtn"):
            return gptq_layout.tensors(weight)
        if self.kind in ("nf4", "fp4", "int8"):
            return bitsandbytes.tensors(weight, self.model_dtype)
        return compressed_tensors.tensors(weight)

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config`.

        skipped: modules whose matrix is not quantized.
        """
        if self.kind in ("gptq", "rtn"):
            return _gptq_config(self.form, self.options, skipped)
        if self.kind == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.form.group or -1,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": [*skipped],
            }
        if self.kind in ("nf4", "fp4", "int8"):
            return _bitsandbytes_config(self.kind, self.model_dtype, skipped)
        return _compressed_config(self.kind, skipped)


def choose_method(type_name: str, choices: Choices, widths: Sequence[int], model_dtype: str) -> QuantizationMethod:
    """Return the method of a type for matrices with these row widths.

    The default group is the largest of 128, 64 and 32 that divides all widths, or else the whole row. Raises UsageError
    for an option that the type does not have.
    """
    kind, bits = TYPES[type_name]
    allowed = {
        "group_size": kind in _WITH_GROUPS,
        "symmetric": kind in ("gptq", "rtn"),
        "act_order": kind == "gptq",
        "damping": kind == "gptq",
        "strength": kind == "w8a8",
    }
    for name, is_allowed in allowed.items():
        if getattr(choices, name) is not None and not is_allowed:
            flag = {"symmetric": "--asymmetric", "strength": "--smoothing"}.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{flag} does not apply to --type {type_name}; leave it out", param=name)
    size = choices.group_size
    if size is None:
        size = next((group for group in GROUPS if all(width % group == 0 for width in widths)), -1)
    symmetric = kind != "awq" and (choices.symmetric is None or choices.symmetric)
    form = GridForm(bits, None if size == -1 else size, symmetric)
    damping = gptq.DAMPING if choices.damping is None else choices.damping
    options = gptq.GPTQOptions(bool(choices.act_order), damping)
    return QuantizationMethod(kind, form, options, 0.5 if choices.strength is None else choices.strength, model_dtype)


def _gptq_config(form: GridForm, options: gptq.GPTQOptions, skipped: Sequence[str]) -> dict[str, Any]:
    config = {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": form.group or -1,
        "desc_act": options.act_order,
        "sym": form.symmetric,
        "damp_percent": options.damping,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "true_sequential": False,
        "static_groups": False,
        "lm_head": False,
    }
    if inside := [name for name in skipped if name != "lm_head"]:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in inside}
    return config


def _bitsandbytes_config(kind: MethodKind, model_dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": [*skipped],
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
    }
    if kind != "int8":
        config |= {
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": model_dtype,
            "bnb_4bit_quant_storage": "uint8",
        }
    return config


def _compressed_config(kind: MethodKind, skipped: Sequence[str]) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "int" if kind == "w8a8" else "float", "symmetric": True}
    weights = {**number, "strategy": "channel", "dynamic": False}
    activations: dict[str, Any] | None = {**number, "strategy": "token", "dynamic": True}
    form = {"fp8": "float-quantized", "w8a8": "int-quantized"}.get(kind, "mxfp4-pack-quantized")
    if kind == "mxfp4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": _MXFP4_BLOCK}
        activations = None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*skipped],
    }
