"""The IQ types of ggml: codes that are indices into fixed grids of likely vectors, or into a fixed curve.

Every decoder takes raw blocks uint8 [n, bytes per block] and gives float32 [n, values per block].
Source: the block structures and tables of `ggml-common.h`; the grids are in `iq_grids.npz`, written by
`tools/make_iq_grids.py`. Each expression rounds where ggml's own rounds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml_blocks import Bytes, Floats, codes, fields, half, planes, view_as

_GRIDS = Path(__file__).with_name("iq_grids.npz")

_CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_IQ1_SHIFT = np.float32(0.125)


@cache
def _grid(name: str) -> Floats:
    """The vectors of one grid: float32 [entries, 4 or 8]."""
    with np.load(_GRIDS, allow_pickle=False) as grids:
        grid: Floats = grids[name].astype(np.float32)
    return grid


def _sign_factors(bits: Bytes) -> Floats:
    """-1 for every set bit and 1 for every other, lowest first: [..., k] bytes -> [..., k, 8]."""
    return 1 - 2 * codes(bits[..., None], 1)


def _scaled(scale: Floats, values: Floats) -> Floats:
    """One scale [n, k] for each equal share of a block's values [n, ...]: [n, 256]."""
    product: Floats = scale[..., None] * values.reshape(*scale.shape, -1)
    return product.reshape(-1, 256)


@cache
def _even_signs() -> Bytes:
    """The eight signs that seven stored bits stand for: the eighth makes the number of minus signs even."""
    stored = np.arange(128, dtype=np.uint8)
    parity = fields(stored[:, None], 1).sum(axis=1, dtype=np.uint8) & np.uint8(1)
    signs: Bytes = stored | (parity << np.uint8(7))
    return signs


def _four_sign_groups(words: NDArray[np.uint32]) -> Floats:
    """Words [n, k], each four times seven stored sign bits: factors [n, k, 4, 8]."""
    stored = (words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & np.uint32(127)
    return _sign_factors(_even_signs()[stored])


def iq2_xxs(blocks: Bytes) -> Floats:
    words = view_as(blocks[:, 2:], "<u4").reshape(-1, 8, 2)
    scale = half(blocks, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    points = _grid("iq2_xxs")[blocks[:, 2:].reshape(-1, 8, 8)[..., :4]]
    return _scaled(scale, points * _four_sign_groups(words[..., 1]))


def iq2_xs(blocks: Bytes) -> Floats:
    words = view_as(blocks[:, 2:66], "<u2")
    scale = half(blocks, 0) * (np.float32(0.5) + codes(blocks[:, 66:], 4)) * np.float32(0.25)
    values = _grid("iq2_xs")[words & 511] * _sign_factors(_even_signs()[words >> 9])
    return _scaled(scale, values)


def iq2_s(blocks: Bytes) -> Floats:
    index = blocks[:, 2:34].astype(np.uint16) | (fields(blocks[:, 66:74], 2).astype(np.uint16) << 8)
    scale = half(blocks, 0) * (np.float32(0.5) + codes(blocks[:, 74:], 4)) * np.float32(0.25)
    values = _grid("iq2_s")[index] * _sign_factors(blocks[:, 34:66])
    return _scaled(scale, values)


def iq3_xxs(blocks: Bytes) -> Floats:
    words = view_as(blocks[:, 66:], "<u4")
    scale = half(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    points = _grid("iq3_xxs")[blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    return _scaled(scale, points * _four_sign_groups(words))


def iq3_s(blocks: Bytes) -> Floats:
    index = blocks[:, 2:66].astype(np.uint16) | (fields(blocks[:, 66:74], 1).astype(np.uint16) << 8)
    scale = half(blocks, 0) * (codes(blocks[:, 106:], 4) * 2 + 1)
    values = _grid("iq3_s")[index].reshape(-1, 32, 8) * _sign_factors(blocks[:, 74:106])
    return _scaled(scale, values)


def iq1_s(blocks: Bytes) -> Floats:
    header = view_as(blocks[:, 34:], "<u2")
    shift = np.where(header & 0x8000, -_IQ1_SHIFT, _IQ1_SHIFT)
    scale = half(blocks, 0) * (((header >> 12) & 7).astype(np.float32) * 2 + 1)
    high = (header[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    index = blocks[:, 2:34].astype(np.uint16) | (high.reshape(-1, 32) << 8)
    points = _grid("iq1_s")[index].reshape(-1, 8, 32)
    return _scaled(scale, points + shift[..., None])


def iq1_m(blocks: Bytes) -> Floats:
    words = view_as(blocks[:, 48:56], "<u2")
    # The half float of the block is spread over the top four bits of the four words of scales.
    pieces = (words >> 12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    whole = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    narrow = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    scale = whole * (narrow.reshape(-1, 16).astype(np.float32) * 2 + 1)
    high = fields(blocks[:, 32:48], 4)
    shift = np.where(high & 8, -_IQ1_SHIFT, _IQ1_SHIFT)
    index = blocks[:, :32].astype(np.uint16) | ((high & 7).astype(np.uint16) << 8)
    points = _grid("iq1_s")[index] + shift[..., None]
    return _scaled(scale, points)


def iq4_nl(blocks: Bytes) -> Floats:
    return half(blocks, 0) * _CURVE[planes(blocks[:, 2:], 4).reshape(-1, 32)]


def iq4_xs(blocks: Bytes) -> Floats:
    high = fields(blocks[:, 2:4], 2)
    low = fields(blocks[:, 4:8], 4)
    scale = half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return _scaled(scale, _CURVE[planes(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)])
