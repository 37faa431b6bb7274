"""Declarations of the transforms that turn an architecture's stored tensors into its graph's weights.

A stem is the name of a weight without its final `.weight` or `.bias`; `*` in it stands for the number of a layer or an
expert. The loader applies a table (`octavo.loader.transforms`); nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FileFormat = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class Permute:
    """Reorders the output rows of a weight and its bias.

    A table of biases, with one row per expert, is treated as a bias.

    order: function from a configuration to the stored index of each row, [out_features].
    only: the file format that needs it.
    one_way: only some files need it, so converting back leaves the rows alone.
    """

    stem: str
    order: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """Splits a fused weight, with its bias or table of biases, into parts by output rows.

    parts: their stems, in the order of the rows.
    rows: function from a configuration to the number of rows of each part; none if the file already has the parts.
    one_way: only some files fuse them, so converting back leaves the parts alone.
    """

    stem: str
    parts: tuple[str, ...]
    rows: Callable[[Any], tuple[int, ...]]
    only: FileFormat | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Stacks tensors that differ only in the last `*` of their stem, the expert, into one: [experts, out, in].

    one_way: only some files store them separately, so converting back leaves the stack alone.
    count: function from a configuration to the number of experts; tensors beyond it are dropped. None keeps all.
    """

    stem: str
    whole: str
    only: FileFormat | None = None
    one_way: bool = False
    count: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Splits a matrix into one matrix per head, stacked: [heads, out, in].

    heads: function from a configuration to the number of heads.
    transposed: each becomes [in, out]; quantized numbers become float32.
    one_way: only some files have a single matrix, so converting back leaves the stack alone.
    """

    stem: str
    whole: str
    heads: Callable[[Any], int]
    transposed: bool = False
    only: FileFormat | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class OneRow:
    """Turns a vector into a matrix with one row."""

    stem: str
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transposes a matrix stored as [in_features, out_features], such as a Conv1D. Vectors stay unchanged.

    whole: the stem of the result; None keeps the name.
    rows: function from a configuration to the number of rows of the result. A matrix that already has them is left
        alone, since some files store it that way. None transposes every matrix.
    """

    stem: str
    only: FileFormat | None = None
    whole: str | None = None
    rows: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Adds a constant, such as the 1 of `1 + weight`, to a weight once, as float32."""

    stem: str
    addend: float
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class NegativeExp:
    """Replaces a stored logarithm x with -e^x, once, as float32."""

    stem: str
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class Flatten:
    """Turns a dense tensor with several dimensions, such as the kernels of a depthwise convolution, into a vector.

    rows: function from a configuration to the number of rows of the original matrix, for converting back; None if that
        is impossible.
    """

    stem: str
    only: FileFormat | None = None
    rows: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Unfolded:
    """Turns a dense tensor with more than two dimensions into a matrix [out, in].

    It is used for the convolution that embeds patches, for example.

    frames: stem of the matching tensor for the second of two frames. For each channel, its values follow the values of
        the first frame.
    kernel: function from a configuration to the dimensions after the first, for converting back: () if the file already
        stores a matrix. None if converting back is impossible.
    """

    stem: str
    only: FileFormat | None = None
    frames: str | None = None
    kernel: Callable[[Any], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Softplus:
    """Replaces a stored vector x with log(1 + e^x) + addend, once, as float32."""

    stem: str
    addend: float = 0.0
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Multiplies each row of a small dense tensor by a factor of its own, once, as float32.

    It is used for the kernels of a depthwise convolution, for example.

    factors: function from a configuration to the factor of each row.
    """

    stem: str
    factors: Callable[[Any], NDArray[np.float32]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Divides each row of a matrix by its length, once, as float32.

    applies: function that returns whether a configuration needs it.
    """

    stem: str
    applies: Callable[[Any], bool]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class ByDistance:
    """Expands a table of buckets, [buckets, heads], to biases by distance, [heads, distances], once, as float32.

    buckets: function from a configuration to the bucket of each distance, starting with the furthest key before a
        query.
    """

    stem: str
    buckets: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class DistanceVectors:
    """Expands a table of buckets, [buckets, hidden], to vectors by distance, [heads, head_dim, distances], as float32.

    Each row, normalized with the weights of `norm` if a file has them, goes through the projections of every layer.

    projections: function from a configuration to the stems of the projections and of their results; weights with other
        names are kept.
    buckets: function from a configuration to the row of each distance, starting with the furthest key before a query.
    """

    stem: str
    norm: str
    projections: Callable[[Any], Mapping[str, str]]
    buckets: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class Ones:
    """Adds the weights of a norm whose weights are in no file: a vector of ones, one for each column of a given matrix.

    The matrix itself is kept.

    whole: the stem of the norm.
    """

    stem: str
    whole: str
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class OfLayers:
    """Applies a transform only to the tensors of some layers.

    layers: function from a configuration to their numbers.
    """

    step: Transform
    layers: Callable[[Any], Collection[int]]

    @property
    def stem(self) -> str:
        return self.step.stem

    @property
    def only(self) -> FileFormat | None:
        return self.step.only


@dataclass(frozen=True, slots=True)
class PermuteColumns:
    """Reorders the columns of a plain matrix.

    order: as in `Permute`, [in_features].
    """

    stem: str
    order: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Makes two-tap convolution kernels (s, 1 - s) from the share s that the previous token has in each column.

    parts: the stems of the kernels, whose shares the file stores stacked: [parts, 1, 1, cols] in GGUF files.
    """

    stem: str
    parts: tuple[str, ...]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class HeadSums:
    """Expands a vector with one weight per column of each head, [heads * dim], to matrices [heads, dim, dim].

    All rows of a head's matrix are equal. The product of the matrix and the head's columns is thus their weighted sum,
    repeated in every column.

    heads: function from a configuration to the number of heads.
    """

    stem: str
    heads: Callable[[Any], int]
    only: FileFormat | None = None


Transform = (
    (Permute | Split | Stack | Heads | OneRow | Transpose | Fold | Flatten | NegativeExp)
    | (ScaledRows | Softplus | Unfolded | UnitRows | Ones | ByDistance | OfLayers)
    | DistanceVectors
    | (PermuteColumns | TokenShares | HeadSums)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The table that turns an architecture's stored tensors into its graph's weights, for both file formats.

    prefixes: prefixes of the names in safetensors files; the first that matches is removed.
    names: stems in files -> stems in the graph: {"blk.*.ffn_norm": "layers.*.pre_feedforward_layernorm"}. GGUF files
        need only the ones that differ from `octavo.loader.tensor_names`. A stem with its `.weight` or `.bias`, or a
        name that has neither, is replaced as a whole: {"blk.*.attn_sinks.weight": "layers.*.self_attn.sinks"}.
    transforms: applied in this order after renaming. A transform whose stem a file lacks does nothing.
    """

    # Prefixes of text models, and of the text part of vision models.
    prefixes: tuple[str, ...] = (
        *("language_model.model.", "model.language_model.", "model.text_model.", "language_model."),
        *("llm.model.", "language.model.", "llm.", "language.", "model."),
    )
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    transforms: tuple[Transform, ...] = ()


def halves_of_pairs(num_heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.intp]:
    """Reorder the rows of q or k to the half-split rotary layout, for a file that keeps the two columns of a pair
    together.

    Column i of a head rotates with column i + rotary_dim / 2 in the graph, and with its neighbour in the file.
    """
    head = np.arange(head_dim)
    head[:rotary_dim] = np.concatenate([head[0:rotary_dim:2], head[1:rotary_dim:2]])
    return (head_dim * np.arange(num_heads)[:, None] + head).reshape(-1)


def gate_and_up() -> Transform:
    """Return the transform that splits `gate_up_proj` into its halves."""
    parts = ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj")
    return Split("layers.*.mlp.gate_up_proj", parts, lambda c: (c.mlp.intermediate_size,) * 2)


def fused_qkv(only: FileFormat | None = None) -> Transform:
    """Return the transform that splits a matrix in which q, k and v follow one another, for a `DecoderConfig`."""
    parts = tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv")

    def rows(cfg: Any) -> tuple[int, ...]:
        return tuple(heads * cfg.head_dim for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads))

    return Split("layers.*.self_attn.qkv_proj", parts, rows, only)


def rotary_pairs(only: FileFormat | None = None, *, norms: bool = False) -> tuple[Transform, ...]:
    """Return `halves_of_pairs` transforms for q and k of every layer of a model with a `DecoderConfig`.

    norms: also reorder norms that cover all heads.
    """
    part = "norm" if norms else "proj"

    def order(cfg: Any, heads: int) -> NDArray[np.intp]:
        return halves_of_pairs(heads, cfg.head_dim, cfg.rope.rotary_dim)

    return (
        Permute(f"layers.*.self_attn.q_{part}", lambda c: order(c, c.num_heads), only),
        Permute(f"layers.*.self_attn.k_{part}", lambda c: order(c, c.num_kv_heads), only),
    )


def stacked_experts(only: FileFormat = "safetensors", *, one_way: bool = False) -> tuple[Transform, ...]:
    """Return the transforms that stack experts. Safetensors files store one tensor per expert.

    GGUF files have stacked them since April 2024.
    """
    return tuple(
        Stack(f"layers.*.mlp.experts.*.{part}_proj", f"layers.*.mlp.experts.{part}_proj", only, one_way)
        for part in ("gate", "up", "down")
    )


def shared_expert_names() -> dict[str, str]:
    """Map the GGUF names of the shared experts, and of the bias used to select routed ones, to the graph's names."""
    names = {f"blk.*.ffn_{part}_shexp": f"layers.*.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    bias = "layers.*.mlp.gate.e_score_correction"
    return names | {"blk.*.exp_probs_b": bias, bias + "_bias": bias + ".bias"}


def fused_experts(width: Callable[[Any], int]) -> tuple[Transform, ...]:
    """Return the transforms for experts stored as `gate_up_columns` and `down_columns`: stacks of [in, out] or, in
    newer files, [out, in].

    width: function from a configuration to the width of an expert's gate.
    """
    stem = "layers.*.mlp.experts."
    return (
        Transpose(stem + "gate_up_columns", "safetensors", whole=stem + "gate_up_proj", rows=lambda c: 2 * width(c)),
        Transpose(stem + "down_columns", "safetensors", whole=stem + "down_proj", rows=lambda c: c.hidden_size),
        Split(stem + "gate_up_proj", (stem + "gate_proj", stem + "up_proj"), lambda c: (width(c),) * 2, "safetensors"),
    )
