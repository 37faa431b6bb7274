"""A guard for code that must not wait for the device: any attempt to read a tensor's numbers fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

WAITS = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def refuse_waits(monkeypatch: pytest.MonkeyPatch, is_free: Callable[[], bool] = lambda: False) -> None:
    """Refuse waits until the end of the test, or of `monkeypatch.context`.

    is_free: returns True if the current code may wait.
    """

    def guard(method: str) -> None:
        whole = getattr(torch.Tensor, method)

        def refuse(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            assert is_free(), f"{method} waits for the device"
            return whole(x, *args, **options)

        monkeypatch.setattr(torch.Tensor, method, refuse)

    for method in WAITS:
        guard(method)
