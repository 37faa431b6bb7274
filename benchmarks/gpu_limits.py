"""Limits of an H200's data sheet for the targets that are not met: the time that their bytes or operations need."""

from __future__ import annotations

from typing import NamedTuple

_READ = 4.8e12  # bytes a second
_BF16, _FP8 = 989e12, 1979e12  # operations a second, without sparsity
_WIDEST = 28672 * 4096  # numbers of gate and up
_LAYER = _WIDEST + 6144 * 4096 + 4096 * 4096 + 4096 * 14336
_LAYERS, _HEAD = 32, 128256 * 4096
_TOKEN = _LAYERS * 2 * 8 * 128 * 2  # bytes of a token's keys and values in bfloat16
_BITS = {"4 bits": 4.1875, "Q4_K": 4.625, "Q6_K": 6.5625}  # for each number, with scales and zeros
_REPLACED = "measured before its kernel was replaced"


class Limit(NamedTuple):
    """The best possible figure of a target, in the figure's unit."""

    value: float
    unit: str
    arithmetic: str
    note: str = ""


def _weights(numbers: int, kind: str) -> Limit:
    """The time to read codes once, in microseconds."""
    nbytes = numbers * _BITS[kind] / 8
    text = f"{numbers / 1e6:.1f} million numbers of {_BITS[kind]:.3g} bits: {nbytes / 1e6:.1f} MB"
    return Limit(nbytes / _READ * 1e6, "microseconds", text)


def _against_bf16(kind: str) -> Limit:
    return Limit(16 / _BITS[kind], "x", f"16 bits over {_BITS[kind]:.3g} bits", "humming takes these rows if installed")


def _decode(batch: int, layer_bits: float) -> Limit:
    """Tokens a second with contexts of 1,024. The output head is in bfloat16."""
    weights, cache = _LAYERS * _LAYER * layer_bits / 8 + 2 * _HEAD, batch * 1024 * _TOKEN
    seconds = (weights + cache) / _READ
    text = f"{weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of cache: {seconds * 1e3:.2f} ms a step"
    return Limit(batch / seconds, "tokens/s", text)


_LOGITS = 32 * 128256 * 4
_ROWS = 2.0 * 1024 * _WIDEST
_ATTENTION = 2.0 * 4096**2 * 32 * 128
# By the titles of targets.
LIMITS = {
    "4 bits, gate and up, 1 row": _weights(_WIDEST, "4 bits"),
    "4 bits, a layer, 1 row": _weights(_LAYER, "4 bits"),
    "4 bits, a layer, 8 rows": _weights(_LAYER, "4 bits"),
    "Q4_K, a layer, 1 row": _weights(_LAYER, "Q4_K"),
    "E4M3 in blocks, 1,024 rows": Limit(
        _ROWS / _FP8 * 1e6, "microseconds", f"{_ROWS / 1e9:.0f} GFLOP at {_FP8 / 1e12:,.0f} TFLOP/s"
    ),
    "prefill attention, 4,096 tokens": Limit(
        _BF16 / 1e12, "TFLOP/s", f"{_ATTENTION / 1e9:.0f} GFLOP in {_ATTENTION / _BF16 * 1e6:.0f} microseconds"
    ),
    "sampling, filters, 32 rows": Limit(
        _LOGITS / _READ * 1e6, "microseconds", f"{_LOGITS / 1e6:.1f} MB of logits, read once", _REPLACED
    ),
    "fp8 cache against bf16, 32 sequences of 8,192": Limit(2.0, "x", "2 bytes over 1 byte", _REPLACED),
    "int8 cache against bf16, 32 sequences of 8,192": Limit(
        2 / (1 + 4 / 128), "x", "2 bytes over 1 byte and a scale of 4 bytes for 128 numbers", _REPLACED
    ),
    "bf16, batch 256": _decode(256, 16),
    "4 bits, batch 1": _decode(1, _BITS["4 bits"]),
    "4 bits, batch 32": _decode(32, _BITS["4 bits"]),
    "Q4_K against bf16, 8 rows": _against_bf16("Q4_K"),
    "Q6_K against bf16, 8 rows": _against_bf16("Q6_K"),
}
