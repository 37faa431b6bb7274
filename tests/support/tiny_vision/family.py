"""Parts shared by the tiny models of several families: vocabulary, sizes, and pictures in the form transformers
takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.media.processor import ImageLayout, ImageProcessor

SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *("<|image>", "<|image|>", "<image|>"),
    *(f"<|img_row_{row}_col_{col}|>" for row in (1, 2) for col in (1, 2, 3, 4)),
]
VOCAB_SIZE = 320
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

Seen = list[tuple[tuple[NDArray[np.uint8], ...], ImageLayout]]
Inputs = Callable[[ImageProcessor, Seen], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Tiny:
    """A tiny model.

    inputs: makes pictures into arguments of its forward.
    kinds: the argument of forward that tells where the images are.
    mmproj: writes its vision part as llama.cpp's converter does; None if the converter does not support it.
    seed: seed of the weights. Some seeds make two tokens equally likely, or the placeholder of an image the next token.
    """

    config: Callable[[], PreTrainedConfig]
    preprocessor: dict[str, Any]
    inputs: Inputs
    kinds: str = ""
    mmproj: Callable[[gguf.GGUFWriter, PreTrainedModel], None] | None = field(default=None)
    seed: int = 0

    def changed(self, text: Mapping[str, Any], vision: Mapping[str, Any] = MappingProxyType({}), **whole: Any) -> Tiny:
        """Return the model with other configuration values: for text, for vision, and outside these sections."""

        def config() -> PreTrainedConfig:
            plain = self.config()
            sections = {"text_config": text, "vision_config": vision}
            given = {name: {**getattr(plain, name).to_dict(), **values} for name, values in sections.items()}
            return type(plain)(**{**plain.to_dict(), **given, **whole})

        return replace(self, config=config, mmproj=None)


def patch_rows(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return rows of patches, as Qwen's models take them."""
    rows = np.concatenate([processor.rows(tiles) for tiles, _ in seen])
    grids = [(1, tile.grid_rows, tile.grid_cols) for _, layout in seen for tile in layout.tiles]
    return {"pixel_values": torch.from_numpy(rows), "image_grid_thw": torch.tensor(grids)}


def tiles(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return tiles of one size: [tiles, 3, height, width]."""
    del processor
    pixels = np.stack([tile for tiles, _ in seen for tile in tiles]).astype(np.float32)
    return {"pixel_values": torch.from_numpy(((pixels / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2).copy())}


def padded(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return pictures of several sizes in one array, with their sizes."""
    sizes = [tile.shape[:2] for tiles, _ in seen for tile in tiles]
    whole = np.zeros((len(seen), 3, *np.max(sizes, axis=0)), np.float32)
    for row, (tiles, _) in zip(whole, seen, strict=True):
        pixels = (tiles[0] / np.float32(127.5) - 1).transpose(2, 0, 1)
        row[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    del processor
    return {"pixel_values": torch.from_numpy(whole), "image_sizes": torch.tensor(sizes)}


def flat_patches(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return tiles of several sizes as rows of patches, in row order, with zeros after those of smaller ones."""
    tiles, side = [tile for parts, _ in seen for tile in parts], processor.patch_size
    grids = [(tile.shape[0] // side, tile.shape[1] // side) for tile in tiles]
    rows = np.zeros((len(tiles), max(rows * cols for rows, cols in grids), 3 * side * side), np.float32)
    for row, tile, (height, width) in zip(rows, tiles, grids, strict=True):
        patches = tile.reshape(height, side, width, side, 3).swapaxes(1, 2).reshape(height * width, -1)
        row[: height * width] = patches / np.float32(127.5) - 1
    mask = np.arange(rows.shape[1]) < np.prod(grids, axis=1)[:, None]
    shapes = {"spatial_shapes": torch.tensor(grids), "pixel_attention_mask": torch.from_numpy(mask.astype(np.int32))}
    return {"pixel_values": torch.from_numpy(rows), **shapes}


def placed_patches(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return rows of patches like `flat_patches`, with values from 0 to 1 and the column and row of each, or -1 for
    padding.
    """
    flat = flat_patches(processor, seen)
    mask = flat["pixel_attention_mask"].bool()
    places = torch.full((*mask.shape, 2), -1)
    for row, (_, cols) in enumerate(flat["spatial_shapes"].tolist()):
        numbers = torch.arange(int(mask[row].sum()))
        places[row, mask[row]] = torch.stack([numbers % cols, numbers // cols], dim=-1)
    pixels = torch.where(mask[..., None], (flat["pixel_values"] + 1) / 2, 0.0)
    return {"pixel_values": pixels, "image_position_ids": places}


def add_siglip(writer: gguf.GGUFWriter, tower: torch.nn.Module) -> None:
    for name, tensor in tower.state_dict().items():
        stem = name.removeprefix("vision_model.")
        for old, new in _SIGLIP_MMPROJ.items():
            stem = stem.replace(old, new)
        array = tensor.numpy()
        if stem == "v.patch_embd.weight" and array.ndim == 2:
            side = math.isqrt(array.shape[1] // 3)
            array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        writer.add_tensor(stem, np.ascontiguousarray(array))


_SIGLIP_MMPROJ = {
    **{"embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd"},
    **{"post_layernorm": "v.post_ln", "encoder.layers.": "v.blk.", "layer_norm1": "ln1", "layer_norm2": "ln2"},
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
}
