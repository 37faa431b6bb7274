"""Declarations of the transforms from an architecture's stored tensors to the weights of its graph.

A stem is the name of a weight without its final `.weight` or `.bias`; `*` in it is a number, that of a layer or an
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
    """Puts the output rows of weight and bias in another order. A table of biases, one row an expert, counts as biases.

    order: from a configuration to the stored row of each row, [out_features].
    only: the files that need it.
    one_way: only some files need it, so the way back leaves the rows.
    """

    stem: str
    order: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """Cuts a fused weight, with its bias or table of biases, into parts by output rows.

    parts: their stems, in the order of the rows.
    rows: from a configuration to the rows of each part; none: the file has the parts already.
    one_way: only some files have them joined, so the way back leaves the parts.
    """

    stem: str
    parts: tuple[str, ...]
    rows: Callable[[Any], tuple[int, ...]]
    only: FileFormat | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Joins tensors that differ in the last `*` of their stem, the expert, to one: [experts, out, in].

    one_way: only some files have them apart, so the way back leaves the whole.
    count: from a configuration to the number of experts, without the tensors beyond it; None takes all.
    """

    stem: str
    whole: str
    only: FileFormat | None = None
    one_way: bool = False
    count: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Cuts a matrix into those of its heads, one below the other: [heads, out, in].

    heads: from a configuration to their number.
    transposed: each becomes [in, out]; quantized numbers become float32.
    one_way: only some files have one matrix, so the way back leaves those of the heads.
    """

    stem: str
    whole: str
    heads: Callable[[Any], int]
    transposed: bool = False
    only: FileFormat | None = None
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class OneRow:
    """Makes a matrix of one row of a vector."""

    stem: str
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transposes a matrix stored as [in_features, out_features], such as a Conv1D. Vectors stay unchanged.

    whole: the stem of the result; None means the same.
    rows: from a configuration to the rows of the result; a matrix that has as many stays as it is, since some files
    have it in this form; None means all are transposed.
    """

    stem: str
    only: FileFormat | None = None
    whole: str | None = None
    rows: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Adds a constant that the model adds to the weight, for example the one of `1 + weight`, once: float32."""

    stem: str
    addend: float
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class NegativeExp:
    """-e^x of a stored logarithm, once: float32."""

    stem: str
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class Flatten:
    """Makes a vector of a dense tensor with several dimensions, such as the kernels of a convolution by channels.

    rows: from a configuration to the rows of the tensor, a matrix, for the way back, or None if there is none.
    """

    stem: str
    only: FileFormat | None = None
    rows: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Unfolded:
    """Makes a matrix [out, in] of a dense tensor with more dimensions, such as the convolution that embeds patches.

    frames: the stem of a tensor like it, of the second of two frames, whose values follow for each channel.
    kernel: from a configuration to the dimensions after the first, for the way back; (): the file has a matrix, too;
    None: there is no way back.
    """

    stem: str
    only: FileFormat | None = None
    frames: str | None = None
    kernel: Callable[[Any], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Softplus:
    """log(1 + e^x) + addend of a stored vector, once: float32."""

    stem: str
    addend: float = 0.0
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Multiplies each row of a small dense tensor, such as the kernels of a convolution by channels, once: float32.

    factors: from a configuration to that of each row.
    """

    stem: str
    factors: Callable[[Any], NDArray[np.float32]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Divides each row of a matrix by its length, once: float32.

    applies: from a configuration, if it does at all.
    """

    stem: str
    applies: Callable[[Any], bool]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class ByDistance:
    """Makes biases by distance, [heads, distances], of a table of buckets, [buckets, heads], once: float32.

    buckets: from a configuration to that of each distance, from the furthest key before a query on.
    """

    stem: str
    buckets: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class DistanceVectors:
    """Makes vectors by distance, [heads, head_dim, distances], of a table of buckets, [buckets, hidden]: float32.

    Each row, normalized with the weights of `norm` if a file has them, goes through the projections of every layer.
    projections: from a configuration to the stems of these and of what they make; the weights of other names stay.
    buckets: from a configuration to the row of each distance, from the furthest key before a query on.
    """

    stem: str
    norm: str
    projections: Callable[[Any], Mapping[str, str]]
    buckets: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class Ones:
    """Adds the weights of a norm that no file has: as many ones as a matrix, which stays, has columns.

    whole: the stem of the norm.
    """

    stem: str
    whole: str
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class OfLayers:
    """A transform of the tensors of some layers alone.

    layers: from a configuration to their numbers.
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
    """Puts the columns of a plain matrix in another order.

    order: as that of `Permute`, [in_features].
    """

    stem: str
    order: Callable[[Any], NDArray[np.intp]]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Makes the kernels of convolutions of two taps of the shares that the token before has in each column: s, 1 - s.

    parts: the stems of the kernels, whose shares the file has one below the other: [parts, 1, 1, cols] in GGUF files.
    """

    stem: str
    parts: tuple[str, ...]
    only: FileFormat | None = None


@dataclass(frozen=True, slots=True)
class HeadSums:
    """Makes matrices [heads, dim, dim] whose products are weighted sums of heads, in all columns of a head.

    The file has the weights of the columns.
    heads: from a configuration to their number.
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
    need only those that differ from `octavo.loader.tensor_names`. A stem with its `.weight` or `.bias` becomes a whole
    name: {"blk.*.attn_sinks.weight": "layers.*.self_attn.sinks"}; so does a name without either.
    transforms: applied in this order after renaming. A transform whose stem a file lacks does nothing.
    """

    # Those of text models, and of the text part of models that also see.
    prefixes: tuple[str, ...] = (
        *("language_model.model.", "model.language_model.", "model.text_model.", "language_model."),
        *("llm.model.", "language.model.", "llm.", "language.", "model."),
    )
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    transforms: tuple[Transform, ...] = ()


def halves_of_pairs(num_heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.intp]:
    """The rows of q or k in the half-split rotary layout, from a file that keeps the two columns of a pair together.

    Column i of a head rotates with column i + rotary_dim / 2 in the graph, and with its neighbour in the file.
    """
    head = np.arange(head_dim)
    head[:rotary_dim] = np.concatenate([head[0:rotary_dim:2], head[1:rotary_dim:2]])
    return (head_dim * np.arange(num_heads)[:, None] + head).reshape(-1)


def gate_and_up() -> Transform:
    """`gate_up_proj` cut into its halves."""
    parts = ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj")
    return Split("layers.*.mlp.gate_up_proj", parts, lambda c: (c.mlp.intermediate_size,) * 2)


def fused_qkv(only: FileFormat | None = None) -> Transform:
    """q, k and v in one matrix, one after the other, of a model with a `DecoderConfig`."""
    parts = tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv")

    def rows(cfg: Any) -> tuple[int, ...]:
        return tuple(heads * cfg.head_dim for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads))

    return Split("layers.*.self_attn.qkv_proj", parts, rows, only)


def rotary_pairs(only: FileFormat | None = None, *, norms: bool = False) -> tuple[Transform, ...]:
    """`halves_of_pairs` for q and k of every layer of a model with a `DecoderConfig`.

    norms: for norms of all heads.
    """
    part = "norm" if norms else "proj"

    def order(cfg: Any, heads: int) -> NDArray[np.intp]:
        return halves_of_pairs(heads, cfg.head_dim, cfg.rope.rotary_dim)

    return (
        Permute(f"layers.*.self_attn.q_{part}", lambda c: order(c, c.num_heads), only),
        Permute(f"layers.*.self_attn.k_{part}", lambda c: order(c, c.num_kv_heads), only),
    )


def stacked_experts(only: FileFormat = "safetensors", *, one_way: bool = False) -> tuple[Transform, ...]:
    """One tensor per expert in safetensors files; GGUF files have had them stacked since April 2024."""
    return tuple(
        Stack(f"layers.*.mlp.experts.*.{part}_proj", f"layers.*.mlp.experts.{part}_proj", only, one_way)
        for part in ("gate", "up", "down")
    )


def shared_expert_names() -> dict[str, str]:
    """Name of the experts that every token takes, in GGUF files, and of the bias of the choice of the others."""
    names = {f"blk.*.ffn_{part}_shexp": f"layers.*.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    bias = "layers.*.mlp.gate.e_score_correction"
    return names | {"blk.*.exp_probs_b": bias, bias + "_bias": bias + ".bias"}


def fused_experts(width: Callable[[Any], int]) -> tuple[Transform, ...]:
    """Experts as `gate_up_columns` and `down_columns`, stacks of [in, out] or, as newer files have them, [out, in].

    width: of an expert's gate.
    """
    stem = "layers.*.mlp.experts."
    return (
        Transpose(stem + "gate_up_columns", "safetensors", whole=stem + "gate_up_proj", rows=lambda c: 2 * width(c)),
        Transpose(stem + "down_columns", "safetensors", whole=stem + "down_proj", rows=lambda c: c.hidden_size),
        Split(stem + "gate_up_proj", (stem + "gate_proj", stem + "up_proj"), lambda c: (width(c),) * 2, "safetensors"),
    )
