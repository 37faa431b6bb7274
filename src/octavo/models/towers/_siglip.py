"""SigLIP's layers, which the encoders of several families use. Zhai et al., arXiv 2303.15343."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from octavo.batch import Array, Float32
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rowwise import Activation
from octavo.graph.patches import PATCHES
from octavo.graph.values import Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Unfolded
from octavo.models.towers._tower import (
    TowerConfig,
    TowerInputs,
    attention,
    gguf_sizes,
    in_blocks,
    read_activation,
    tile_rows,
)

SiglipT = TypeVar("SiglipT", bound="SiglipConfig")

PLACES = "embeddings.position_embedding.weight"
PREFIXES = (
    *("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower."),
    *("model.vision_model.", "vision_model."),
)
_LAYER = "encoder.layers.*."
GGUF_NAMES = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
    "v.blk.*.ln1": _LAYER + "layer_norm1",
    "v.blk.*.ln2": _LAYER + "layer_norm2",
    **{f"v.blk.*.attn_{part}": f"{_LAYER}self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "v.blk.*.ffn_up": _LAYER + "mlp.fc1",
    "v.blk.*.ffn_down": _LAYER + "mlp.fc2",
}
UNFOLDED = Unfolded("embeddings.patch_embedding", kernel=lambda cfg: cfg.kernel())


@dataclass(frozen=True, slots=True)
class SiglipConfig(TowerConfig):
    """Configuration of SigLIP's layers.

    table_side: side of the square table of learned position embeddings, in patches. Tiles are squares of this size.
    """

    activation: str = "gelu_tanh"
    norm_eps: float = 1e-6
    table_side: int = 0

    @classmethod
    def read(cls: type[SiglipT], vision: ConfigReader, **fields: Any) -> SiglipT:
        """Read the fields that all families share. Raises ModelLoadError naming the key.

        vision: the section about the encoder.
        fields: values of the fields that depend on the family.
        """
        patch = vision.integer("patch_size", 16, high=1 << 10)
        width, heads = vision.integer("hidden_size", 768, high=MAX_WIDTH), vision.integer("num_attention_heads", 12)
        if width % heads:
            raise vision.error("num_attention_heads", heads, f"does not divide the width {width}")
        given: dict[str, Any] = {
            "num_layers": vision.integer("num_hidden_layers", 12, high=MAX_LAYERS),
            "hidden_size": width,
            "num_heads": heads,
            "patch_values": vision.integer("num_channels", 3, high=16) * patch * patch,
            "activation": read_activation(vision),
            "norm_eps": vision.number("layer_norm_eps", 1e-6, high=1.0),
            "host_tables": (PLACES,),
        }
        return cls(**{**given, **fields})

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        grid = tables[PLACES].astype(np.float32).reshape(self.table_side, self.table_side, -1)
        places = in_blocks(grid, self.merge_size)
        return TowerInputs((np.tile(places, (len(tiles), 1)),), tile_rows(tiles, self.merge_size, positions=False))


def resized_places(grid: Float32, rows: int, cols: int) -> Float32:
    """Resize square position embeddings [side, side, width] to [rows, cols, width], bilinearly with antialiasing."""
    down, across = (_taps(len(grid), count) for count in (rows, cols))
    resized: Float32 = np.einsum("rs,scw->rcw", down, np.einsum("ct,stw->scw", across, grid))
    return resized


def _taps(side: int, count: int) -> Float32:
    """Return the weights [count, side] of the `side` stored positions for each of `count` new ones."""
    scale = np.float32(side / count)
    centres = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distances = np.abs(np.arange(side, dtype=np.float32) - centres[:, None]) / max(scale, np.float32(1))
    weights = np.maximum(1 - distances, 0)
    shares: Float32 = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32, copy=False)
    return shares


def siglip_sizes(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields that mmproj files of these families share.

    reader: metadata of the file.
    """
    return {
        **gguf_sizes(reader),
        "norm_eps": reader.number("attention.layer_norm_epsilon", 1e-6, high=1.0),
        "output_width": reader.integer("projection_dim", high=MAX_WIDTH),
        "host_tables": (PLACES,),
    }


def layer(g: Graph, cfg: SiglipConfig, h: Value, number: int) -> Value:
    """Return the rows after one layer."""
    stem = f"encoder.layers.{number}"
    x = g.layer_norm(h, f"{stem}.layer_norm1", cfg.norm_eps)
    h = h + g.linear(attention(g, x, cfg, f"{stem}.self_attn", None), f"{stem}.self_attn.out_proj")
    x = g.layer_norm(h, f"{stem}.layer_norm2", cfg.norm_eps)
    up = g.add(Activation(g.linear(x, f"{stem}.mlp.fc1"), cfg.activation))
    return h + g.linear(up, f"{stem}.mlp.fc2")


def build_layers(g: Graph, cfg: SiglipConfig, take: Callable[[int, Value], None] | None = None) -> Value:
    """Return the rows after the last layer and its norm [PATCHES, hidden]. Input 1 holds the position embeddings.

    take: called with each layer's number and rows.
    """
    h = g.linear(g.add(Input(0, PATCHES, cfg.patch_values)), "embeddings.patch_embedding")
    h = h + g.add(Input(1, PATCHES, cfg.hidden_size))
    for i in range(cfg.num_layers):
        h = layer(g, cfg, h, i)
        if take is not None:
            take(i, h)
    return g.layer_norm(h, "post_layernorm", cfg.norm_eps)
