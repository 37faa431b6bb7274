"""A CPU stand-in for `humming-kernels` 0.1.20: its layer, with the shapes and types of its tensors and calls."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.backends.torch.providers import problems
from octavo.backends.torch.providers.choice import choose

_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class FakeLayer:
    """A fake `humming.layer.HummingLayer`. With `num_experts`, all tensors have a leading dimension for the experts."""

    made: list[FakeLayer] = []  # noqa: RUF012 - the tests look at it

    def __init__(
        self,
        *,
        shape_n: int,
        shape_k: int,
        weight_config: dict[str, Any],
        num_experts: int | None,
        torch_dtype: torch.dtype,
    ) -> None:
        self.experts = () if num_experts is None else (num_experts,)
        self.shape, self.config, self.dtype = (shape_n, shape_k), weight_config, torch_dtype
        FakeLayer.made.append(self)

    def to(self, device: torch.device) -> FakeLayer:
        assert device.type == "cpu"
        return self

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        group, (out, width) = self.config["group_size"] or self.shape[1], self.shape
        of_groups = (*self.experts, out, width // group)
        assert tensors["weight"].shape == (*self.experts, *self.shape)
        assert tensors["weight_scale"].shape == of_groups
        assert tensors["weight_scale"].dtype == self.dtype
        assert ("zero_point" in tensors) == self.config["has_zero_point"] == self.config["is_fp_zero_point"]
        if "zero_point" in tensors:
            assert (tensors["zero_point"].shape, tensors["zero_point"].dtype) == (of_groups, self.dtype)
        self.tensors, self.group = tensors, group

    def transform(self) -> None:
        kind, codes = self.config["dtype"], self.tensors["weight"]
        if kind == "float8e4m3":
            numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        elif kind == "float4e2m1":
            numbers = torch.tensor([*_E2M1, *(-x for x in _E2M1)])[codes.long()]
        else:
            middle = torch.full_like(self.tensors["weight_scale"], 2.0 ** (int(kind.removeprefix("uint")) - 1))
            numbers = codes - self.tensors.get("zero_point", middle).float().repeat_interleave(self.group, dim=-1)
        self.numbers = numbers * self.tensors["weight_scale"].float().repeat_interleave(self.group, dim=-1)

    def __call__(
        self,
        inputs: Tensor,
        outputs: Tensor | None = None,
        expert_layout: Tensor | None = None,
        compute_config: dict[str, str] | None = None,
    ) -> Tensor:
        assert inputs.is_contiguous()
        assert inputs.dtype == self.dtype
        if not self.experts:
            assert expert_layout is compute_config is None
            found = (inputs.float() @ self.numbers.T).to(inputs.dtype)
            return found if outputs is None else outputs.copy_(found)
        assert compute_config == {"gemm_type": "grouped_contiguous"}
        assert expert_layout is not None
        assert (expert_layout.dtype, expert_layout.shape) == (torch.int32, (self.experts[0] + 1,))
        ends = expert_layout.tolist()
        assert ends == sorted(ends)
        assert ends[0] == 0
        assert ends[-1] <= len(inputs)
        found = torch.full((len(inputs), self.shape[0]), torch.nan, dtype=inputs.dtype)
        for expert, (begin, end) in enumerate(pairwise(ends)):
            found[begin:end] = (inputs[begin:end].float() @ self.numbers[expert].T).to(inputs.dtype)
        return found


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the library with the stand-in. No layer must exist yet, and no provider must have been chosen."""
    layer, ops = ModuleType("humming.layer"), ModuleType("humming.ops")
    layer.HummingLayer, ops.pack_weight = FakeLayer, _packed  # type: ignore[attr-defined]
    for name, module in (("humming", ModuleType("humming")), ("humming.layer", layer), ("humming.ops", ops)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(problems, "find_spec", lambda name: name)
    FakeLayer.made.clear()
    choose.cache_clear()


def _packed(codes: Tensor, bits: int) -> Tensor:
    assert codes.dtype == torch.int32
    assert int(codes.min()) >= 0
    assert int(codes.max()) < 1 << bits
    return codes
