"""Execution of the torch form of an operation: differentiable, on any device, with the meaning that `octavo.graph.ops`
defines.
"""

from __future__ import annotations

import torch

from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.forms import (  # noqa: F401 - they register forms
    adapters,
    attentions,
    elements,
    products,
    rows,
    states,
)
from octavo.backends.torch.forms.register import FORMS
from octavo.backends.torch.step import TorchStep
from octavo.errors import GraphError
from octavo.graph.builder import Node


def evaluate(node: Node, step: TorchStep) -> None:
    """Compute one operation and store its output in the step, in the memory planned for it if there is any. Do nothing
    if the output has no rows.

    Raises GraphError naming an operation without a torch form.
    """
    check_operation(node)
    if not step.count_of(node.output.rows):
        # True for all parts of a prompt except the last. Forms and kernels do not handle matrices without rows.
        step.values[node.output] = torch.empty((0, node.output.cols), device=step.rows.wanted.device)
        return
    step.begin(node)
    found, out = FORMS[type(node.op)](node.op, step), step.out
    if isinstance(found, CodedRows):
        step.codes[node.output] = found
    elif out is None or (found.data_ptr() == out.data_ptr() and found.shape == out.shape):
        step.values[node.output] = found
    else:
        step.values[node.output] = out.copy_(found)


def check_operation(node: Node) -> None:
    """Raise GraphError naming the operation if it has no torch form."""
    if type(node.op) not in FORMS:
        raise GraphError(f"{node.layer}: {node.op.name}: the torch backend does not support this operation")
