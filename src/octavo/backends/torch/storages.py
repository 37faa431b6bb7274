"""Many tensors collected in one buffer, where they can be viewed again on any device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

_ALIGNMENT = 256  # bytes; suits the kernels' widest reads and matches torch's allocations


class Layout:
    """The place of each tensor's memory in a buffer of `nbytes` bytes.

    Tensors that share memory also share it in the buffer.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.nbytes = 0
        self._offsets: dict[int, int] = {}  # by memory address
        self._storages: list[UntypedStorage] = []  # kept alive, so that no other memory gets the same address
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._offsets:
                self._offsets[storage.data_ptr()] = self.nbytes
                self._storages.append(storage)
                self.nbytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT

    def write(self, buffer: Tensor) -> None:
        """Copy all tensors to a uint8 buffer."""
        for storage in self._storages:
            offset = self._offsets[storage.data_ptr()]
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            buffer[offset : offset + storage.nbytes()].copy_(source)

    def view(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        """Return a view of one of the tensors at its place in a buffer."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor.to(buffer.device)
        offset = self._offsets[storage.data_ptr()]
        whole = buffer[offset : offset + storage.nbytes()].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())
