"""Canonical weights: their meaning by formulas written out here, and parts of them as parts of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.quantization.packed import (
    CodebookWeight,
    DenseWeight,
    Float8Weight,
    GroupedWeight,
    Weight,
    concat,
    stack,
)
from tests.support.quantize import random_weight

OUT, IN = 24, 256
NF4 = tuple(np.linspace(-1, 1, 16).astype(np.float32).tolist())


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape)


def packed_codes(codes: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Each row as one whole number, the first code in its lowest bits, in little-endian bytes."""
    rows = codes.reshape(-1, codes.shape[-1])
    numbers = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in rows]
    size = codes.shape[-1] * bits // 8
    data = b"".join(number.to_bytes(size, "little") for number in numbers)
    return np.frombuffer(data, np.uint8).reshape(*codes.shape[:-1], size)


def random_floats(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(dtype)


def grouped(
    bits: int = 4, group: int | None = 32, *, offset: str = "", ordered: bool = False, lead: tuple[int, ...] = ()
) -> GroupedWeight:
    shape = (*lead, OUT, IN)
    scales_shape = (*shape[:-1], IN // (group or IN))
    rng = np.random.default_rng(3)
    return GroupedWeight(
        bits,
        group,
        packed_codes(random_codes(shape, bits), bits),
        random_floats(scales_shape, 1, np.float16),
        0 if offset else 1 << (bits - 1),
        rng.integers(0, 1 << bits, scales_shape).astype(np.uint8) if offset == "zeros" else None,
        random_floats(scales_shape, 2) if offset == "minima" else None,
        rng.permuted(np.broadcast_to(np.arange(IN, dtype=np.int32), (*lead, IN)), axis=-1) if ordered else None,
    )


def codebook(lead: tuple[int, ...] = ()) -> CodebookWeight:
    codes = packed_codes(random_codes((*lead, OUT, IN), 4), 4)
    return CodebookWeight("NF4", NF4, 64, codes, random_floats((*lead, OUT, IN // 64), 1))


def float8(
    kind: str = "E4M3", rows: int | None = None, columns: int | None = None, lead: tuple[int, ...] = (), out: int = OUT
) -> Float8Weight:
    data = random_codes((*lead, out, IN), 8).astype(np.uint8)
    data[data & 127 > 120] = 0  # neither NaN nor infinite
    shape = (*lead, -(-out // (rows or out)), -(-IN // (columns or IN)))
    assert kind in ("E4M3", "E5M2")
    return Float8Weight(kind, data, random_floats(shape, 1), rows, columns)


@pytest.mark.parametrize("offset", ["", "zeros", "minima"])
@pytest.mark.parametrize("group", [1, 32, 128, None])
@pytest.mark.parametrize("bits", range(2, 9))
def test_grouped_integers(bits: int, group: int | None, offset: str) -> None:
    weight = grouped(bits, group, offset=offset)
    codes = random_codes((OUT, IN), bits)
    expected = np.empty((OUT, IN), np.float32)
    for column in range(IN):
        at = column // (group or IN)
        scale, code = weight.scales[:, at].astype(np.float32), codes[:, column].astype(np.float32)
        if weight.minima is not None:
            expected[:, column] = scale * code + weight.minima[:, at]
        else:
            zero = 1 << (bits - 1) if weight.zeros is None else weight.zeros[:, at].astype(np.float32)
            expected[:, column] = scale * (code - zero)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert weight.shape == (OUT, IN)
    extra = {"": 0, "zeros": 1, "minima": 4}[offset]
    assert weight.nbytes == OUT * IN * bits // 8 + OUT * (IN // (group or IN)) * (2 + extra)


def test_a_column_order() -> None:
    weight = grouped(offset="zeros", ordered=True)
    assert weight.column_order is not None
    plain = replace(weight, column_order=None).dequantize()
    expected = np.empty_like(plain)
    for j, column in enumerate(weight.column_order):
        expected[:, column] = plain[:, j]
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert weight.columns(0, IN) is weight
    with pytest.raises(ValueError, match=r"columns 0 to 128 of 256 cannot be cut from I4_32_Z_ORDER: its step is 256"):
        weight.columns(0, 128)


def test_a_codebook() -> None:
    weight = codebook()
    codes = random_codes((OUT, IN), 4)
    expected = np.asarray(NF4, np.float32)[codes] * np.repeat(weight.scales, 64, axis=1)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert (weight.type_name, weight.nbytes) == ("NF4_64", OUT * IN // 2 + OUT * 4 * 4)


def nvfp4(lead: tuple[int, ...] = ()) -> CodebookWeight:
    codes = packed_codes(random_codes((*lead, OUT, IN), 4), 4)
    scales = random_codes((*lead, OUT, IN // 16), 7).astype(np.uint8)
    scales[scales == 127] = 0
    return CodebookWeight("NVFP4", NF4, 16, codes, scales, random_floats((*lead, OUT, 1), 2))


def test_a_codebook_with_eight_bit_scales() -> None:
    weight = nvfp4()
    assert weight.row_scales is not None
    codes = random_codes((OUT, IN), 4)
    expected = np.asarray(NF4, np.float32)[codes]
    for row in range(OUT):
        for column in range(IN):
            scale = np.float32(float8_value("E4M3", int(weight.scales[row, column // 16])))
            expected[row, column] *= scale * weight.row_scales[row, 0]
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert (weight.type_name, weight.nbytes) == ("NVFP4_16", OUT * IN // 2 + OUT * IN // 16 + OUT * 4)
    with pytest.raises(ValueError, match="need scales of the rows"):
        replace(weight, row_scales=None)
    with pytest.raises(ValueError, match=r"scales of rows of NVFP4_16 are \[1, 1\]"):
        replace(weight, row_scales=np.ones((1, 1), np.float32))


def test_every_half() -> None:
    """Each bit pattern becomes the same float32: subnormal numbers, signs of zero, infinities and NaN too."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    np.testing.assert_array_equal(
        DenseWeight(finite).dequantize().view(np.uint32), finite.astype(np.float32).view(np.uint32)
    )
    every_second = halves.reshape(256, 256)[:, ::2]
    np.testing.assert_array_equal(DenseWeight(every_second).dequantize(), every_second.astype(np.float32))
    assert DenseWeight(np.zeros((0, 3), np.float16)).dequantize().shape == (0, 3)
    assert DenseWeight(np.ones((), np.float16)).dequantize() == 1


def float8_value(kind: str, byte: int) -> float:
    """By the definition of the format: sign, exponent, mantissa."""
    sign = -1.0 if byte & 128 else 1.0
    bits, bias = (3, 7) if kind == "E4M3" else (2, 15)
    exponent, mantissa = (byte & 127) >> bits, (byte & ((1 << bits) - 1)) / (1 << bits)
    if kind == "E4M3" and byte & 127 == 127:
        return float("nan")
    if kind == "E5M2" and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    return sign * (mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize("kind", ["E4M3", "E5M2"])
def test_every_float8(kind: str) -> None:
    assert kind in ("E4M3", "E5M2")
    data = np.arange(256, dtype=np.uint8).reshape(1, 256)
    with np.errstate(invalid="ignore"):
        values = Float8Weight(kind, data, np.ones((1, 1), np.float32)).dequantize()
    np.testing.assert_array_equal(values[0], [float8_value(kind, byte) for byte in range(256)])


@pytest.mark.parametrize(
    ("rows", "columns", "name"),
    [(None, None, ""), (1, None, "_ROW"), (8, 128, "_8X128"), (10, 100, "_10X100"), (None, 64, "_ALLX64")],
)
def test_float8_scales(rows: int | None, columns: int | None, name: str) -> None:
    weight = float8("E5M2", rows, columns)
    expected = np.empty((OUT, IN), np.float32)
    for i in range(OUT):
        for j in range(IN):
            scale = weight.scales[i // (rows or OUT), j // (columns or IN)]
            expected[i, j] = np.float32(float8_value("E5M2", int(weight.data[i, j]))) * scale
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert weight.type_name == "F8_E5M2" + name
    assert weight.nbytes == OUT * IN + weight.scales.size * 4


WEIGHTS: dict[str, Callable[[], Weight]] = {
    "F32": lambda: DenseWeight(random_floats((OUT, IN), 0)),
    "F16 experts": lambda: DenseWeight(random_floats((3, OUT, IN), 0, np.float16)),
    "Q4_0": lambda: random_weight("Q4_0", (OUT, IN), 0),
    "Q4_K experts": lambda: random_weight("Q4_K", (3, OUT, 2 * IN), 0),
    "I4 zeros": lambda: grouped(offset="zeros"),
    "I3 minima experts": lambda: grouped(3, 64, offset="minima", lead=(3,)),
    "I8 row": lambda: grouped(8, None),
    "I5 row": lambda: grouped(5, None),
    "I4 order": lambda: grouped(ordered=True),
    "I4 order experts": lambda: grouped(ordered=True, lead=(3,)),
    "NF4": codebook,
    "NF4 experts": lambda: codebook((3,)),
    "NVFP4 experts": lambda: nvfp4((3,)),
    "F8 tensor": float8,
    "F8 row": lambda: float8("E5M2", 1),
    "F8 block": lambda: float8("E4M3", 8, 128),
    "F8 uneven block experts": lambda: float8("E4M3", 10, 100, (3,)),
}


def same(weight: Weight, expected: NDArray[np.float32]) -> None:
    assert weight.shape == expected.shape
    np.testing.assert_array_equal(weight.dequantize(), expected)


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows(name: str) -> None:
    weight = WEIGHTS[name]()
    whole = weight.dequantize()
    for index in (slice(8, 24), slice(3, 17), slice(0, 5), np.array([5, 0, 23, 7, 7]), np.arange(OUT)[::-1]):
        same(weight.rows(index), whole[..., index, :])
    assert weight.rows(slice(0, 8)).nbytes <= weight.nbytes


@pytest.mark.parametrize("name", WEIGHTS)
def test_columns(name: str) -> None:
    weight = WEIGHTS[name]()
    whole = weight.dequantize()
    width, step = weight.shape[-1], weight.column_step
    same(weight.columns(0, width), whole)
    for begin in range(0, width, step):
        for end in {begin + step, min(begin + 3 * step, width)} - set(range(width + 1, width + step)):
            same(weight.columns(begin, end), whole[..., begin:end])
    wrong = [(0, width + step), (step, step), (-step, width)] + [(0, step // 2), (step // 2, width)] * (step > 1)
    for begin, end in wrong:
        with pytest.raises(ValueError, match=rf"columns {begin} to {end} of {width} .* its step is {step} columns"):
            weight.columns(begin, end)


@pytest.mark.parametrize("name", [name for name in WEIGHTS if not name.endswith("experts")])
def test_stack_and_concat(name: str) -> None:
    weight = WEIGHTS[name]()
    whole = weight.dequantize()
    parts = [weight.rows(slice(0, 8)), weight.rows(slice(16, 24)), weight.rows(slice(8, 16))]
    pieces = [whole[:8], whole[16:], whole[8:16]]
    same(stack(parts), np.stack(pieces))
    same(concat(parts), np.concatenate(pieces))
    same(concat([weight.rows(slice(0, 8)), weight]), np.concatenate([whole[:8], whole]))
    experts = stack([weight, weight])
    same(experts.rows(slice(2, 11)), np.stack([whole, whole])[:, 2:11])
    same(concat([experts, experts]), np.concatenate([experts.dequantize()] * 2, axis=1))


def test_vectors() -> None:
    weight = DenseWeight(random_floats((10,), 0))
    same(weight.rows(np.array([3, 1])), weight.data[[3, 1]])
    same(concat([weight, weight]), np.concatenate([weight.data] * 2))
    with pytest.raises(ValueError, match="a F32 vector of 10 numbers has no columns"):
        weight.columns(0, 5)


def test_parts_that_are_not_alike() -> None:
    with pytest.raises(ValueError, match="types Q4_0 and Q8_0 cannot become one"):
        stack([random_weight("Q4_0", (OUT, IN), 0), random_weight("Q8_0", (OUT, IN), 0)])
    with pytest.raises(ValueError, match=r"shapes \[24, 256\] and \[8, 256\] cannot be stacked"):
        stack([codebook(), codebook().rows(slice(0, 8))])
    with pytest.raises(ValueError, match=r"rows of shapes \[24, 256\] and \[24, 128\] cannot be joined"):
        concat([float8(), float8().columns(0, 128)])
    other = replace(grouped(), zero=7)
    with pytest.raises(ValueError, match="I4_32 weights of zero 8 and 7 cannot become one"):
        stack([grouped(), other])
    ordered = grouped(ordered=True)
    assert ordered.column_order is not None
    with pytest.raises(ValueError, match="different column orders"):
        concat([ordered, replace(ordered, column_order=ordered.column_order[::-1])])
    table = replace(codebook(), table=NF4[::-1])
    with pytest.raises(ValueError, match=r"NF4_64 weights of table .* cannot become one"):
        stack([codebook(), table])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: replace(grouped(), bits=9), "codes have 9 bits"),
        (lambda: replace(grouped(), group=48), "groups have 48 columns; it must be a power of two"),
        (lambda: replace(grouped(), scales=grouped().scales[:, 1:]), r"scales of I4_32 are \[24, 7\], not \[24, 8\]"),
        (lambda: replace(grouped(), group=512), "not a whole number of groups of I4_512"),
        (lambda: replace(grouped(offset="zeros"), minima=grouped(offset="minima").minima), "zeros or minima, not both"),
        (lambda: replace(grouped(), column_order=np.arange(5, dtype=np.int32)), r"order is \[5\] for 256 columns"),
        (lambda: replace(codebook(), table=NF4[:8]), "the table of NF4 has 8 entries"),
        (lambda: replace(codebook(), scales=codebook().scales[1:]), r"scales of NF4_64 are \[23, 4\]"),
        (lambda: replace(float8(), scales=np.ones((2, 1), np.float32)), r"of F8_E4M3 are \[2, 1\], not \[1, 1\]"),
        (lambda: replace(float8(), data=np.zeros(4, np.uint8)), "is not a matrix"),
    ],
)
def test_arrays_that_do_not_fit(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()
