"""Tiny models based on SigLIP: SmolVLM, granite-docling and LFM2-VL."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from transformers import GraniteDoclingConfig, Lfm2VlConfig, PreTrainedModel, SmolVLMConfig

from octavo.media.processor import ImageProcessor
from tests.support.tiny_vision.family import HALF, SIGLIP, SPECIALS, TEXT, Seen, Tiny, add_siglip, flat_patches, tiles


def _idefics_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.add_uint32("clip.vision.preproc_image_size", 32)
    add_siglip(writer, model.model.vision_model)
    projection = model.model.connector.modality_projection.proj.weight.detach().numpy()
    writer.add_tensor("mm.model.fc.weight", np.ascontiguousarray(projection))


def _lfm2_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Write the patch projection as a convolution."""
    writer.add_string("clip.projector_type", "lfm2")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    add_siglip(writer, model.model.vision_tower)
    names = {"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"}
    for name, tensor in model.model.multi_modal_projector.state_dict().items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names[stem]}.{kind}", tensor.numpy())


def listed_tiles(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return the tiles of one text: [1, tiles, 3, height, width]."""
    return {"pixel_values": tiles(processor, seen)["pixel_values"][None]}


def pages(processor: ImageProcessor, seen: Seen) -> dict[str, torch.Tensor]:
    """Return the tiles of one text, without padding."""
    found = listed_tiles(processor, seen)["pixel_values"]
    return {"pixel_values": found, "pixel_attention_mask": torch.ones(found.shape[:2], dtype=torch.bool)}


CONFIGS = {
    "granite_docling": lambda: GraniteDoclingConfig(
        text_config={
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
            # Milder ones than the published, with which an untrained model says what it has just read.
            **{"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 1.5},
            **{"attention_multiplier": 0.2, "tie_word_embeddings": False},
        },
        vision_config={
            **{**SIGLIP, "image_size": 16, "scale_factor": 2, "out_hidden_size": 64},
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=SPECIALS.index("<image>"),
        tie_word_embeddings=False,
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**SIGLIP, "image_size": 16},
        scale_factor=2,
        image_token_id=SPECIALS.index("<image>"),
    ),
    "lfm2_vl": lambda: Lfm2VlConfig(
        text_config={
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
        },
        vision_config={**SIGLIP, "num_patches": 36, "vision_use_head": False},
        projector_hidden_size=40,
        image_token_id=SPECIALS.index("<image>"),
    ),
}
FAMILIES = {
    "granite_docling": Tiny(
        CONFIGS["granite_docling"], {"size": {"height": 16, "width": 16}, "max_patches": 4, **HALF}, pages
    ),
    "smolvlm": Tiny(
        CONFIGS["smolvlm"],
        {"max_image_size": {"longest_edge": 16}, "size": {"longest_edge": 32}},
        listed_tiles,
        mmproj=_idefics_mmproj,
        seed=1,
    ),
    "lfm2_vl": Tiny(  # the first picture is one tile, the second has several
        CONFIGS["lfm2_vl"],
        {
            **{"encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 16, "max_tiles": 4},
            **{"min_image_tokens": 4, "max_image_tokens": 16, "max_pixels_tolerance": 1.0},
        },
        flat_patches,
        mmproj=_lfm2_mmproj,
    ),
}
SWITCHES = {
    "granite_docling-coarse": FAMILIES["granite_docling"].changed({}, {"use_fine_route": False}),
    "lfm2_vl-plain": FAMILIES["lfm2_vl"].changed({}, projector_use_layernorm=False, projector_bias=False),
}
