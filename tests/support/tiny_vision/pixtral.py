"""Tiny models of Pixtral and Mistral 3."""

from __future__ import annotations

import gguf
import numpy as np
from transformers import LlavaConfig, Mistral3Config, PreTrainedModel

from tests.support.tiny_vision.family import HALF, SIGLIP, SPECIALS, TEXT, Tiny, padded


def _pixtral_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Write q and k with the two columns of a pair next to each other, as llama.cpp rotates them."""
    writer.add_string("clip.projector_type", "pixtral")
    merge = getattr(model.config, "spatial_merge_size", 1)
    if merge > 1:
        writer.add_uint32("clip.vision.spatial_merge_size", merge)
    parts = (model.model.vision_tower, model.model.multi_modal_projector)
    for name, tensor in (item for part in parts for item in part.state_dict().items()):
        array, stem = tensor.numpy(), name
        for old, new in _PIXTRAL_MMPROJ.items():
            stem = stem.replace(old, new)
        if name == "norm.weight":
            stem = "mm.input_norm.weight"
        if ".attn_q." in stem or ".attn_k." in stem:
            heads = model.config.vision_config.num_attention_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(stem, np.ascontiguousarray(array))
    writer.add_tensor("v.token_embd.img_break", np.zeros(64, np.float32))


_PIXTRAL_MMPROJ = {
    **{"patch_conv": "v.patch_embd", "ln_pre": "v.pre_ln", "transformer.layers.": "v.blk."},
    **{"attention_norm": "ln1", "ffn_norm": "ln2", "attention.o_proj": "attn_out"},
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{"patch_merger.merging_layer": "mm.patch_merger", "linear_1": "mm.1", "linear_2": "mm.2"},
}
CONFIGS = {
    "llava": lambda: LlavaConfig(
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        vision_config={"model_type": "pixtral", **SIGLIP, "head_dim": 16, "image_size": 40, "hidden_act": "silu"},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_index=SPECIALS.index("[IMG]"),
        tie_word_embeddings=False,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        vision_config={"model_type": "pixtral", **SIGLIP, "head_dim": 16, "image_size": 40, "hidden_act": "silu"},
        spatial_merge_size=2,
        image_token_index=SPECIALS.index("[IMG]"),
        tie_word_embeddings=False,
    ),
}
_PREPROCESSOR = {"size": {"longest_edge": 40}, "patch_size": 4, **HALF}
FAMILIES = {
    "llava": Tiny(CONFIGS["llava"], _PREPROCESSOR, padded, mmproj=_pixtral_mmproj, seed=1),
    "mistral3": Tiny(CONFIGS["mistral3"], _PREPROCESSOR, padded, mmproj=_pixtral_mmproj),
}
