"""Rows as 8-bit codes with scales: the inputs of products whose weights require them.

`octavo.quantization.packed.inputs` defines them in numpy. A device that cannot multiply such codes computes with the
original rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.quantization.packed.inputs import LARGEST, InputKind

INPUT_GROUPS = (32, 64, 128)  # columns per scale, for codes that are multiplied by codes


class CodeForm(NamedTuple):
    """kind: type of the codes.
    group: number of columns that share a scale; 0 means the whole row.
    """

    kind: InputKind
    group: int = 0


Find = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Finds planned memory of this shape and type. None means that there is none and torch allocates the tensor."""


def nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:  # noqa: ARG001
    """Return None, so that torch allocates the memory: the `Find` for use outside of steps."""
    return None


@dataclass(frozen=True, slots=True)
class CodedRows:
    """codes: int8 or uint8 (the bits of E4M3) [rows, cols].
    scales: float32 [rows, groups].
    dtype: type of the dequantized numbers.
    """

    codes: Tensor
    scales: Tensor
    form: CodeForm
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.codes)


def has_products_of(kind: InputKind, device: torch.device) -> bool:
    """Return True if the device multiplies codes by codes: int8 from compute capability 8.0 on, E4M3 from 8.9 on."""
    if device.type != "cuda":
        return True  # in plain torch or under the interpreter, where only the numbers matter
    return torch.cuda.get_device_capability(device) >= ((8, 9) if kind == "e4m3" else (8, 0))


def rounded(x: Tensor, form: CodeForm) -> Tensor:
    """Round x [rows, cols] to codes and convert it back to its own type."""
    cols = x.shape[1]
    step = form.group or max(cols, 1)
    groups = torch.nn.functional.pad(x.float(), (0, -cols % step)).reshape(len(x), -1, step)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / LARGEST[form.kind])
    scaled = groups / scales
    codes = scaled.round().clamp(-127, 127) if form.kind == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return (codes * scales).reshape(len(x), -1)[:, :cols].to(x.dtype)


def coded_bytes(rows: int, cols: int, alignment: int) -> int:
    """Return the maximum size of coded rows and their scales as two aligned tensors."""
    groups = -(-cols // min(INPUT_GROUPS))
    return sum(-(-size // alignment) * alignment for size in (rows * cols, 4 * rows * groups))


def places_in(memory: Tensor) -> Find:
    """Return a `Find` that allocates codes within `memory`, the memory of the value that they replace."""
    free = memory.view(-1).view(torch.uint8)

    def find(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        nonlocal free
        size = prod(shape) * dtype.itemsize
        if size > len(free):
            return None
        found, free = free[:size].view(dtype).view(shape), free[-(-size // 16) * 16 :]
        return found

    return find
