"""Tiny models of InternVL, in transformers and in the authors' published format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from transformers import InternVLConfig, PreTrainedModel

from tests.support.tiny_vision.family import HALF, SIGLIP, SPECIALS, TEXT, Tiny, tiles


def _internvl_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_string("clip.projector_type", "internvl")
    for key, value in (("projector.scale_factor", 2), ("preproc_min_tiles", 1), ("preproc_max_tiles", 4)):
        writer.add_uint32(f"clip.vision.{key}", value)
    parts = (model.model.vision_tower, model.model.multi_modal_projector)
    for name, tensor in (item for part in parts for item in part.state_dict().items()):
        stem = name
        for old, new in _INTERNVL_MMPROJ.items():
            stem = stem.replace(old, new)
        writer.add_tensor(stem, tensor.numpy())


def save_own_internvl(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model that `save` made in the format of InternVL's authors, and return the folder."""
    own = folder.with_name("internvl_chat")
    shutil.copytree(folder, own)
    tensors = {}
    for name, tensor in model.state_dict().items():
        for old, new in _OWN_INTERNVL.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    for stem in [name.removesuffix("q_proj.weight") for name in tensors if ".attn.q_proj.weight" in name]:
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{stem}{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{stem}qkv.{kind}"] = torch.cat(parts)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, own / "model.safetensors")
    config = json.loads((own / "config.json").read_text())
    vision = {**config.pop("vision_config"), "image_size": 16, "patch_size": 4}
    config |= {"model_type": "internvl_chat", "llm_config": config.pop("text_config"), "select_layer": -1}
    config |= {"max_dynamic_patch": 4, "vision_config": {**vision, "model_type": "intern_vit_6b"}}
    (own / "config.json").write_text(json.dumps(config))
    (own / "preprocessor_config.json").write_text(json.dumps({"size": 16, "crop_size": 16, **HALF}))
    return own


_INTERNVL_MMPROJ = {
    **{"embeddings.cls_token": "v.class_embd", "embeddings.position_embeddings": "v.position_embd.weight"},
    **{"embeddings.patch_embeddings.projection": "v.patch_embd", "encoder.layer.": "v.blk."},
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{"attention.projection_layer": "attn_out", "layernorm_before": "ln1", "layernorm_after": "ln2"},
    **{"lambda_1": "ls1.weight", "lambda_2": "ls2.weight", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    **{"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"},
}
_OWN_INTERNVL = {
    **{"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    **{"model.vision_tower.": "vision_model.", "embeddings.cls_token": "embeddings.class_embedding"},
    **{"position_embeddings": "position_embedding", "patch_embeddings.projection": "patch_embedding"},
    **{"encoder.layer.": "encoder.layers.", "attention.projection_layer": "attn.proj", "attention.": "attn."},
    **{"layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_": "ls"},
    **{f"model.multi_modal_projector.{old}": f"mlp1.{i}" for old, i in (("layer_norm", 0), ("linear_1", 1))},
    "model.multi_modal_projector.linear_2": "mlp1.3",
}
CONFIGS = {
    "internvl": lambda: InternVLConfig(
        text_config={"model_type": "qwen2", **{key: value for key, value in TEXT.items() if key != "head_dim"}},
        vision_config={**SIGLIP, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
        image_token_id=SPECIALS.index("<IMG_CONTEXT>"),
    ),
}
FAMILIES = {
    "internvl": Tiny(
        CONFIGS["internvl"],
        {"size": {"height": 16, "width": 16}, "max_patches": 4, **HALF},
        tiles,
        mmproj=_internvl_mmproj,
    ),
}
SWITCHES = {
    "internvl-large": FAMILIES["internvl"].changed(
        {}, {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
    ),
}
