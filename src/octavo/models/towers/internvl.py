"""The image encoder of InternVL 2 to 3.5: a class row, scaled layers, and projected blocks. arXiv 2504.10479."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.batch import Array, DomainRows
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import AddRows, Gather
from octavo.graph.ops.rowwise import Activation
from octavo.graph.patches import BLOCKS, MERGED, PATCHES
from octavo.graph.values import RowDomain, Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Split, Unfolded, WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._classed import CLASSED, PATCH_OF, classed_rows
from octavo.models.towers._tower import (
    TowerConfig,
    TowerInputs,
    attention,
    gguf_sizes,
    last_layer_only,
    read_activation,
    statistics,
)

MODEL_TYPES = ("internvl", "internvl_chat")
PROJECTORS = ("internvl",)

_PROJECTOR_EPS = 1e-5
_CLASS, _PLACES = "embeddings.class.weight", "embeddings.places.weight"
_QKV = tuple(f"layers.*.attn.{part}_proj" for part in "qkv")


def _layer_names(stem: str, names: Mapping[str, str]) -> dict[str, str]:
    return {stem + stored: "layers.*." + name for stored, name in names.items()}


WEIGHTS = WeightTable(
    prefixes=(
        *("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector."),
        *("vision_model.", "mlp1."),
    ),
    names={
        # transformers
        "embeddings.cls_token": _CLASS,
        "embeddings.position_embeddings": _PLACES,
        "embeddings.patch_embeddings.projection": "embeddings.patch",
        "layer_norm": "mm.0",
        "linear_1": "mm.1",
        "linear_2": "mm.3",
        **_layer_names(
            "encoder.layer.*.",
            {
                **{f"attention.{part}": f"attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")},
                **{"attention.projection_layer": "attn.proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
                **{"layernorm_before": "norm1", "layernorm_after": "norm2"},
                **{"lambda_1": "ls1.weight", "lambda_2": "ls2.weight"},
            },
        ),
        # the authors' own
        "embeddings.class_embedding": _CLASS,
        "embeddings.position_embedding": _PLACES,
        "embeddings.patch_embedding": "embeddings.patch",
        "*": "mm.*",
        **_layer_names(
            "encoder.layers.*.",
            {
                **{f"attn.{part}": f"attn.{part}" for part in ("qkv", "proj", "q_norm", "k_norm")},
                **{"norm1": "norm1", "norm2": "norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
                **{"ls1": "ls1.weight", "ls2": "ls2.weight"},
            },
        ),
        # GGUF
        "v.class_embd": _CLASS,
        "v.position_embd": "embeddings.places",
        "v.patch_embd": "embeddings.patch",
        **{f"mm.model.mlp.{i}": f"mm.{i}" for i in (0, 1, 3)},
        **_layer_names(
            "v.blk.*.",
            {
                **{f"attn_{part}": f"attn.{part}_proj" for part in "qkv"},
                **{"attn_qkv": "attn.qkv", "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm"},
                **{"attn_out": "attn.proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
                **{"ln1": "norm1", "ln2": "norm2", "ls1": "ls1", "ls2": "ls2"},
            },
        ),
    },
    transforms=(
        Unfolded("embeddings.patch", kernel=lambda cfg: cfg.kernel()),
        Split("layers.*.attn.qkv", _QKV, lambda cfg: cfg.qkv_rows, one_way=True),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(TowerConfig):
    """Configuration of InternVL's image encoder.

    table_side: side of the square table of learned position embeddings, in patches. Tiles are squares of this size.
    is_rms: the layers use RMSNorm instead of LayerNorm.
    """

    activation: str = "gelu"
    norm_eps: float = 1e-6
    table_side: int = 32
    is_rms: bool = False

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision, patch = reader.section("vision_config"), _side(reader, "patch_size", 14)
        for key in ("vision_feature_layer", "select_layer"):
            last_layer_only(reader, key)
        ratio = reader.number("downsample_ratio", 0.5, low=0.05, high=1.0)
        return cls(
            num_layers=vision.integer("num_hidden_layers", 24, high=MAX_LAYERS),
            hidden_size=vision.integer("hidden_size", 1024, high=MAX_WIDTH),
            num_heads=vision.integer("num_attention_heads", 16, high=MAX_WIDTH),
            patch_values=vision.integer("num_channels", 3, high=16) * patch * patch,
            merge_size=round(1 / ratio),
            output_width=text_section(reader).integer("hidden_size", high=MAX_WIDTH),
            host_tables=(_CLASS, _PLACES),
            activation=read_activation(vision, "gelu"),
            norm_eps=vision.number("layer_norm_eps", 1e-6, high=1.0),
            table_side=_side(reader, "image_size", 448) // patch,
            is_rms=vision.text("norm_type", "layer_norm") == "rms_norm",
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        del text
        return cls(
            **gguf_sizes(reader),
            merge_size=reader.integer("projector.scale_factor", 2, high=16),
            output_width=shapes["mm.3.weight"][0],
            host_tables=(_CLASS, _PLACES),
            norm_eps=reader.number("attention.layer_norm_epsilon", 1e-6, high=1.0),
            table_side=math.isqrt(shapes[_PLACES][-2] - 1),
            is_rms="layers.0.norm1.bias" not in shapes,
        )

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        side = reader.integer("image_size", 448, high=1 << 16)
        vision = {"patch_size": reader.integer("patch_size", 14, high=1 << 10), "image_size": side}
        config = {"vision_config": vision, "downsample_ratio": 1 / reader.integer("projector.scale_factor", 2, high=16)}
        bounds = {
            f"{which}_patches": reader.integer(f"preproc_{which}_tiles", default)
            for which, default in (("min", 1), ("max", 12))
        }
        return "internvl", config, {"size": {"height": side, "width": side}, **bounds, **statistics(reader)}

    def most_rows(self, patches: int) -> dict[RowDomain, int]:
        return {PATCHES: patches, MERGED: patches, CLASSED: patches + patches // self.table_side**2}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        square, count = self.table_side**2, len(tiles)
        places = tables[_PLACES].astype(np.float32).reshape(square + 1, -1)
        grid = places[1:].reshape(self.table_side, self.table_side, -1)
        first = tables[_CLASS].astype(np.float32).reshape(1, -1) + places[:1]
        rows, classed = classed_rows(count, first, grid, self.merge_size)
        patches = np.arange(count * square, dtype=np.int32)
        blocks = patches + patches // square + 1
        return TowerInputs(
            (rows,),
            {
                PATCHES.name: DomainRows(count * square),
                CLASSED.name: classed,
                MERGED.name: DomainRows(count * square // self.merge_size**2, indices={BLOCKS.name: blocks}),
            },
        )


def _side(reader: ConfigReader, key: str, default: int) -> int:
    """Read a length in pixels from the section about the encoder; some files give it twice, for height and width."""
    vision = reader.section("vision_config")
    stored = vision.values.get(vision.prefix + key)
    if isinstance(stored, (list, tuple)):
        height, width = vision.counts(key, 2)
        if height != width:
            raise vision.error(key, stored, "must be a square")
        vision = vision.replaced(key, height)
    return vision.integer(key, default, high=1 << 16)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    patches = g.linear(g.add(Input(0, PATCHES, cfg.patch_values)), "embeddings.patch")
    h = g.add(AddRows(g.add(Input(1, CLASSED, cfg.hidden_size)), patches, PATCH_OF))
    for i in range(cfg.num_layers):
        stem = f"layers.{i}"
        x = attention(g, _norm(g, cfg, h, f"{stem}.norm1"), cfg, f"{stem}.attn", None)
        h = h + g.scale_columns(g.linear(x, f"{stem}.attn.proj"), f"{stem}.ls1")
        x = g.linear(_norm(g, cfg, h, f"{stem}.norm2"), f"{stem}.mlp.fc1")
        x = g.linear(g.add(Activation(x, cfg.activation)), f"{stem}.mlp.fc2")
        h = h + g.scale_columns(x, f"{stem}.ls2")
    if "layernorm.weight" in g.weights:
        h = g.layer_norm(h, "layernorm", cfg.norm_eps)
    x = g.layer_norm(g.add(Gather(h, BLOCKS, cfg.merge_size**2)), "mm.0", _PROJECTOR_EPS)
    return g.linear(g.add(Activation(g.linear(x, "mm.1"), "gelu")), "mm.3")


def _norm(g: Graph, cfg: Config, x: Value, name: str) -> Value:
    return g.rms_norm(x, name, cfg.norm_eps) if cfg.is_rms else g.layer_norm(x, name, cfg.norm_eps)
