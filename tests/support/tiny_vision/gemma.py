"""Tiny models of Gemma 3 and 4."""

from __future__ import annotations

import gguf
import numpy as np
from transformers import Gemma3Config, Gemma4Config, Gemma4UnifiedConfig, PreTrainedModel

from tests.support.tiny_vision.family import SIGLIP, SPECIALS, TEXT, VOCAB_SIZE, Tiny, add_siglip, placed_patches, tiles

_GEMMA4_TEXT = {
    **TEXT,
    **{"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    **{"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "use_bidirectional_attention": "vision",
}
_GEMMA4_VISION = {
    **{**SIGLIP, "hidden_size": 48, "head_dim": 16, "num_key_value_heads": 3},
    **{"pooling_kernel_size": 2, "position_embedding_size": 40, "standardize": True},
}
_GEMMA4_IDS = {
    "image_token_id": SPECIALS.index("<|image|>"),
    "boi_token_id": SPECIALS.index("<|image>"),
    "eoi_token_id": SPECIALS.index("<image|>"),
    **{"video_token_id": 318, "audio_token_id": 317, "audio_config": None},
}


def _gemma_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_string("clip.projector_type", "gemma3")
    add_siglip(writer, model.model.vision_tower)
    projector = model.model.multi_modal_projector
    writer.add_tensor("mm.input_projection.weight", np.ascontiguousarray(projector.mm_input_projection_weight.detach()))
    writer.add_tensor("mm.soft_emb_norm.weight", projector.mm_soft_emb_norm.weight.detach().numpy() + 1)


def _gemma4_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Write the patches colour by colour, and the position embeddings of x before those of y."""
    is_unified = model.config.model_type == "gemma4_unified"
    writer.add_string("clip.vision.projector_type", "gemma4uv" if is_unified else "gemma4v")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    parts = (model.model.embed_vision,) if is_unified else (model.model.vision_tower, model.model.embed_vision)
    for name, tensor in (item for part in parts for item in part.state_dict().items()):
        stem, array = name, np.atleast_1d(tensor.numpy())
        for old, new in _GEMMA4_MMPROJ.items():
            stem = stem.replace(old, new)
        if stem == "v.patch_embd.weight" and not is_unified:
            array = array.reshape(len(array), 4, 4, 3).transpose(0, 3, 1, 2)
        elif stem.startswith(("v.patch_embd.weight", "v.patch_norm.1")):
            array = array.reshape(*array.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(array.shape)
        elif stem == "v.position_embd.weight" and is_unified:
            array = array.swapaxes(0, 1)
        writer.add_tensor(stem, np.ascontiguousarray(array))


_GEMMA4_MMPROJ = {
    **{
        "patch_embedder.input_proj": "v.patch_embd",
        "patch_embedder.position_embedding_table": "v.position_embd.weight",
    },
    **{"std_bias": "v.std_bias", "std_scale": "v.std_scale", "encoder.layers.": "v.blk.", ".linear.": "."},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{"self_attn.o_proj": "attn_out", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "ffn_post_norm"},
    **{"pre_feedforward_layernorm": "ln2", "input_layernorm": "ln1"},
    **{"patch_dense": "v.patch_embd", "patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2"},
    **{"pos_norm": "v.patch_norm.3", "pos_embedding": "v.position_embd.weight"},
    **{"multimodal_embedder.": "", "embedding_projection": "mm.input_projection"},
}
CONFIGS = {
    "gemma3": lambda: Gemma3Config(
        text_config={
            **TEXT,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
        vision_config={**SIGLIP, "vision_use_head": False, "image_size": 32},
        mm_tokens_per_image=4,
        image_token_index=SPECIALS.index("<image_soft_token>"),
        boi_token_index=SPECIALS.index("<start_of_image>"),
        eoi_token_index=SPECIALS.index("<end_of_image>"),
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=_GEMMA4_TEXT,
        vision_config=_GEMMA4_VISION,
        **_GEMMA4_IDS,
    ),
    "gemma4-small": lambda: Gemma4Config(
        text_config={
            **{**_GEMMA4_TEXT, "use_bidirectional_attention": None, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE},
        },
        vision_config={**_GEMMA4_VISION, "use_clipped_linears": True, "standardize": False},
        **_GEMMA4_IDS,
    ),
    "gemma4_unified": lambda: Gemma4UnifiedConfig(
        text_config=_GEMMA4_TEXT,
        vision_config={
            **{"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 40, "mm_posemb_size": 40},
            "output_proj_dims": 40,
        },
        **_GEMMA4_IDS,
    ),
}
_GEMMA3 = {"size": {"height": 32, "width": 32}, "image_seq_length": 4}
_GEMMA4 = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
_KINDS = "mm_token_type_ids"
FAMILIES = {
    "gemma3": Tiny(CONFIGS["gemma3"], _GEMMA3, tiles, "token_type_ids", _gemma_mmproj),
    "gemma4": Tiny(CONFIGS["gemma4"], _GEMMA4, placed_patches, _KINDS, _gemma4_mmproj),
    "gemma4-small": Tiny(CONFIGS["gemma4-small"], _GEMMA4, placed_patches, _KINDS, _gemma4_mmproj),
    "gemma4_unified": Tiny(CONFIGS["gemma4_unified"], _GEMMA4, placed_patches, _KINDS, _gemma4_mmproj),
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
SWITCHES = {
    "gemma4-experts": FAMILIES["gemma4"].changed(_EXPERTS),
    "gemma4-plain": FAMILIES["gemma4"].changed({"use_bidirectional_attention": None}, {"standardize": False}),
    "gemma4_unified-causal": FAMILIES["gemma4_unified"].changed({"use_bidirectional_attention": None}),
}
