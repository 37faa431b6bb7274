"""The configuration shared by image encoders, and the inputs of an encoder step other than the patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array, DomainRows, Float32, Int32
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope, RopeParams
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams
from octavo.graph.patches import BLOCKS, MERGED, PATCHES
from octavo.graph.spans import READS_ONLY, Sight
from octavo.graph.values import RowDomain, Value
from octavo.image_layout import ImageTile
from octavo.models._classic import ACTIVATIONS
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Split, Unfolded

_NORM_EPS = 1e-6
QWEN_NAMES = {
    "v.patch_embd": "patch_embed.proj",
    "v.patch_embd.weight.*": "patch_embed.later.*.weight",
    "v.blk.*.ln1": "blocks.*.norm1",
    "v.blk.*.ln2": "blocks.*.norm2",
    "v.blk.*.attn_qkv": "blocks.*.attn.qkv",
    "v.blk.*.attn_out": "blocks.*.attn.proj",
}
"""Tensor names in GGUF files -> names in safetensors files, as far as all of Qwen's encoders agree."""
QWEN_UNFOLDED = Unfolded("patch_embed.proj", frames="patch_embed.later.*", kernel=lambda cfg: cfg.kernel(2))
QWEN_QKV = Split("blocks.*.attn.qkv", tuple(f"blocks.*.attn.{part}_proj" for part in "qkv"), lambda cfg: cfg.qkv_rows)


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """The arrays of an encoder step other than the patches.

    inputs: additional inputs of the graph, from slot 1 on.
    domains: rows of the PATCHES and MERGED domains.
    """

    inputs: tuple[Float32, ...]
    domains: Mapping[str, DomainRows]


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Base of the `Config` classes of image encoders.

    patch_values: number of values per patch.
    merge_size: side of a block in patches.
    output_width: width of an output row.
    sight: the differences between the decoder and its text-only form.
    host_tables: weights that `inputs` reads.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    patch_values: int
    merge_size: int
    output_width: int
    sight: Sight = READS_ONLY
    host_tables: tuple[str, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Number of rows of q, k and v."""
        return (self.hidden_size,) * 3

    def kernel(self, *frames: int) -> tuple[int, ...]:
        """Return the dimensions of a patch: colours, frames if it spans several, rows and columns."""
        side = math.isqrt(self.patch_values // 3 // math.prod(frames))
        return (3, *frames, side, side)

    def with_numbers(self, numbers: Mapping[str, float]) -> TowerConfig:
        """Return the configuration with values that files store as one-element weights, by name."""
        del numbers
        return self

    def patches(self, rows: Float32) -> Float32:
        """Return the first input of the graph, computed from the processor's rows."""
        return rows

    def most_rows(self, patches: int) -> dict[RowDomain, int]:
        """Return the maximum number of rows of each domain of the graph in a step of `patches` patches."""
        return {PATCHES: patches, MERGED: patches}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        """Return all arrays of a step with these tiles, except the patches.

        tables: the weights named in `host_tables`.
        """
        raise NotImplementedError


def tile_rows(tiles: Sequence[ImageTile], merge: int, *, positions: bool = True) -> dict[str, DomainRows]:
    """Return the domain rows of a step in which the patches of each block are adjacent.

    positions: include the row and column of each patch.
    """
    counts = [tile.num_patches for tile in tiles]
    starts = np.cumsum([0, *counts], dtype=np.int32)
    total = int(starts[-1])
    places = np.concatenate([block_places(tile, merge) for tile in tiles], axis=1) if positions else None
    blocks = np.arange(total, dtype=np.int32)
    return {
        PATCHES.name: DomainRows(total, starts, places),
        MERGED.name: DomainRows(total // merge**2, indices={BLOCKS.name: blocks}),
    }


def block_places(tile: ImageTile, merge: int) -> Int32:
    """Return the row and column of a tile's patches, block by block: int32 [2, patches]."""
    rows, cols = np.mgrid[: tile.grid_rows, : tile.grid_cols].astype(np.int32)
    return np.stack([in_blocks(grid, merge) for grid in (rows, cols)])


def gguf_sizes(reader: ConfigReader, *, low: int = 1) -> dict[str, Any]:
    """Return the fields that mmproj files of all families share.

    reader: metadata of the file.
    low: minimum number of layers and heads.
    """
    patch = reader.integer("patch_size", high=1 << 10)
    return {
        "num_layers": reader.integer("block_count", low=low, high=MAX_LAYERS),
        "hidden_size": reader.integer("embedding_length", high=MAX_WIDTH),
        "num_heads": reader.integer("attention.head_count", low=low, high=MAX_WIDTH),
        "patch_values": 3 * patch * patch,
    }


def projector_type(metadata: Mapping[str, Any]) -> Any:
    """Return the projector type of an mmproj file, or None if it gives none.

    Image-only files have no prefix before the key.
    """
    return metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))


def statistics(reader: ConfigReader) -> dict[str, Any]:
    """Return the mean and deviation of the colours in an mmproj file, in the form of preprocessor_config.json."""
    return {key: list(reader.numbers(key, 3, low=-1e3)) for key in ("image_mean", "image_std") if reader.has(key)}


def qwen_pixels(reader: ConfigReader, patch_size: int) -> dict[str, int]:
    """Return the patch size, block size and pixel limits of Qwen's mmproj file, in the form of
    preprocessor_config.json.

    patch_size: used if the file gives none.
    """
    bounds = (("min_pixels", "image_min_pixels"), ("max_pixels", "image_max_pixels"))
    return {
        "patch_size": reader.integer("patch_size", patch_size),
        "merge_size": reader.integer("spatial_merge_size", 2),
        **{name: reader.integer(key) for name, key in bounds if reader.has(key)},
    }


def layer_numbers(reader: ConfigReader, key: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Read a list of layer numbers of any length. Raises ModelLoadError naming the key."""
    stored = reader.values.get(reader.prefix + key)
    return reader.counts(key, len(stored)) if isinstance(stored, (list, tuple)) else tuple(default)


def last_layer_only(reader: ConfigReader, key: str) -> None:
    """Check that an image's rows come from the last layer. Raises ModelLoadError."""
    if reader.has(key) and reader.values[reader.prefix + key] != -1:
        raise reader.error(key, reader.values[reader.prefix + key], "must be -1, the last layer")


def read_activation(vision: ConfigReader, default: str = "gelu_pytorch_tanh") -> str:
    """Return the graph's name for the activation of the encoder's layers. Raises ModelLoadError."""
    known, name = {**ACTIVATIONS, "quick_gelu": "quick_gelu"}, vision.text("hidden_act", default)
    if name not in known:
        raise vision.error("hidden_act", name, f"must be {', '.join(known)}")
    return known[name]


def square_side(reader: ConfigReader, key: str, count: int) -> int:
    """Return the side of a square with `count` cells.

    key: the key whose value `count` is.

    Raises ModelLoadError if `count` is not a square number.
    """
    side = math.isqrt(count)
    if side * side != count:
        raise reader.error(key, count, "must be a square")
    return side


def in_blocks(grid: NDArray[np.generic], merge: int) -> NDArray[np.generic]:
    """Reorder grid [rows, cols, ...] to [rows * cols, ...], block by block."""
    rows, cols, *rest = grid.shape
    blocks = grid.reshape(rows // merge, merge, cols // merge, merge, *rest).swapaxes(1, 2)
    return np.ascontiguousarray(blocks.reshape(rows * cols, *rest))


def bilinear(table: Array, side: int, rows: int, cols: int) -> Float32:
    """Interpolate a learned table [side * side, width] on a grid with the same corners: [rows, cols, width]."""
    grid = table.reshape(side, side, -1).astype(np.float32)

    def taps(count: int) -> tuple[Int32, Int32, Float32]:
        places = np.linspace(0, side - 1, count, dtype=np.float32)
        low = places.astype(np.int32)
        return low, np.minimum(low + 1, side - 1), places - low.astype(np.float32)

    (top, bottom, down), (left, right, across) = taps(rows), taps(cols)
    down, across = down[:, None, None], across[None, :, None]
    upper = grid[top][:, left] * (1 - across) + grid[top][:, right] * across
    lower = grid[bottom][:, left] * (1 - across) + grid[bottom][:, right] * across
    return (upper * (1 - down) + lower * down).astype(np.float32, copy=False)


def plane_rope(head_dim: int, theta: float = 10000.0) -> RopeParams:
    """Return the rotary embedding of patches: half of the pairs rotate by the row, and the other half by the column."""
    quarter = head_dim // 4
    frequencies = tuple(float(theta ** (-i / quarter)) for i in range(quarter))
    return RopeParams(frequencies * 2, axes=(0,) * quarter + (1,) * quarter)


def attention(g: Graph, x: Value, cfg: TowerConfig, stem: str, rope: RopeParams | None) -> Value:
    """Build a layer's attention up to its output projection, from the `q_proj`, `k_proj` and `v_proj` under `stem`.

    Rows of q and k are normalized if there are weights for their norms.
    """
    q, k, v = (g.linear(x, f"{stem}.{part}_proj") for part in "qkv")
    if f"{stem}.q_norm.weight" in g.weights:
        q, k = (g.rms_norm(y, f"{stem}.{part}_norm", _NORM_EPS) for y, part in ((q, "q"), (k, "k")))
    if rope is not None:
        q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    heads = EncoderAttentionParams(cfg.num_heads, cfg.num_heads, cfg.head_dim, cfg.head_dim**-0.5)
    return g.add(EncoderAttention(q, k, v, heads))
