"""The search for scales and codes: its error beside llama.cpp's, judged by the decoders of the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.quantizers import quantize, quantizer_types
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DenseWeight

Floats = NDArray[np.float32]

# The relative squared errors of llama.cpp's `ggml_quantize_chunk` on `sample()` (ggml 0.25.3; None: it refuses the
# type without an importance matrix): plain, and weighted with the importance that the quantizer was given.
LLAMA_CPP: dict[str, tuple[float | None, float]] = {
    "IQ2_S": (0.06945, 0.05198),
    "IQ2_XS": (None, 0.07009),
    "IQ2_XXS": (None, 0.09194),
    "IQ3_S": (0.02817, 0.01603),
    "IQ3_XXS": (0.04551, 0.02497),
    "IQ4_NL": (0.005962, 0.005208),
    "IQ4_XS": (0.006025, 0.005354),
    "MXFP4": (0.01379, 0.01342),
    "Q2_K": (0.0833, 0.05306),
    "Q3_K": (0.02263, 0.01801),
    "Q4_0": (0.007256, 0.005833),
    "Q4_1": (0.006237, 0.003929),
    "Q4_K": (0.005107, 0.004079),
    "Q5_0": (0.001813, 0.001432),
    "Q5_1": (0.001385, 0.0009286),
    "Q5_K": (0.001301, 0.001031),
    "Q6_K": (0.0003144, 0.0002694),
    "Q8_0": (2.945e-05, 2.95e-05),
}
TERNARY = {"TQ1_0", "TQ2_0"}


def sample() -> tuple[Floats, Floats]:
    """x [24, 768], whose rows differ in size, and the importance of its columns."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((24, 768)) * np.exp(rng.standard_normal((24, 1)))
    return x.astype(np.float32), np.exp(rng.standard_normal(768)).astype(np.float32)


def judged(type_name: str, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> Floats:
    """The numbers of blocks by the `gguf` package."""
    rows = blocks.reshape(shape[0], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name]).reshape(shape)


def error(x: Floats, y: Floats, weights: Floats | float) -> float:
    return float(((x - y).astype(np.float64) ** 2 * weights).sum() / (x.astype(np.float64) ** 2 * weights).sum())


def test_every_type_has_a_bar() -> None:
    assert quantizer_types() == LLAMA_CPP.keys() | TERNARY


@pytest.mark.parametrize("type_name", LLAMA_CPP)
def test_the_error_is_below_that_of_llama_cpp(type_name: str) -> None:
    x, importance = sample()
    plain, weighted = LLAMA_CPP[type_name]
    without = judged(type_name, quantize(type_name, x), x.shape)
    assert plain is None or error(x, without, 1.0) < plain
    with_it = judged(type_name, quantize(type_name, x, importance), x.shape)
    assert error(x, with_it, importance) < weighted
    assert error(x, with_it, importance) < error(x, without, importance)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_the_error_is_below_that_of_the_gguf_package(type_name: str) -> None:
    x, _ = sample()
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[type_name])
    ours = judged(type_name, quantize(type_name, x), x.shape)
    assert error(x, ours, 1.0) < error(x, judged(type_name, theirs, x.shape), 1.0)


@pytest.mark.parametrize(("type_name", "low", "high"), [("Q4_0", -8, 7), ("Q5_0", -16, 15)])
def test_one_scale_is_near_the_best_of_all(type_name: str, low: int, high: int) -> None:
    """The formula of the type with every scale in small steps, written out."""
    x, importance = (part[..., :256] for part in sample())
    x = x[:4]
    blocks, weights = x.reshape(-1, 32), np.tile(importance, 4).reshape(-1, 32)
    best = np.full(len(blocks), np.inf)
    for factor in np.concatenate([np.linspace(0.7, 1.4, 300), -np.linspace(0.7, 1.4, 300)]):
        scale = factor * np.abs(blocks).max(axis=1, keepdims=True) / -low
        codes = np.clip(np.round(blocks / scale), low, high)
        best = np.minimum(best, (weights * (blocks - scale * codes) ** 2).sum(axis=1))
    y = judged(type_name, quantize(type_name, x, importance), x.shape).reshape(-1, 32)
    assert (weights * (blocks - y) ** 2).sum() < 1.01 * best.sum()


@pytest.mark.parametrize("type_name", sorted(TERNARY))
def test_three_values_are_kept_exactly(type_name: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.integers(-1, 2, (6, 512)) * np.float32(0.375)).astype(np.float32)
    blocks = quantize(type_name, x)
    np.testing.assert_array_equal(judged(type_name, blocks, x.shape), x)
    np.testing.assert_array_equal(blocks, gguf.quants.quantize(x, gguf.GGMLQuantizationType[type_name]).ravel())
    with pytest.raises(ValueError, match="for ternary models"):
        quantize(type_name, sample()[0])


@pytest.mark.parametrize("type_name", sorted(quantizer_types()))
@pytest.mark.parametrize("weighted", [False, True])
def test_every_instruction_set_gives_the_same_bytes(type_name: str, weighted: bool) -> None:
    x, importance = sample()
    x = x[:5]
    if type_name in TERNARY:
        x = np.sign(x)
    weights = importance if weighted else None
    levels = _native.known_isas()
    levels = levels[: levels.index(_native.detected_isa()) + 1]
    first = quantize(type_name, x, weights, isa=levels[0])
    for level in levels[1:3]:
        np.testing.assert_array_equal(quantize(type_name, x, weights, isa=level), first)
    alone = np.concatenate([quantize(type_name, x[i : i + 1], weights) for i in range(len(x))])
    np.testing.assert_array_equal(alone, first)


@pytest.mark.parametrize("type_name", sorted(quantizer_types()))
def test_extremes(type_name: str) -> None:
    """Zeros stay zeros, equal values are kept well, and nothing is worse than zeros, also near the limits."""
    width = BLOCK_SIZES[type_name][0]
    x = np.zeros((7, width), np.float32)
    x[1, 5] = 3
    x[2, ::2] = -1e-30
    x[3] = 60_000
    x[4] = -1e-7
    x[5, 0] = 65504
    x[6] = 0.25
    y = judged(type_name, quantize(type_name, x), x.shape)
    assert np.isfinite(y).all()
    assert not y[0].any()
    assert np.abs(y[2]).max() < 1e-6
    assert (((x - y).astype(np.float64) ** 2).sum(axis=1) <= (x.astype(np.float64) ** 2).sum(axis=1)).all()
    if not type_name.startswith(("IQ2", "IQ3")):  # their grids hardly have equal numbers
        assert np.abs(y[3] / 60_000 - 1).max() < 0.15
        assert np.abs(y[6] / 0.25 - 1).max() < 0.15


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("isa", _native.known_isas()[: _native.known_isas().index(_native.detected_isa()) + 1])
def test_numbers_of_16_bits_are_quantized_as_the_floats_that_they_are(dtype: str, isa: str) -> None:
    x, importance = sample()
    stored = DenseWeight(x).converted(dtype)
    for type_name in ("Q4_0", "Q6_K", "IQ3_S"):
        found = quantize(type_name, stored.data, importance, isa=isa)
        np.testing.assert_array_equal(found, quantize(type_name, stored.dequantize(), importance, isa=isa))


@pytest.mark.parametrize("isa", _native.known_isas()[: _native.known_isas().index(_native.detected_isa()) + 1])
def test_impossible_values_are_refused_by_their_place(isa: str) -> None:
    for dtype, values in {
        "F32": (np.nan, np.inf, -np.inf, 1e6, -65504.004),
        "F16": (np.nan, np.inf, -np.inf),
        "BF16": (np.nan, np.inf, -np.inf, 1e6, 65536.0),
    }.items():
        for bad in values:
            x = sample()[0].copy()
            x[3, 17] = bad
            with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="row 3, column 17 is"):
                quantize("Q4_K", DenseWeight(x).converted(dtype).data, isa=isa)
    x[3, 17] = -65504
    quantize("Q4_K", x, isa=isa)


def test_other_types_of_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="x must be float32, float16, or the bits of bfloat16 as uint16"):
        quantize("Q4_K", sample()[0].astype(np.float64))  # type: ignore[arg-type]


def test_wrong_sizes_are_refused() -> None:
    x, importance = sample()
    with pytest.raises(ValueError, match="a row of 700 values is not a whole number of Q4_K blocks of 256"):
        quantize("Q4_K", x[:, :700])
    with pytest.raises(ValueError, match=r"importance has \(32,\) entries for 768 columns"):
        quantize("Q4_K", x, importance[:32])
    with pytest.raises(ValueError, match="negative or not finite"):
        quantize("Q4_K", x, importance - 10)
    with pytest.raises(ValueError, match="there is no quantizer for type 'IQ1_S'"):
        quantize("IQ1_S", x)


def test_columns_without_importance_still_count_a_little() -> None:
    """Calibration that never reached an expert, or a column, must not leave its weights to chance."""
    x, importance = sample()
    np.testing.assert_array_equal(quantize("Q4_K", x, np.zeros(768, np.float32)), quantize("Q4_K", x))
    importance[:256] = 0
    y = judged("Q4_K", quantize("Q4_K", x, importance), x.shape)
    assert error(x[:, :256], y[:, :256], 1.0) < LLAMA_CPP["Q4_K"][0] * 1.1  # type: ignore[operator]
