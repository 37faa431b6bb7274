"""Problems that a library may solve in place of one of our kernels, and code that all libraries share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch

from octavo.backends.torch.kernels.planes import Planes
from octavo.graph.ops.attention import AttentionParams

EXTRA = "pip install 'octavo[gpu-fast]'"


@dataclass(frozen=True, slots=True)
class Place:
    """The device and options of a step.

    capability: compute capability of the GPU; None means the CPU.
    dtype: type of the step's values.
    repeats: no result may depend on the other contents of the step.
    """

    capability: tuple[int, int] | None
    dtype: torch.dtype
    repeats: bool = False

    @staticmethod
    def of(device: torch.device, dtype: torch.dtype, *, repeats: bool = False) -> Place:
        """Return the place of a backend with these options."""
        is_gpu = device.type == "cuda"
        return Place(torch.cuda.get_device_capability(device) if is_gpu else None, dtype, repeats)


@dataclass(frozen=True, slots=True)
class ProductProblem:
    """Products of some rows with a matrix [out, in] that is held as codes.

    group: number of columns that share a scale.
    experts: number of matrices in the stack, each multiplied by the rows that chose it. Zero means a single matrix.
    beside: the mixture's other stacks. The library must be able to take them too. None represents a stack held as plain
    numbers.
    """

    place: Place
    type_name: str
    shape: tuple[int, int]
    bits: int
    group: int
    decode: str
    rounds_inputs: bool
    is_affine: bool  # each group has its own zero or minimum
    experts: int = 0
    beside: tuple[ProductProblem | None, ...] = ()

    @property
    def title(self) -> str:
        return f"products of {'experts' if self.experts else 'some rows'} with {self.type_name}"

    @staticmethod
    def of(place: Place, p: Planes, shape: tuple[int, ...]) -> ProductProblem:
        """Return the problem of multiplying by planes.

        shape: [out, in] or [experts, out, in] of the whole weight; `p` may be one row of it.
        """
        count = shape[0] if len(shape) > 2 else 0
        is_affine = p.zeros is not None or p.minima is not None
        bits, has_inputs = p.bits + p.high_bits, p.inputs is not None
        return ProductProblem(
            place, p.type_name, (shape[-2], shape[-1]), bits, p.group, p.decode, has_inputs, is_affine, count
        )


def mixture_problems(
    place: Place, stacks: Sequence[tuple[Planes | None, tuple[int, ...]]]
) -> list[ProductProblem | None]:
    """Return the problem of each stack of a mixture, or None for a stack without planes.

    stacks: planes (one row is enough) or None for plain numbers, and the shape [experts, out, in].
    """
    alone = [None if p is None else ProductProblem.of(place, p, shape) for p, shape in stacks]
    return [
        None if own is None else replace(own, beside=tuple(dict.fromkeys(other for other in alone if other != own)))
        for own in alone
    ]


@dataclass(frozen=True, slots=True)
class PromptProblem:
    """Attention of several tokens of a sequence over the paged cache."""

    place: Place
    params: AttentionParams
    cache_dtype: torch.dtype
    has_sinks: bool = False

    @property
    def title(self) -> str:
        window = "" if self.params.window is None else f" in a window of {self.params.window}"
        return f"attention of prompts{window}"


@dataclass(frozen=True, slots=True)
class StateProblem:
    """The recurrence of many tokens of a sequence over each head's state [key_dim, value_dim]."""

    place: Place
    operation: Literal["gated delta rule", "selective scan"]
    key_dim: int
    value_dim: int

    @property
    def title(self) -> str:
        return f"{self.operation} of prompts"


KernelProblem = ProductProblem | PromptProblem | StateProblem


def missing(module: str, package: str) -> str | None:
    """Return the reason why a library cannot be imported, or None if it can."""
    return None if find_spec(module) is not None else f"{package} is not installed ({EXTRA})"


def unfit(place: Place, least: tuple[int, int] = (8, 0)) -> str | None:
    """Return the reason why no library can be used on this GPU, or None.

    least: minimum compute capability.
    """
    if place.repeats:
        return "deterministic is set, and its sums may depend on the rest of the batch"
    if place.capability is None:
        return "there is no GPU"
    if place.capability < least:
        found, needed = (".".join(map(str, pair)) for pair in (place.capability, least))
        return f"it needs compute capability {needed}, and the GPU has {found}"
    if place.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {str(place.dtype).removeprefix('torch.')}"
    return None
