"""Planes in the form that libraries read: one code per number, and a floating-point scale and zero for each group.

A number is (code - zero) * scale. The minima of ggml's types (Q4_K: groups of 32) thus become fractional zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.quantized import codes_of, scales_of, spread


class GroupedCodes(NamedTuple):
    """codes: int32 [out, in].
    scales, zeros: float32 [out, groups]; zeros is None if the zero point is the middle code or if there is none.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def grouped_codes(p: Planes) -> GroupedCodes:
    """Return the codes of a matrix [out, in], with columns in the order of the codes; they mean the same numbers up to
    rounding.
    """
    width, groups = p.shape[-1], p.scales.shape[-1]
    codes, scales = codes_of(p)[..., :width].int(), scales_of(p, p.scales)
    if p.supers is not None:
        scales = scales * spread(p.supers.float(), p.super_group // p.group, groups)
    if p.decode != "integer":
        return GroupedCodes(codes, scales * (2.0 if p.decode == "e2m1_doubled" else 1.0), None)
    if p.minima is None and p.zeros is None and p.zero == 1 << (p.bits + p.high_bits - 1):
        return GroupedCodes(codes, scales, None)
    zeros = torch.full_like(scales, float(p.zero)) if p.zeros is None else p.zeros.float()
    if p.minima is None:
        return GroupedCodes(codes, scales, zeros)
    minima = p.minima.float()
    if p.super_minima is not None:
        minima = minima * spread(p.super_minima.float(), p.super_group // p.group, groups)
    # A group whose numbers are all equal has no scale: its codes become 0, its scale 1.
    is_flat = scales == 0
    zeros = torch.where(is_flat, -minima, zeros - minima / torch.where(is_flat, 1.0, scales))
    codes = torch.where(spread(is_flat, p.group, width), 0, codes)
    return GroupedCodes(codes, torch.where(is_flat, 1.0, scales), zeros)
