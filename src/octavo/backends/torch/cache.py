"""The paged cache and the sequence states, as tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.backends.moved_blocks import MovedSizes
from octavo.batch import Batch, BlockBytes
from octavo.graph.builder import Graph
from octavo.graph.cache import CacheSizes, KVCache
from octavo.graph.layer_formats import LayerFormat

_SCALE_BYTES = 4
_ALIGNED_TO = 8  # a layer's bytes per token are a multiple of this, which aligns numbers of every type


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of all blocks: keys and values [blocks, num_kv_heads, block_size, dim], views of one tensor.

    key_scales, value_scales: scales of int8 numbers, float32 [blocks, num_kv_heads, block_size], or None.
    key_factor, value_factor: factors by which E4M3 numbers are multiplied.
    """

    keys: Tensor
    values: Tensor  # has no columns if the values are the first columns of the keys
    group: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    key_factor: float = 1.0
    value_factor: float = 1.0


class CacheNumbers(NamedTuple):
    """The number types of each layer's keys and values, and the factors of `LayerPages` that are not 1."""

    types: Mapping[int, torch.dtype]
    factors: Mapping[int, tuple[float, float]]


class PagedCache:
    """Byte tensors [blocks, bytes], one for each layer slot: scales, keys and values, each [head, token, dim].

    What a layer reads from a block is therefore contiguous, however large the cache is. If the layers that share a slot
    differ in heads, widths or types, the slot has room for the largest of them. There is one more block than requested,
    for the padding tokens of a captured step.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: tuple[int, int, int],
        device: torch.device,
        types: Mapping[int, torch.dtype],
        state_dtype: torch.dtype = torch.float32,
        factors: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """sizes: number of blocks, tokens per block, and slots for states.
        types: number type of each layer's keys and values.
        factors: factors of `LayerPages` for layers in E4M3; 1 if missing.

        int8 numbers have one scale per token and head, which maps the largest magnitude to 127.
        """
        num_blocks, block_size, num_states = sizes
        self.block_size, self.num_blocks, self.num_states = block_size, num_blocks, num_states
        layout = graph.cache_layout
        # Zeros, because a key that is not seen still takes part in products.
        self.slots = [
            torch.zeros((num_blocks + 1, width * block_size), dtype=torch.uint8, device=device)
            for width in slot_bytes(graph, types)
        ]
        self.device = device
        self.layers: dict[int, LayerPages] = {}
        for kv in graph.kv_caches:
            slot, group = layout.place(kv.layer)
            pages = self._pages(kv, types[kv.layer], self.slots[slot], group)
            key_factor, value_factor = (factors or {}).get(kv.layer, (1.0, 1.0))
            self.layers[kv.layer] = replace(pages, key_factor=key_factor, value_factor=value_factor)
        self.states = {
            cache.index: [
                torch.zeros((num_states + 1, *shape), dtype=state_dtype, device=device) for shape in cache.shapes
            ]
            for cache in graph.state_caches
        }
        self._state_arrays = [array for arrays in self.states.values() for array in arrays]
        state_bytes = sum(array[0].nbytes for array in self._state_arrays)
        block_bytes = sum(blocks.shape[1] for blocks in self.slots)
        self.moved_sizes = MovedSizes(num_blocks, block_bytes, num_states, state_bytes)

    def _pages(self, kv: KVCache, dtype: torch.dtype, blocks: Tensor, group: int) -> LayerPages:
        scales: list[Tensor | None] = [None, None]
        heads, rows, offset = kv.num_kv_heads, kv.num_kv_heads * self.block_size, 0
        if dtype is torch.int8:
            scales = [self._view(blocks, torch.float32, i * rows * _SCALE_BYTES, heads, 1)[..., 0] for i in range(2)]
            offset += 2 * rows * _SCALE_BYTES
        keys = self._view(blocks, dtype, offset, heads, kv.key_dim)
        values = self._view(blocks, dtype, offset + rows * kv.key_dim * dtype.itemsize, heads, kv.value_dim)
        return LayerPages(keys, values, group, scales[0], scales[1])

    def _view(self, blocks: Tensor, dtype: torch.dtype, offset: int, heads: int, dim: int) -> Tensor:
        """Return a view [blocks, heads, block_size, dim] that starts at byte `offset` of each block."""
        size, whole = self.block_size, blocks.view(dtype)
        shape, strides = (self.num_blocks + 1, heads, size, dim), (whole.stride(0), size * dim, dim, 1)
        return whole.as_strided(shape, strides, offset // dtype.itemsize if dim else 0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [tokens, heads, dim] to the slots [tokens] of their tokens."""
        pages = self.layers[layer]
        block, token = slots // self.block_size, slots % self.block_size
        parts = (
            (pages.keys, pages.key_scales, pages.key_factor, keys),
            (pages.values, pages.value_scales, pages.value_factor, values),
        )
        for pages_of, scales_of, factor, new in parts:
            if scales_of is not None:
                largest = new.float().abs().amax(dim=-1)
                scales = torch.where(largest > 0, largest / 127, 1.0)
                scales_of[block, :, token] = scales
                pages_of[block, :, token] = (new.float() / scales[..., None]).round().to(torch.int8)
                continue
            limit = torch.finfo(pages_of.dtype).max
            if pages_of.dtype is torch.float8_e4m3fn:  # torch cannot index it
                codes = (new.float() / factor).clamp(-limit, limit).to(pages_of.dtype).view(torch.uint8)
                pages_of.view(torch.uint8)[block, :, token] = codes
                continue
            limited = torch.where(new.isfinite(), new.clamp(-limit, limit), math.nan)
            pages_of[block, :, token] = limited.to(pages_of.dtype)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, tokens, heads, dim] of blocks [n, width]."""
        pages = self.layers[layer]

        def found(numbers: Tensor, scales: Tensor | None, factor: float) -> Tensor:
            if numbers.dtype is torch.float8_e4m3fn:
                chosen = numbers.view(torch.uint8)[tables].view(numbers.dtype).float() * factor
            else:
                chosen = numbers[tables] if scales is None else numbers[tables] * scales[tables][..., None]
            return chosen.transpose(2, 3).flatten(1, 2)

        keys = found(pages.keys, pages.key_scales, pages.key_factor)
        return keys, found(pages.values, pages.value_scales, pages.value_factor)

    def copy(self, batch: Batch) -> None:
        """Save blocks and states of a step to memory and load them from there, then copy both within the cache, in
        order.

        A moved block contains the bytes of each slot in turn; a state contains the bytes of each array in turn. Saved
        data is complete when this returns.
        """
        self._move(batch.block_saves, batch.block_loads, self.slots)
        self._move(batch.snapshot_saves, batch.snapshot_loads, self._state_arrays)
        for source, destination in batch.block_copies.tolist():
            for blocks in self.slots:
                blocks[destination].copy_(blocks[source])
        for source, destination in batch.state_copies.tolist():
            for array in self._state_arrays:
                array[destination].copy_(array[source])

    def _move(self, saves: BlockBytes | None, loads: BlockBytes | None, arrays: list[Tensor]) -> None:
        """Save rows of the arrays, then load others. The first dimension of the arrays is the block or state slot."""
        for moved, writes in ((saves, False), (loads, True)):
            if moved is None or not len(moved.block_ids):
                continue
            begin, ids = 0, torch.from_numpy(moved.block_ids.astype(np.int64)).to(self.device)
            for array in arrays:
                rows = array.flatten(1).view(torch.uint8)
                end = begin + rows.shape[1]
                if writes:
                    given = self._staging(moved.data[:, begin:end].shape)
                    given.numpy()[:] = moved.data[:, begin:end]
                    given = given.to(self.device, non_blocking=True)
                    for row, block_id in enumerate(moved.block_ids.tolist()):  # if one occurs twice, the last counts
                        rows[block_id].copy_(given[row])
                else:
                    moved.data[:, begin:end] = self._staging((len(ids), end - begin)).copy_(rows[ids]).numpy()
                begin = end

    def _staging(self, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer in main memory for copies to or from the cache; under CUDA it is pinned, which makes copies
        faster.
        """
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def layer_bytes(kv: KVCache, dtype: torch.dtype) -> int:
    """Return the bytes of a token in one layer."""
    scales = 2 * kv.num_kv_heads * _SCALE_BYTES if dtype is torch.int8 else 0
    return -(-(kv.elements_per_token * dtype.itemsize + scales) // _ALIGNED_TO) * _ALIGNED_TO


def slot_bytes(graph: Graph, types: Mapping[int, torch.dtype]) -> list[int]:
    """Return the bytes of a token in each slot of a block. The largest layer that uses a slot determines its size."""
    layout = graph.cache_layout
    slots = [0] * layout.slots
    for kv in graph.kv_caches:
        slot, _ = layout.place(kv.layer)
        slots[slot] = max(slots[slot], layer_bytes(kv, types[kv.layer]))
    return slots


def cache_sizes(graph: Graph, types: Mapping[int, torch.dtype], state_dtype: torch.dtype) -> CacheSizes:
    """Return the bytes of a token and of a sequence's states in these types."""
    return CacheSizes(
        graph.cache_layout,
        sum(layer_bytes(kv, types[kv.layer]) for kv in graph.kv_caches),
        sum(slot_bytes(graph, types)),
        graph.state_elements_per_sequence * state_dtype.itemsize,
        tuple(str(types[kv.layer]).removeprefix("torch.") for kv in graph.kv_caches),
    )


def cache_types(formats: Mapping[int, LayerFormat], dtype: torch.dtype) -> dict[int, torch.dtype]:
    """Return each layer's number type: E4M3 or int8 if requested and the keys have no bias, else `dtype`.

    A bias may be a hundred times larger than the differences between tokens, and would then use up the precision,
    because a token has only one scale.
    """
    small = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return {
        layer: dtype if found.key_mean is not None else small.get(found.kv_dtype, dtype)
        for layer, found in formats.items()
    }
