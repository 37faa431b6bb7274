"""The adapters of a rank: prepared on a thread as their parts arrive, and put into slots between steps."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np

from octavo.backends import AdaptingExecutor, Executor
from octavo.batch import Float32
from octavo.distributed.rank_messages import AdapterPart, DropAdapter, HoldAdapter, LoadAdapter, Tensor
from octavo.errors import OctavoError
from octavo.graph.ops.low_rank import LowRank


class RankAdapters:
    """The adapters that the leader holds, by the leader's numbers.

    `take` is for the thread that reads messages, `load` for the thread that runs steps.
    """

    def __init__(self) -> None:
        self.executor: Executor | None = None  # once it is loaded
        self._parts: dict[int, dict[str, LowRank]] = {}
        self._prepared: dict[int, Future[object]] = {}
        self._thread = ThreadPoolExecutor(1, "octavo-adapters")

    def take(self, message: AdapterPart | HoldAdapter | DropAdapter) -> None:
        """Handle a part of an adapter, the end of its parts, or its removal."""
        number = message.adapter
        if isinstance(message, AdapterPart):
            a, gain = (None if each is None else _numbers(each) for each in (message.a, message.gain))
            part = LowRank(a, _numbers(message.b), message.scale, gain)
            self._parts.setdefault(number, {})[message.name] = part
        elif isinstance(message, HoldAdapter):
            parts, executor = self._parts.pop(number, {}), self.executor
            if not isinstance(executor, AdaptingExecutor):
                raise OctavoError("the leader sent an adapter to a rank that holds none")
            self._prepared[number] = self._thread.submit(executor.prepare_adapter, parts)
        else:
            self._prepared.pop(number, None)

    def load(self, message: LoadAdapter) -> None:
        """Put an adapter into a slot."""
        prepared = self._prepared[message.adapter].result()
        cast(AdaptingExecutor, self.executor).load_adapter(message.slot, prepared)


def _numbers(tensor: Tensor) -> Float32:
    return tensor.array().astype(np.float32, copy=False)
