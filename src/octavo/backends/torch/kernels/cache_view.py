"""The paged cache of one layer as kernels see it: keys and values in blocks, in any number type that the cache
supports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import LOAD_F32, as_bytes, from_e4m3, from_e5m2, require_columns


@lru_cache
def _converts_e4m3(device: torch.device) -> bool:
    """Return True if the GPU has an instruction that converts E4M3.

    Without one, arithmetic on the bits is faster than Triton's own conversion.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True, slots=True)
class CacheView:
    """Views of one layer: [blocks, kv heads, slots, dim] with any strides, except that a slot's columns are contiguous.

    The engine's tensor is [block, layer, 2, head, slot, dim]. Number types: float32, float16 and bfloat16; float8
    (E4M3, E5M2) with one factor for all numbers; int8 with one factor per token and head.
    """

    keys: Tensor
    values: Tensor | None  # None if values are the first columns of the keys
    key_scales: Tensor | None = None  # for int8: float32 [blocks, kv heads, slots]
    value_scales: Tensor | None = None
    key_factor: float = 1.0  # for float8
    value_factor: float = 1.0

    @property
    def kind(self) -> int:
        """The number type, for kernels: 0 plain, 1 E4M3, 2 E5M2, 3 int8, 4 E4M3 that the GPU converts."""
        if self.keys.dtype is torch.float8_e4m3fn:
            return 4 if _converts_e4m3(self.keys.device) else 1
        return {torch.float8_e5m2: 2, torch.int8: 3}.get(self.keys.dtype, 0)


class CacheOperands(NamedTuple):
    """Pointers and strides of a `CacheView`. In the names of strides, b, h and s mean block, head and slot."""

    key_data: Any
    value_data: Any  # not `values`, which Triton's tuples define
    key_scales: Any
    value_scales: Any
    kb: int
    kh: int
    ks: int
    vb: int
    vh: int
    vs: int
    kfb: int
    kfh: int
    vfb: int
    vfh: int


def cache_operands(c: CacheView) -> CacheOperands:
    """Return `c` as a kernel argument."""

    require_columns(c.keys, c.values)

    def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
        return (0,) * count if x is None else x.stride()[:count]

    return CacheOperands(
        as_bytes(c.keys), None if c.values is None else as_bytes(c.values), c.key_scales, c.value_scales,
        *strides(c.keys, 3), *strides(c.values, 3), *strides(c.key_scales, 2), *strides(c.value_scales, 2),
    )  # fmt: skip


# PTX that converts four int8 bytes to four float16: code + 128, placed in the lowest bits of 1,024, is 1,152 + code.
_HALVES = tl.constexpr(
    "{ .reg .b32 t, z; xor.b32 t, $2, 0x80808080; mov.b32 z, 0x64806480; "
    "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342; "
    "sub.rn.f16x2 $0, $0, z; sub.rn.f16x2 $1, $1, z; }"
)
_MOST_HALF = tl.constexpr(65504.0)


@triton.jit
def query_of(q, KIND: tl.constexpr):
    """Convert queries to the type of `loaded`: float16 for eight-bit caches, because GPUs convert eight bits to it
    directly.
    """
    if LOAD_F32:
        return q.to(tl.float32)
    elif KIND >= 3:
        wide = q.to(tl.float32)
        return tl.where(wide > _MOST_HALF, _MOST_HALF, tl.where(wide < -_MOST_HALF, -_MOST_HALF, wide)).to(tl.float16)
    else:
        return q


@triton.jit
def loaded(pointers, mask, like, KIND: tl.constexpr):
    """Load numbers from the cache, without their scales, as operands of a product with `like` (see `query_of`)."""
    x = tl.load(pointers, mask, 0)
    if KIND == 1:
        x = from_e4m3(x)
    elif KIND == 2:
        x = from_e5m2(x)
    elif KIND == 3 and not LOAD_F32:  # by moving bytes, because conversions are slow
        x = tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif KIND == 4:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if LOAD_F32:
        return x.to(tl.float32)
    else:
        return x.to(like.dtype)
