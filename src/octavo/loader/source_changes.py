"""Changes to single stored weights, each applied when the weight is read: rows, columns, joins and arithmetic."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader.tensor_files import Source
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight, concat, stack
from octavo.quantization.packed.base import RowIndex


def one_of(source: Source, index: int) -> Source:
    """Return one weight of a stack, [count, ...] -> [...]."""

    def make() -> Weight:
        weight = source.make()
        if isinstance(weight, DenseWeight | GGMLWeight):
            return replace(weight, data=weight.data[index])
        return DenseWeight(weight.dequantize()[index])

    nbytes = source.nbytes // source.shape[0]
    return replace(source, shape=source.shape[1:], nbytes=nbytes, make=make, steps=f"{source.steps} number {index}")


def concatenated(parts: Sequence[Source], axis: int) -> Source:
    """Join weights along `axis`, the output features. The other dimensions must agree. Undoes `split`."""
    first = parts[0]
    shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
    return Source(
        type_name=first.type_name,
        shape=shape,
        nbytes=sum(part.nbytes for part in parts),
        tensors=tuple(dict.fromkeys(tensor for part in parts for tensor in part.tensors)),
        make=lambda: concat([part.make() for part in parts]),
        steps="; ".join(part.steps for part in parts) + " joined",
    )


def first_row(source: Source) -> Source:
    """Return the first row as a float32 vector, [rows, cols] -> [cols]. The inverse of `as_row`."""

    def make() -> Weight:
        return DenseWeight(source.make().dequantize()[0])

    return replace(source, type_name="F32", shape=source.shape[1:], make=make, steps=f"{source.steps} as a vector")


def as_rows(source: Source, rows: int) -> Source:
    """Return a vector as a float32 matrix, [rows * cols] -> [rows, cols]. The inverse of `flattened`."""
    shape = (rows, source.shape[0] // rows)

    def make() -> Weight:
        return DenseWeight(source.make().dequantize().reshape(shape))

    return replace(source, type_name="F32", shape=shape, make=make, steps=f"{source.steps} as {rows} rows")


def two_frames(first: Source, second: Source) -> Source:
    """Join the kernels of two frames, [out, channels, y, x] twice -> [out, channels, 2, y, x].

    Raises ModelLoadError if their shapes differ.
    """
    if first.shape != second.shape or len(first.shape) != 4:
        raise ModelLoadError(
            f"tensor {second.tensors[0]!r:.80} is {list(second.shape)}, {first.tensors[0]!r:.80} {list(first.shape)}; "
            "the kernels of two frames must be alike"
        )

    def make() -> Weight:
        return DenseWeight(np.stack([each.make().dequantize() for each in (first, second)], axis=2))

    out, channels, *sides = first.shape
    return Source(
        "F32",
        (out, channels, 2, *sides),
        first.nbytes + second.nbytes,
        first.tensors + second.tensors,
        make,
        f"{first.steps}; {second.steps} as two frames",
    )


def with_scaled_rows(source: Source, factors: NDArray[np.float32]) -> Source:
    """Multiply row i by factors[i] in float32, [rows, ...] -> [rows, ...].

    Raises ModelLoadError if the number of rows is not the number of factors.
    """
    _check_rows(source, len(factors), 0)

    def make() -> Weight:
        array = source.make().dequantize()
        return DenseWeight(array * factors.reshape(-1, *(1,) * (array.ndim - 1)))

    return replace(
        source, type_name="F32", make=make, steps=f"{source.steps} rows times {zlib.crc32(factors.tobytes())}"
    )


def as_matrix(source: Source) -> Source:
    """Merge all dimensions after the first, [rows, ...] -> [rows, cols]."""
    shape = (source.shape[0], math.prod(source.shape[1:]))

    def make() -> Weight:
        weight = source.make()
        return DenseWeight((weight.data if isinstance(weight, DenseWeight) else weight.dequantize()).reshape(shape))

    type_name = source.type_name if source.type_name in DENSE_TYPES else "F32"
    return replace(source, type_name=type_name, shape=shape, make=make, steps=f"{source.steps} as a matrix")


def as_kernel(source: Source, kernel: tuple[int, ...]) -> Source:
    """Split the columns into several dimensions, [rows, cols] -> [rows, *kernel]. The inverse of `as_matrix`."""
    shape = (source.shape[0], *kernel)
    if math.prod(shape) != math.prod(source.shape):
        raise ModelLoadError(
            f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}; the configuration asks for {list(shape)}"
        )

    def make() -> Weight:
        weight = source.make()
        return DenseWeight((weight.data if isinstance(weight, DenseWeight) else weight.dequantize()).reshape(shape))

    return replace(source, shape=shape, make=make, steps=f"{source.steps} as {list(shape)}")


def single_frames(source: Source) -> tuple[Source, Source]:
    """Separate the kernels of two frames, [out, channels, 2, y, x]. The inverse of `two_frames`."""

    def frame(number: int) -> Source:
        def make() -> Weight:
            weight = source.make()
            kernels = weight if isinstance(weight, DenseWeight) else DenseWeight(weight.dequantize())
            return DenseWeight(kernels.data[:, :, number].copy())

        shape = (*source.shape[:2], *source.shape[3:])
        steps = f"{source.steps} frame {number}"
        return replace(source, shape=shape, nbytes=source.nbytes // 2, make=make, steps=steps)

    return frame(0), frame(1)


def _rows(source: Source, axis: int, index: RowIndex) -> Weight:
    weight = source.make()
    if axis == 0 or axis < len(source.shape) - 1:
        return weight.rows(index)
    if not isinstance(weight, DenseWeight):
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name}; biases must be plain numbers")
    return DenseWeight(weight.data[..., index])


def _check_rows(source: Source, count: int, axis: int) -> None:
    if not source.shape or source.shape[axis] != count:
        raise ModelLoadError(
            f"tensor {source.tensors[0]!r:.80} has the shape {list(source.shape)}; the configuration asks for "
            f"{count} rows"
        )


def permuted(source: Source, order: NDArray[np.intp], axis: int) -> Source:
    """Reorder output features along `axis`: feature i is the source's feature order[i].

    When the weight is read, raises ModelLoadError if the number of features is not the length of `order`.
    """

    def make() -> Weight:
        _check_rows(source, len(order), axis)  # not earlier: the graph reports it better, or does not use the tensor
        return _rows(source, axis, order)

    return replace(source, make=make, steps=f"{source.steps} rows {zlib.crc32(order.tobytes())}")


def split(source: Source, rows: Sequence[int], axis: int) -> Iterator[Source]:
    """Yield parts with rows[i] output features each, cut along `axis`.

    Raises ModelLoadError if their sum is not the number of features.
    """
    _check_rows(source, sum(rows), axis)
    for begin, end in pairwise(accumulate(rows, initial=0)):
        yield _cut(source, begin, end, axis)


def _cut(source: Source, begin: int, end: int, axis: int) -> Source:
    return replace(
        source,
        shape=(*source.shape[:axis], end - begin, *source.shape[axis + 1 :]),
        nbytes=source.nbytes * (end - begin) // source.shape[axis],
        make=lambda: _rows(source, axis, slice(begin, end)),
        steps=f"{source.steps} rows {begin} to {end}",
    )


def stack_of(parts: Sequence[Source]) -> Source:
    """Stack weights of the same shape, [...] each -> [count, ...]."""
    return Source(
        type_name=parts[0].type_name,
        shape=(len(parts), *parts[0].shape),
        nbytes=sum(part.nbytes for part in parts),
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        make=lambda: stack([part.make() for part in parts]),
        steps="; ".join(part.steps for part in parts) + " stacked",
    )


def by_heads(source: Source, heads: int, transposed: bool) -> Source:
    """Split a matrix by heads: [heads * rows, cols] -> [heads, rows, cols], or [heads, cols, rows] if `transposed`.

    Quantized weights become float32 if they are transposed.
    Raises ModelLoadError if `heads` does not divide the number of rows.
    """
    if len(source.shape) != 2 or source.shape[0] % heads:
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}, not a matrix of {heads} heads")
    rows, width = source.shape
    size = rows // heads

    def make() -> Weight:
        weight = source.make()
        whole = stack([weight.rows(slice(begin, begin + size)) for begin in range(0, rows, size)])
        if not transposed:
            return whole
        numbers = whole.data if isinstance(whole, DenseWeight) else whole.dequantize()
        return DenseWeight(numbers.swapaxes(-1, -2))

    shape = (heads, width, size) if transposed else (heads, size, width)
    becomes_float = transposed and source.type_name not in DENSE_TYPES
    return replace(
        source,
        type_name="F32" if becomes_float else source.type_name,
        nbytes=4 * rows * width if becomes_float else source.nbytes,
        shape=shape,
        make=make,
        steps=f"{source.steps} of {heads} heads" + " transposed" * transposed,
    )


def one_matrix(source: Source, transposed: bool) -> Source:
    """Concatenate the matrices of heads by rows. The inverse of `by_heads`."""
    heads, first, second = source.shape
    rows, width = (second, first) if transposed else (first, second)

    def make() -> Weight:
        weight = source.make()
        if not isinstance(weight, DenseWeight):
            raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name} and cannot be joined")
        data = weight.data.swapaxes(-1, -2) if transposed else weight.data
        return DenseWeight(np.ascontiguousarray(data).reshape(heads * rows, width))

    return replace(source, shape=(heads * rows, width), make=make, steps=f"{source.steps} joined heads")


def with_columns(source: Source, order: NDArray[np.intp]) -> Source:
    """Reorder columns: column i is the source's column order[i]. [..., cols] -> [..., cols].

    Raises ModelLoadError for quantized weights, whose blocks run along the columns.
    """

    def make() -> Weight:
        weight = source.make()
        if not isinstance(weight, DenseWeight):
            raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name}; its columns cannot move")
        return DenseWeight(weight.data[..., order])

    return replace(source, make=make, steps=f"{source.steps} columns {zlib.crc32(order.tobytes())}")


def kernel_of_shares(source: Source, part: int, count: int) -> Source:
    """Return the convolution taps of one of `count` parts, [2 * cols].

    Each column has two taps: s for the previous token and 1 - s for the current one, where s is the stored share.
    """
    if math.prod(source.shape) % count:
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}; it must have {count} rows")
    cols = math.prod(source.shape) // count

    def make() -> Weight:
        shares = source.make().dequantize().astype(np.float32).reshape(count, cols)[part]
        return DenseWeight(np.stack([shares, 1.0 - shares], axis=-1).reshape(-1))

    steps = f"{source.steps} taps of part {part}"
    return replace(source, type_name="F32", shape=(2 * cols,), nbytes=8 * cols, make=make, steps=steps)


def shares_of_kernels(kernels: Sequence[Source]) -> Source:
    """Return the shares of all parts, [parts, 1, 1, cols]. The inverse of `kernel_of_shares`."""
    first = kernels[0]
    shape = (len(kernels), 1, 1, first.shape[0] // 2)

    def make() -> Weight:
        return DenseWeight(np.stack([each.make().dequantize()[::2] for each in kernels]).reshape(shape))

    tensors = tuple(tensor for each in kernels for tensor in each.tensors)
    return Source("F32", shape, 4 * math.prod(shape), tensors, make, first.steps + " as shares")


def head_sums(source: Source, heads: int) -> Source:
    """Return a matrix per head whose product with the head is a weighted sum: [heads * dim] -> [heads, dim, dim].

    All rows of a head's matrix are the same: the head's part of the stored weights. Raises ModelLoadError if `heads`
    does not divide the number of values.
    """
    cols = math.prod(source.shape)
    if cols % heads:
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}, not of {heads} heads")
    dim = cols // heads

    def make() -> Weight:
        weights = source.make().dequantize().astype(np.float32).reshape(heads, 1, dim)
        return DenseWeight(np.ascontiguousarray(np.broadcast_to(weights, (heads, dim, dim))))

    steps = f"{source.steps} summed by {heads} heads"
    return replace(source, type_name="F32", shape=(heads, dim, dim), nbytes=4 * cols * dim, make=make, steps=steps)


def summed_columns(source: Source) -> Source:
    """Return the weights of the sums as a vector, [heads, dim, dim] -> [heads * dim]. The inverse of `head_sums`."""
    cols = source.shape[0] * source.shape[2]

    def make() -> Weight:
        return DenseWeight(source.make().dequantize()[:, 0].reshape(-1))

    return replace(
        source, type_name="F32", shape=(cols,), nbytes=4 * cols, make=make, steps=f"{source.steps} as columns"
    )


def as_row(source: Source) -> Source:
    """Return a vector as a matrix of one row, [cols] -> [1, cols]."""

    def make() -> Weight:
        return stack([source.make()])

    return replace(source, shape=(1, *source.shape), make=make, steps=f"{source.steps} as a row")


def transposed(source: Source) -> Source:
    """Exchange the last two dimensions, [..., rows, cols] -> [..., cols, rows].

    Raises ModelLoadError for quantized weights.
    """

    def make() -> Weight:
        weight = source.make()
        if not isinstance(weight, DenseWeight):
            raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name} and cannot be transposed")
        return DenseWeight(weight.data.swapaxes(-1, -2))

    shape = (*source.shape[:-2], source.shape[-1], source.shape[-2])
    return replace(source, shape=shape, make=make, steps=f"{source.steps} transposed")


def first_exchanged(source: Source) -> Source:
    """Exchange the first two dimensions, [a, b, ...] -> [b, a, ...]."""

    def make() -> Weight:
        weight = source.make()
        values = weight.data if isinstance(weight, DenseWeight) else weight.dequantize()
        return DenseWeight(np.ascontiguousarray(values.swapaxes(0, 1)))

    shape = (source.shape[1], source.shape[0], *source.shape[2:])
    return replace(source, shape=shape, make=make, steps=f"{source.steps} first exchanged")


def negative_exp(source: Source) -> Source:
    """Compute -exp(x) of each number x in float32. This turns a stored logarithm into a decay rate."""

    def make() -> Weight:
        return DenseWeight(-np.exp(source.make().dequantize().astype(np.float32)))

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} -exp")


def flattened(source: Source) -> Source:
    """Return all numbers as a float32 vector."""

    def make() -> Weight:
        return DenseWeight(source.make().dequantize().reshape(-1))

    return replace(source, type_name="F32", shape=(math.prod(source.shape),), make=make, steps=f"{source.steps} flat")


def softplus(source: Source, addend: float) -> Source:
    """Compute log(1 + exp(x)) + addend of each number, in float32."""

    def make() -> Weight:
        return DenseWeight(np.logaddexp(source.make().dequantize().astype(np.float32), np.float32(0.0)) + addend)

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} softplus + {addend}")


def unit_rows(source: Source) -> Source:
    """Divide each row by its length, or by 1e-7 if that is larger, in float32. [..., cols] -> [..., cols]."""

    def make() -> Weight:
        rows = source.make().dequantize().astype(np.float32)
        return DenseWeight(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-7))

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} in unit rows")


def by_distance(source: Source, buckets: NDArray[np.intp]) -> Source:
    """Return a column for each distance: [buckets, heads] -> [heads, distances]. buckets[i] is the row for distance i.

    Raises ModelLoadError if the weight has too few rows.
    """
    if len(source.shape) != 2 or source.shape[0] <= buckets.max():
        found = f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}"
        raise ModelLoadError(f"{found}; the configuration asks for {buckets.max() + 1} buckets of distances")

    def make() -> Weight:
        return DenseWeight(np.ascontiguousarray(source.make().dequantize().astype(np.float32)[buckets].T))

    shape = (source.shape[1], len(buckets))
    steps = f"{source.steps} by distance {zlib.crc32(buckets.tobytes())}"
    return replace(source, type_name="F32", shape=shape, nbytes=4 * math.prod(shape), make=make, steps=steps)


def distance_vectors(
    rows: Callable[[], NDArray[np.float32]],
    read: Sequence[Source],
    projection: Source,
    bias: Source | None,
    num_heads: int,
) -> Source:
    """Project a vector for each distance, and split it by heads: [heads, dim, distances] in float32.

    rows: returns the vectors [distances, hidden], computed from the sources `read`.
    projection: [heads * dim, hidden].

    The caller must set the shape and the number of bytes of the result.
    """
    sources = (*read, projection, *(() if bias is None else (bias,)))

    def make() -> Weight:
        found = rows() @ projection.make().dequantize().T.astype(np.float32)
        if bias is not None:
            found = found + bias.make().dequantize()
        by_head = found.T.reshape(num_heads, -1, len(found))
        return DenseWeight(np.ascontiguousarray(by_head, np.float32))

    tensors = tuple(tensor for source in sources for tensor in source.tensors)
    steps = " ".join(source.steps for source in sources)
    return Source("F32", (), 0, tensors, make, steps)


def ones(count: int) -> Source:
    """Return a float32 weight of ones, [count], that comes from no file."""
    return Source("F32", (count,), 4 * count, (), lambda: DenseWeight(np.ones(count, np.float32)), "ones")


def folded(source: Source, addend: float) -> Source:
    """Add `addend` to each number, in float32."""

    def make() -> Weight:
        return DenseWeight(source.make().dequantize() + np.float32(addend))

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} + {addend}")
