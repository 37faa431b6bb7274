"""Steps with one token per sequence, captured once for each of several sizes and replayed with a single launch.

A step of 5 sequences runs in the graph for 8. The padding rows belong to separate one-token sequences, whose block and
state slot nobody reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.backends.torch.step_arrays import DecodeArrays, HostArrays, SeenBlocks
from octavo.backends.torch.token_board import LateNumbers
from octavo.batch import Batch, Int32


class Replay(Protocol):
    """A captured step."""

    output: Tensor  # at the same address in every replay

    def __call__(self) -> None:
        """Run the step with the current contents of its input tensors."""


Capture = Callable[[Callable[[], Tensor]], Replay]
"""Captures a function that reads and writes tensors at fixed addresses, and returns a tensor."""


class CudaReplay:
    """A CUDA graph. Graphs on one device share a memory pool, so the largest is captured first."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # before the capture, load kernels and let libraries create their handles
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # CUDA calls from other threads, which may be loading a second model, must not end the capture.
        pool = _pool(torch.cuda.current_device())
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = run()

    def __call__(self) -> None:
        self._graph.replay()


@cache
def _pool(device: int) -> Any:  # noqa: ARG001 - each device has its own
    """Return the memory pool of all graphs on a device, whose steps never run at the same time."""
    return torch.cuda.graph_pool_handle()


def buckets(most: int) -> list[int]:
    """Return the numbers of sequences to capture, largest first.

    They are 1, 2, 4, the multiples of 8 up to 256, and the multiples of 32 from there on.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, most + 32, 32)]
    return sorted({min(size, most) for size in sizes}, reverse=True)


@dataclass(frozen=True, slots=True)
class SpareRows:
    """Where padding rows are written: block number `num_blocks` and state `num_states`, each one past the last."""

    num_groups: int
    num_blocks: int
    block_size: int
    num_states: int

    def alone(self, size: int) -> Batch:
        """Return a step that consists of `size` padding rows."""
        return self.padded(_nothing(self), size)

    def padded(self, batch: Batch, size: int) -> Batch:
        """Return the step padded with one-token sequences to `size` sequences."""
        count = size - len(batch.seq_lens)

        def more(array: np.ndarray, value: int, axis: int = 0) -> np.ndarray:
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, count)
            return np.pad(array, widths, constant_values=value)

        rows = np.arange(size + 1, dtype=np.int32)
        states = batch.state_slots
        return replace(
            batch,
            token_ids=more(batch.token_ids, 0),
            token_sources=None if batch.token_sources is None else more(batch.token_sources, -1),
            positions=more(batch.positions, 0),
            query_start_loc=rows,
            seq_lens=more(batch.seq_lens, 1),
            block_tables=more(batch.block_tables[: self.num_groups], self.num_blocks, 1),
            slot_mapping=more(batch.slot_mapping[: self.num_groups], self.num_blocks * self.block_size, 1),
            logits_indices=rows[:-1],
            state_saves=None,  # `DecodeGraphs.bucket_of` accepts no steps that save states
            state_slots=None if states is None else more(states, self.num_states),
        )


class SentNumbers:
    """The input numbers of captured steps of one size.

    They are written to `numbers` on the host and then copied to `tensor` on the device, where the steps read them.
    """

    def __init__(self, numbers: Int32, device: torch.device) -> None:
        """numbers: initial numbers."""
        is_cuda = device.type == "cuda"
        self._memory = torch.empty(len(numbers), dtype=torch.int32, pin_memory=is_cuda)
        self.numbers: Int32 = self._memory.numpy()
        self.numbers[:] = numbers
        self.tensor = self._memory.to(device, copy=True)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait until `numbers` may be written."""
        # At most two steps are in flight, and the first ends before a third is sent, so this normally does not wait.
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()

    def send(self) -> None:
        """Copy `numbers` to the device."""
        self.tensor.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class DecodeInput:
    """The input numbers for captured steps of one size with one token per sequence."""

    def __init__(self, host: HostArrays, device: torch.device) -> None:
        """host: host arrays of a step that consists of padding rows."""
        self._host, self._sent = host, SentNumbers(host.flat, device)
        self._arrays = DecodeArrays(host, self._sent.numbers)
        self.tensor = self._sent.tensor

    def write(self, batch: Batch, seen: Sequence[SeenBlocks], late: LateNumbers | None) -> None:
        """Send the numbers of a step to the device.

        late: adjusts some of the numbers on the device.
        """
        self._sent.settle()
        self._arrays.write(batch, seen)
        self._sent.send()
        if late is not None:
            late.move(self._host, self.tensor)


class DecodeGraphs:
    """The captured steps of an executor, one for each size."""

    def __init__(
        self,
        run: Callable[[HostArrays, Tensor], Tensor],
        host_of: Callable[[Batch], HostArrays],
        seen_of: Callable[[Batch], Sequence[SeenBlocks]],
        spare: SpareRows,
        capture: Capture,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """run: computes a step's logits in the workspace, from the step's arrays on the host and on the device.
        host_of: returns the host arrays of a step, whose shapes depend only on its size.
        seen_of: returns a step's blocks by group of layers.
        sizes: numbers of sequences, largest first.
        """
        self._seen_of, self._sizes = seen_of, sorted(sizes)
        self._every_row = np.arange(max(sizes) + 1, dtype=np.int32)
        self._inputs: dict[int, DecodeInput] = {}
        self._replays: dict[int, Replay] = {}
        for size in sizes:
            host = host_of(spare.alone(size))
            self._inputs[size] = DecodeInput(host, device)
            flat = self._inputs[size].tensor
            self._replays[size] = capture(lambda h=host, flat=flat: run(h, flat))  # type: ignore[misc]

    def bucket_of(self, batch: Batch) -> int | None:
        """Return the captured size for a step, or None unless each of its sequences has one token and wants
        its logits.
        """
        count = len(batch.seq_lens)
        is_decode = count == len(batch.token_ids) == len(batch.logits_indices)
        if not is_decode or count > self._sizes[-1]:
            return None
        if len(batch.hidden_indices) or batch.token_types is not None:
            return None
        rows = self._every_row[: count + 1]
        if (batch.query_start_loc != rows).any() or (batch.logits_indices != rows[:-1]).any():
            return None
        if batch.state_saves is not None and (batch.state_saves[..., 1] >= 0).any():
            return None
        return self._sizes[bisect_left(self._sizes, count)]

    def logits(self, batch: Batch, size: int, late: LateNumbers | None = None) -> Tensor:
        """Return the logits of a step [sequences, vocab]; the next step overwrites them.

        late: adjusts some of the step's numbers on the device.
        """
        self._inputs[size].write(batch, self._seen_of(batch), late)
        self._replays[size]()
        return self._replays[size].output[: len(batch.seq_lens)]


def _nothing(spare: SpareRows) -> Batch:
    """Return a step without sequences."""
    none = np.zeros(0, np.int32)
    return Batch(
        none,
        none,
        np.zeros(1, np.int32),
        none,
        np.zeros((spare.num_groups, 0, 1), np.int32),
        np.zeros((spare.num_groups, 0), np.int32),
        none,
        state_slots=none,
    )
