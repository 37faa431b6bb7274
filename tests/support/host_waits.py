"""A guard around what may not wait for the device: everything that asks a tensor for its numbers fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

WAITS = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def refuse_waits(monkeypatch: pytest.MonkeyPatch, is_free: Callable[[], bool] = lambda: False) -> None:
    """Until the end of the test, or of `monkeypatch.context`. is_free: what asks now may."""

    def guard(method: str) -> None:
        whole = getattr(torch.Tensor, method)

        def refuse(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            assert is_free(), f"{method} waits for the device"
            return whole(x, *args, **options)

        monkeypatch.setattr(torch.Tensor, method, refuse)

    for method in WAITS:
        guard(method)
