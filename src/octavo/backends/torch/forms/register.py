"""The register of the torch forms of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.step import TorchStep
from octavo.graph.ops.base import Op

OpType = TypeVar("OpType", bound=Op)
Form = Callable[[OpType, TorchStep], Tensor | CodedRows]
FORMS: dict[type[Op], Form[Any]] = {}


def form(kind: type[OpType]) -> Callable[[Form[OpType]], Form[OpType]]:
    """Register a function as the form of an operation."""

    def register(of_kind: Form[OpType]) -> Form[OpType]:
        FORMS[kind] = of_kind
        return of_kind

    return register
