"""The paged cache and the states of sequences, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.batch import Batch
from octavo.graph.builder import Graph
from octavo.graph.cache import CacheSizes


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of all blocks: keys and values [blocks, num_kv_heads, block_size, dim], views of one tensor."""

    keys: Tensor
    values: Tensor  # without columns: values are the first columns of the keys
    group: int


class PagedCache:
    """One tensor [blocks, slot of a layer, keys and values, head, token, dim], in float16: a block is contiguous.

    Where layers that share a slot differ in heads or widths, the slot has room for the largest of them. There is one
    block more than asked for: the tokens that pad a captured step are written there.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: tuple[int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float16,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """sizes: blocks, tokens in a block, and slots for states. dtype: of keys and values."""
        num_blocks, block_size, num_states = sizes
        self.block_size, self.num_blocks, self.num_states = block_size, num_blocks, num_states
        layout, offsets = graph.cache_layout, [0]
        for width in slot_elements(graph):
            offsets.append(offsets[-1] + width * block_size)
        # Zeros, because a key that is not seen still takes part in products.
        self.blocks = torch.zeros((num_blocks + 1, offsets[-1]), dtype=dtype, device=device)
        self.layers: dict[int, LayerPages] = {}
        for kv in graph.kv_caches:
            slot, group = layout.place(kv.layer)
            keys = self._view(offsets[slot], kv.num_kv_heads, kv.key_dim)
            start = offsets[slot] + kv.num_kv_heads * kv.key_dim * block_size
            self.layers[kv.layer] = LayerPages(keys, self._view(start, kv.num_kv_heads, kv.value_dim), group)
        self.states = {
            cache.index: [
                torch.zeros((num_states + 1, *shape), dtype=state_dtype, device=device) for shape in cache.shapes
            ]
            for cache in graph.state_caches
        }

    def _view(self, offset: int, heads: int, dim: int) -> Tensor:
        size = self.block_size
        shape, strides = (self.num_blocks + 1, heads, size, dim), (self.blocks.stride(0), size * dim, dim, 1)
        return self.blocks.as_strided(shape, strides, offset if dim else 0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys [tokens, heads, dim] and values of the tokens in these slots [tokens]."""
        pages = self.layers[layer]
        block, token = slots // self.block_size, slots % self.block_size
        for pages_of, new in ((pages.keys, keys), (pages.values, values)):
            limit = torch.finfo(pages_of.dtype).max
            pages_of[block, :, token] = new.clamp(-limit, limit).to(pages_of.dtype)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, tokens, heads, dim] of blocks [n, width]."""
        pages = self.layers[layer]
        keys, values = (x[tables].transpose(2, 3).flatten(1, 2) for x in (pages.keys, pages.values))
        return keys, values

    def copy(self, batch: Batch) -> None:
        """Makes the copies of blocks and of states of a step, in their order."""
        for source, destination in batch.block_copies.tolist():
            self.blocks[destination].copy_(self.blocks[source])
        for source, destination in batch.state_copies.tolist():
            for array in (array for arrays in self.states.values() for array in arrays):
                array[destination].copy_(array[source])


def slot_elements(graph: Graph) -> list[int]:
    """Elements of a token in each slot of a block: as many as the largest layer of the slot has."""
    layout = graph.cache_layout
    slots = [0] * layout.slots
    for kv in graph.kv_caches:
        slot, _ = layout.place(kv.layer)
        slots[slot] = max(slots[slot], kv.elements_per_token)
    return slots


def cache_sizes(graph: Graph, dtype: torch.dtype, state_dtype: torch.dtype) -> CacheSizes:
    """The bytes of a token and of a sequence's states in these types."""
    element = dtype.itemsize
    return CacheSizes(
        graph.cache_layout,
        graph.kv_elements_per_token * element,
        sum(slot_elements(graph)) * element,
        graph.state_elements_per_sequence * state_dtype.itemsize,
        (str(dtype).removeprefix("torch."),) * len(graph.kv_caches),
    )
