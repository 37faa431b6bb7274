"""Tiny models of Qwen 2 VL to 3.5."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3_5Config, Qwen3VLConfig

from tests.support.tiny_vision.family import HALF, SPECIALS, TEXT, Tiny, patch_rows

_QWEN_VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
_QWEN2_TEXT = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
_QWEN2_VISION = {"depth": 3, "num_heads": 3, "patch_size": 4}
_QWEN_IDS = {
    "image_token_id": SPECIALS.index("<|image_pad|>"),
    "video_token_id": SPECIALS.index("<|video_pad|>"),
    "vision_start_token_id": SPECIALS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIALS.index("<|vision_end|>"),
}


def _qwen2_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    is_second = model.config.model_type == "qwen2_vl"
    writer.add_string("clip.projector_type", "qwen2vl_merger" if is_second else "qwen2.5vl_merger")
    sizes = {"spatial_merge_size": 2, "image_min_pixels": 64, "image_max_pixels": 4096}
    window = getattr(model.config.vision_config, "window_size", 0)
    for key, value in (sizes if is_second else {**sizes, "n_wa_pattern": 2, "window_size": window}).items():
        writer.add_uint32(f"clip.vision.{key}", value)
    for name, tensor in model.model.visual.state_dict().items():
        array, stem = tensor.numpy(), name
        for old, new in _QWEN2_MMPROJ.items():
            stem = stem.replace(old, new)
        if name == "patch_embed.proj.weight":
            writer.add_tensor("v.patch_embd.weight", np.ascontiguousarray(array[:, :, 0]))
            writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(array[:, :, 1]))
        elif ".qkv." in name:
            for part, rows in zip("qkv", np.split(array, 3), strict=True):
                writer.add_tensor(stem.replace("qkv", part), np.ascontiguousarray(rows))
        else:
            writer.add_tensor(stem, np.ascontiguousarray(array))


def _qwen_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    vision = model.config.vision_config
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    for key, value in (("spatial_merge_size", 2), ("image_min_pixels", 64), ("image_max_pixels", 4096)):
        writer.add_uint32(f"clip.vision.{key}", value)
    deep = list(getattr(vision, "deepstack_visual_indexes", []))
    writer.add_array("clip.vision.is_deepstack_layers", [i in deep for i in range(vision.depth)])
    for name, tensor in model.model.visual.state_dict().items():
        array, stem = tensor.numpy(), name.replace("blocks.", "v.blk.")
        if name == "patch_embed.proj.weight":
            writer.add_tensor("v.patch_embd.weight", np.ascontiguousarray(array[:, :, 0]))
            writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(array[:, :, 1]))
            continue
        for old, new in _QWEN_MMPROJ.items():
            stem = stem.replace(old, new)
        if name.startswith("deepstack_merger_list."):
            number, part = name.split(".")[1:3]
            part = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[part]
            stem = f"v.deepstack.{deep[int(number)]}.{part}.{name.rpartition('.')[2]}"
        writer.add_tensor(stem, np.ascontiguousarray(array))


_QWEN2_MMPROJ = {
    **{"blocks.": "v.blk.", "merger.ln_q": "v.post_ln", "merger.mlp.": "mm.", "norm1": "ln1", "norm2": "ln2"},
    **{"attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_QWEN_MMPROJ = {
    **{"patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd", "merger.norm": "v.post_ln"},
    **{"merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "norm1": "ln1", "norm2": "ln2"},
    **{"attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
}
CONFIGS = {
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config=_QWEN2_TEXT,
        vision_config={**_QWEN2_VISION, "embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
        **_QWEN_IDS,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=_QWEN2_TEXT,
        vision_config={
            **_QWEN2_VISION,
            "hidden_size": 48,
            "intermediate_size": 80,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_QWEN_IDS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
        },
        vision_config={**_QWEN_VISION, "deepstack_visual_indexes": [0, 2]},
        **_QWEN_IDS,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config={
            **TEXT,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.25,
            },
        },
        vision_config=_QWEN_VISION,
        **_QWEN_IDS,
    ),
}
_PREPROCESSOR = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
_HALF = {**_PREPROCESSOR, **HALF}
_KINDS = "mm_token_type_ids"
FAMILIES = {
    "qwen2_vl": Tiny(CONFIGS["qwen2_vl"], _HALF, patch_rows, _KINDS, _qwen2_mmproj),
    "qwen2_5_vl": Tiny(CONFIGS["qwen2_5_vl"], _HALF, patch_rows, _KINDS, _qwen2_mmproj),
    "qwen3_vl": Tiny(CONFIGS["qwen3_vl"], _PREPROCESSOR, patch_rows, _KINDS, _qwen_mmproj),
    "qwen3_5": Tiny(CONFIGS["qwen3_5"], _PREPROCESSOR, patch_rows, _KINDS),
}
SWITCHES = {
    "qwen3_vl-plain": FAMILIES["qwen3_vl"].changed({}, {"deepstack_visual_indexes": []}),
    "qwen2_5_vl-wide": replace(FAMILIES["qwen2_5_vl"].changed({}, {"window_size": 112}), mmproj=_qwen2_mmproj),
    "qwen2_5_vl-windows": FAMILIES["qwen2_5_vl"].changed({}, {"fullatt_block_indexes": [0, 2], "window_size": 8}),
}
