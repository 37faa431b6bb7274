"""Layers whose weights are in main memory or on disk, copied to a ring of device buffers ahead of their use.

Streamed layer number i always uses buffer i modulo the number of buffers, so every tensor has a fixed address. When a
layer has been computed, the next one for its buffer is copied; after the last layers of a step, these are the first
layers of the next step. ZeRO-Inference and Accelerate's offload with overlap use similar techniques.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from octavo.errors import EngineDeadError
from octavo.graph.builder import Node
from octavo.graph.values import Value
from octavo.platform import files

_READ_BYTES = 16 << 20  # read by one call
_STAGED = 2  # layers being read from disk at a time


@dataclass(frozen=True, slots=True)
class FileLayer:
    """The weights of a layer in the file at `path`."""

    file: IO[bytes]
    path: Path
    offset: int
    num_bytes: int

    def read_into(self, buffer: Tensor) -> None:
        """Read the layer. Raises OSError if the disk reports an error or the file has become shorter."""
        view, done = buffer[: self.num_bytes].numpy().data, 0
        while done < self.num_bytes:
            count = files.read_into(self.file.fileno(), view[done : done + _READ_BYTES], self.offset + done)
            if not count:
                raise OSError(errno.EIO, "the file was truncated")
            done += count


class CopyEngine(Protocol):
    """Makes copies alongside the computation, in the order of the calls."""

    def mark(self) -> Any:
        """Return a mark that the computation reaches once everything submitted so far is done."""

    def copy(self, place: Tensor, source: Any, after: Any) -> Any:
        """Start copying a layer once the computation has reached the mark `after`; None means at once."""

    def await_copy(self, copy: Any) -> None:
        """Make everything that is submitted from now on wait for a copy."""

    def finish(self, copy: Any) -> None:
        """Wait until a copy is done."""

    def close(self) -> None:
        """End the threads after the copies that have started."""


class HostCopies:
    """Makes copies on a thread, for a device where a computation is done when the call that submits it returns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "octavo-stream")

    def mark(self) -> None:
        return None

    def copy(self, place: Tensor, source: Tensor, after: None) -> Future[Tensor]:  # noqa: ARG002 - it has passed
        return self._thread.submit(place[: len(source)].copy_, source)

    def await_copy(self, copy: Future[Tensor]) -> None:
        copy.result()

    finish = await_copy

    def close(self) -> None:
        self._thread.shutdown()


class StreamCopies:
    """Makes copies from pinned memory on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def copy(self, place: Tensor, source: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            place[: len(source)].copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def await_copy(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(copy)

    def finish(self, copy: torch.cuda.Event) -> None:
        copy.synchronize()

    def close(self) -> None:
        self._stream.synchronize()


class FileCopies:
    """Makes copies from files: a thread reads the next layers into buffers, and another engine copies them from there.

    A copy whose layer cannot be read fails with EngineDeadError, which names the file.
    """

    def __init__(self, copies: CopyEngine, num_bytes: int, *, pinned: bool) -> None:
        """num_bytes: size of the largest layer.
        pinned: use pinned buffers, as a GPU's copies require.
        """
        self._copies = copies
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_STAGED)]
        self._from: list[Any] = [None] * _STAGED  # the latest copy from each buffer
        self._next = 0
        self._thread = ThreadPoolExecutor(1, "octavo-read")

    def mark(self) -> Any:
        return self._copies.mark()

    def copy(self, place: Tensor, source: FileLayer, after: Any) -> Future[Any]:
        return self._thread.submit(self._staged, place, source, after)

    def _staged(self, place: Tensor, source: FileLayer, after: Any) -> Any:
        number = self._next
        self._next = (number + 1) % _STAGED
        if self._from[number] is not None:
            self._copies.finish(self._from[number])
        try:
            source.read_into(self._buffers[number])
        except OSError as error:
            raise EngineDeadError(
                f"{source.path}: a streamed layer could not be read: {error.strerror or error}. Start again: a damaged "
                "file is removed, and the layers are written again"
            ) from error
        self._from[number] = self._copies.copy(place, self._buffers[number][: source.num_bytes], after)
        return self._from[number]

    def await_copy(self, copy: Future[Any]) -> None:
        self._copies.await_copy(copy.result())

    def finish(self, copy: Future[Any]) -> None:
        self._copies.finish(copy.result())

    def close(self) -> None:
        self._thread.shutdown()
        self._copies.close()


class LayerRing:
    """The ring of buffers for streamed layers. A layer is computed between `enter` and `leave`."""

    def __init__(self, sources: Sequence[Any], places: Sequence[Tensor], copies: CopyEngine) -> None:
        """sources: the layers in the order of a step, in the form that `copies` takes.
        places: uint8 buffers, each large enough for any layer.
        """
        self._sources, self._places, self._copies = sources, places, copies
        self._holds: list[int | None] = [None] * len(places)  # the layer that each buffer holds or receives
        self._arrivals: list[Any] = [None] * len(places)

    def enter(self, layer: int) -> None:
        """Make sure that work submitted from now on can use the layer."""
        count = len(self._places)
        if self._holds[layer % count] != layer:
            self._fill(layer, self._copies.mark())
        for ahead in range(layer + 1, min(layer + count, len(self._sources))):
            if self._holds[ahead % count] is None:  # only in the first step; later, `leave` fills the buffers
                self._fill(ahead, self._copies.mark())
        self._copies.await_copy(self._arrivals[layer % count])

    def leave(self, layer: int) -> None:
        """Record that this step no longer uses the layer after the work submitted so far."""
        following = layer + len(self._places)
        if following >= len(self._sources):
            following = layer % len(self._places)
        if following != layer:
            self._fill(following, self._copies.mark())

    def replace_places(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Continue with the same bytes in other buffers. Call after `settle`."""
        self._places = [moved(place) for place in self._places]

    def settle(self) -> None:
        """Wait until no copy is in flight."""
        for arrival in self._arrivals:
            if arrival is not None:
                self._copies.finish(arrival)

    def _fill(self, layer: int, after: Any) -> None:
        number = layer % len(self._places)
        self._holds[number] = None  # until the copy has started
        self._arrivals[number] = self._copies.copy(self._places[number], self._sources[layer], after)
        self._holds[number] = layer

    def close(self) -> None:
        """End the copies."""
        self._copies.close()


class StreamedLayers:
    """Runs the nodes of a graph while its layers are streamed."""

    def __init__(self, ring: LayerRing, layer_of: Callable[[Node], int | None], nodes: Sequence[Node]) -> None:
        """layer_of: returns the number of a node's layer among the streamed ones; None means that its weights stay on
        the device.
        """
        self.ring = ring
        self._numbers: dict[Value, int | None] = {node.output: layer_of(node) for node in nodes}

    def in_turn(self, nodes: Sequence[Node]) -> Iterator[Node]:
        """Yield each node when the weights of its layer are ready for work submitted now."""
        current: int | None = None
        for node in nodes:
            number = self._numbers[node.output]
            if number != current:
                if current is not None:
                    self.ring.leave(current)
                if number is not None:
                    self.ring.enter(number)
                current = number
            yield node
        if current is not None:
            self.ring.leave(current)

    def close(self) -> None:
        """End the copies."""
        self.ring.close()
