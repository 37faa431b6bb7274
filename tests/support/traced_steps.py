"""A stand-in for a CUDA graph: a step recorded as tensor operations, and replayed without its Python code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


class TracedReplay:
    """A stand-in for `octavo.backends.torch.graphs.Replay`.

    As in a CUDA graph, host numbers keep their values from the capture, and waiting for the device fails: while a step
    is recorded, `.item()`, `.tolist()`, `nonzero` and the truth of a tensor have no value.
    """

    count = 0  # replays of all graphs

    def __init__(self, run: Callable[[], Tensor]) -> None:
        run()
        module = make_fx(lambda _: run())(torch.zeros(()))
        forbidden = {"nonzero", "_local_scalar_dense", "masked_select", "_to_copy_host"}
        for node in module.graph.nodes:
            assert not any(name in str(node.target) for name in forbidden), node
        self._run = lambda: module(torch.zeros(()))
        self.output: Tensor = self._run().clone()
        self._address = self.output.data_ptr()

    def __call__(self) -> None:
        with torch.no_grad():
            self.output.copy_(self._run())
        assert self.output.data_ptr() == self._address
        TracedReplay.count += 1
