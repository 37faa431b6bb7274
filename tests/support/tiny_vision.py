"""Tiny random models that see, as transformers has them, and what they say of pictures."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    InternVLConfig,
    Lfm2VlConfig,
    LlavaConfig,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from octavo.cli.quantize import convert
from octavo.media.processor import ImageLayout, ImageProcessor, Picture, read_processor
from tests.support.directory_tokenizers import QWEN2, split

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

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_QWEN_VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
_SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
}
_QWEN2_TEXT = {
    **{key: value for key, value in _TEXT.items() if key != "head_dim"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
_QWEN2_VISION = {"depth": 3, "num_heads": 3, "patch_size": 4}
_QWEN_IDS = {
    "image_token_id": SPECIALS.index("<|image_pad|>"),
    "video_token_id": SPECIALS.index("<|video_pad|>"),
    "vision_start_token_id": SPECIALS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIALS.index("<|vision_end|>"),
}

_GEMMA4_TEXT = {
    **_TEXT,
    **{"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    **{"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "use_bidirectional_attention": "vision",
}
_GEMMA4_IDS = {
    "image_token_id": SPECIALS.index("<|image|>"),
    "boi_token_id": SPECIALS.index("<|image>"),
    "eoi_token_id": SPECIALS.index("<image|>"),
    **{"video_token_id": 318, "audio_token_id": 317, "audio_config": None},
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
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
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
        },
        vision_config={**_QWEN_VISION, "deepstack_visual_indexes": [0, 2]},
        **_QWEN_IDS,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config={
            **_TEXT,
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
    "gemma3": lambda: Gemma3Config(
        text_config={
            **_TEXT,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
        vision_config={**_SIGLIP, "vision_use_head": False, "image_size": 32},
        mm_tokens_per_image=4,
        image_token_index=SPECIALS.index("<image_soft_token>"),
        boi_token_index=SPECIALS.index("<start_of_image>"),
        eoi_token_index=SPECIALS.index("<end_of_image>"),
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={**_SIGLIP, "image_size": 16},
        scale_factor=2,
        image_token_id=SPECIALS.index("<image>"),
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=_GEMMA4_TEXT,
        vision_config={
            **{**_SIGLIP, "hidden_size": 48, "head_dim": 16, "num_key_value_heads": 3},
            **{"pooling_kernel_size": 2, "position_embedding_size": 40, "standardize": True},
        },
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
    "lfm2_vl": lambda: Lfm2VlConfig(
        text_config={
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
        },
        vision_config={**_SIGLIP, "num_patches": 36, "vision_use_head": False},
        projector_hidden_size=40,
        image_token_id=SPECIALS.index("<image>"),
    ),
    "internvl": lambda: InternVLConfig(
        text_config={"model_type": "qwen2", **{key: value for key, value in _TEXT.items() if key != "head_dim"}},
        vision_config={**_SIGLIP, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
        image_token_id=SPECIALS.index("<IMG_CONTEXT>"),
    ),
    "llava": lambda: LlavaConfig(
        text_config={"model_type": "mistral", **_TEXT, "sliding_window": None},
        vision_config={"model_type": "pixtral", **_SIGLIP, "head_dim": 16, "image_size": 40, "hidden_act": "silu"},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_index=SPECIALS.index("[IMG]"),
        tie_word_embeddings=False,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "mistral", **_TEXT, "sliding_window": None},
        vision_config={"model_type": "pixtral", **_SIGLIP, "head_dim": 16, "image_size": 40, "hidden_act": "silu"},
        spatial_merge_size=2,
        image_token_index=SPECIALS.index("[IMG]"),
        tie_word_embeddings=False,
    ),
}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}},
}
PREPROCESSORS["gemma3"] = {"size": {"height": 32, "width": 32}, "image_seq_length": 4}
PREPROCESSORS["internvl"] = {"size": {"height": 16, "width": 16}, "max_patches": 4, **_HALF}
PREPROCESSORS["lfm2_vl"] = {  # the first picture is one tile, the second has several
    **{"encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 16, "max_tiles": 4},
    **{"min_image_tokens": 4, "max_image_tokens": 16, "max_pixels_tolerance": 1.0},
}
PREPROCESSORS["gemma4"] = PREPROCESSORS["gemma4_unified"] = {
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}
PREPROCESSORS["smolvlm"] = {"max_image_size": {"longest_edge": 16}, "size": {"longest_edge": 32}}
PREPROCESSORS["mistral3"] = PREPROCESSORS["llava"] = {"size": {"longest_edge": 40}, "patch_size": 4, **_HALF}
PREPROCESSORS["qwen2_vl"] = PREPROCESSORS["qwen2_5_vl"] = {**PREPROCESSORS["qwen3_vl"], **_HALF}
PREPROCESSORS["qwen3_5"] = PREPROCESSORS["qwen3_vl"]


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The model in float32, with weights so large that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            width = parameter.shape[1:].numel() if parameter.dim() > 1 else 1
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else width**-0.5)
            is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
            if parameter.dim() == 1 and is_norm and not (name == "qwen3_5" and "language_model" in parameter_name):
                parameter += 1.0
            if "embed_tokens" in parameter_name or "pos_embed" in parameter_name:
                parameter *= parameter.shape[-1] ** 0.25
    return model.eval()


def save(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """The folder, with all that a loader reads but the vocabulary."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    (folder / "tokenizer.json").write_text(_tokenizer())
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def save_gguf(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """The text model of a folder that `save` made as a GGUF file, with the part that sees beside it."""
    text = folder.with_name(f"{folder.name}-gguf") / "text.gguf"
    text.parent.mkdir()
    result = CliRunner().invoke(convert, [str(folder), str(text), "--dtype", "f32"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    save_mmproj(model, text.with_name("mmproj-tiny.gguf"), name)
    return text


def save_mmproj(model: PreTrainedModel, path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    vision = model.config.vision_config
    keys = {
        "embedding_length": getattr(vision, "embed_dim", 0) or vision.hidden_size,
        "block_count": getattr(vision, "depth", 0) or vision.num_hidden_layers,
        "attention.head_count": getattr(vision, "num_heads", 0) or vision.num_attention_heads,
        "patch_size": _side(vision.patch_size),
        "projection_dim": 64,
        "image_size": _side(getattr(vision, "image_size", 24)),
    }
    width = getattr(vision, "intermediate_size", 0) or vision.embed_dim * vision.mlp_ratio
    keys["feed_forward_length"] = width  # which llama.cpp reads, as it does the two below
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, value in keys.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    MMPROJ[name](writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _side(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _qwen2_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    is_second = model.config.model_type == "qwen2_vl"
    writer.add_string("clip.projector_type", "qwen2vl_merger" if is_second else "qwen2.5vl_merger")
    sizes = {"spatial_merge_size": 2, "image_min_pixels": 64, "image_max_pixels": 4096}
    for key, value in (sizes if is_second else {**sizes, "n_wa_pattern": 2, "window_size": 16}).items():
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


def _gemma_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_string("clip.projector_type", "gemma3")
    _add_siglip(writer, model.model.vision_tower)
    projector = model.model.multi_modal_projector
    writer.add_tensor("mm.input_projection.weight", np.ascontiguousarray(projector.mm_input_projection_weight.detach()))
    writer.add_tensor("mm.soft_emb_norm.weight", projector.mm_soft_emb_norm.weight.detach().numpy() + 1)


def _idefics_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.add_uint32("clip.vision.preproc_image_size", 32)
    _add_siglip(writer, model.model.vision_model)
    projection = model.model.connector.modality_projection.proj.weight.detach().numpy()
    writer.add_tensor("mm.model.fc.weight", np.ascontiguousarray(projection))


def _pixtral_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """q and k with the two columns of a pair beside each other, as llama.cpp rotates them."""
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


def _lfm2_mmproj(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """The linear of the patches as a convolution."""
    writer.add_string("clip.projector_type", "lfm2")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    _add_siglip(writer, model.model.vision_tower)
    names = {"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"}
    for name, tensor in model.model.multi_modal_projector.state_dict().items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names[stem]}.{kind}", tensor.numpy())


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
    """The folder of a model that `save` made as InternVL's authors publish theirs."""
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
    (own / "preprocessor_config.json").write_text(json.dumps({"size": 16, "crop_size": 16, **_HALF}))
    return own


def _add_siglip(writer: gguf.GGUFWriter, tower: torch.nn.Module) -> None:
    for name, tensor in tower.state_dict().items():
        stem = name.removeprefix("vision_model.")
        for old, new in _SIGLIP_MMPROJ.items():
            stem = stem.replace(old, new)
        array = tensor.numpy()
        if stem == "v.patch_embd.weight" and array.ndim == 2:
            side = math.isqrt(array.shape[1] // 3)
            array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        writer.add_tensor(stem, np.ascontiguousarray(array))


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
_PIXTRAL_MMPROJ = {
    **{"patch_conv": "v.patch_embd", "ln_pre": "v.pre_ln", "transformer.layers.": "v.blk."},
    **{"attention_norm": "ln1", "ffn_norm": "ln2", "attention.o_proj": "attn_out"},
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{"patch_merger.merging_layer": "mm.patch_merger", "linear_1": "mm.1", "linear_2": "mm.2"},
}
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
_SIGLIP_MMPROJ = {
    **{"embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd"},
    **{"post_layernorm": "v.post_ln", "encoder.layers.": "v.blk.", "layer_norm1": "ln1", "layer_norm2": "ln2"},
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
}
# The writers of mmproj files, as llama.cpp's converter writes them.
MMPROJ = {
    "qwen2_vl": _qwen2_mmproj,
    "qwen2_5_vl": _qwen2_mmproj,
    "qwen3_vl": _qwen_mmproj,
    "gemma3": _gemma_mmproj,
    "smolvlm": _idefics_mmproj,
    "lfm2_vl": _lfm2_mmproj,
    "internvl": _internvl_mmproj,
    "mistral3": _pixtral_mmproj,
    "llava": _pixtral_mmproj,
}


def _tokenizer() -> str:
    """A token a byte, behind the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split(QWEN2)  # which GGUF files have a name for
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return str(tokenizer.to_str())


def picture(seed: int, height: int, width: int) -> Picture:
    """A picture of soft shapes, so that resizing matters little and places much."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 16.0
    waves = [np.sin(a * y + b * x + c) for a, b, c in rng.uniform(0, 3, (3, 3))]
    return Picture(((np.stack(waves, axis=-1) + 1) * 127).astype(np.uint8))


def expected_logits(
    name: str, model: PreTrainedModel, parts: Sequence[list[int] | Picture], continuation: Sequence[int] = ()
) -> NDArray[np.float32]:
    """[positions, vocab] of a prompt of token ids and pictures in turn, and of the tokens after it."""
    processor = read_processor(name, CONFIGS[name]().to_dict(), PREPROCESSORS[name])
    tokenizer = Tokenizer.from_str(_tokenizer())
    soft = model.config.image_token_id
    ids: list[int] = []
    seen = []
    for part in parts:
        if not isinstance(part, Picture):
            ids += part
            continue
        layout = processor.layout(part.width, part.height)
        for mark in layout.marks:
            ids += [soft] * mark if isinstance(mark, int) else tokenizer.encode(mark).ids
        seen.append((processor.resize(part, layout), layout))
    tokens = torch.tensor([[*ids, *continuation]])
    pixels = _INPUTS.get(name, _patch_rows)(processor, seen) if seen else {}
    kinds = (tokens == soft).int()
    with torch.no_grad():
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **_kinds(name, kinds), **pixels)
        return np.asarray(output.logits[0].numpy())


_Seen = list[tuple[tuple[NDArray[np.uint8], ...], ImageLayout]]


def _kinds(name: str, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
    """The argument that tells a model where its images are."""
    key = {"gemma3": "token_type_ids"}.get(name, "mm_token_type_ids" if name[:4] in ("qwen", "gemm") else None)
    return {} if key is None else {key: kinds}


def _patch_rows(processor: ImageProcessor, seen: _Seen) -> dict[str, torch.Tensor]:
    """Qwen's models take rows of patches."""
    rows = np.concatenate([processor.rows(tiles) for tiles, _ in seen])
    grids = [(1, tile.grid_rows, tile.grid_cols) for _, layout in seen for tile in layout.tiles]
    return {"pixel_values": torch.from_numpy(rows), "image_grid_thw": torch.tensor(grids)}


def _tiles(processor: ImageProcessor, seen: _Seen) -> torch.Tensor:
    """Tiles of one size: [tiles, 3, height, width]."""
    del processor
    pixels = np.stack([tile for tiles, _ in seen for tile in tiles]).astype(np.float32)
    return torch.from_numpy(((pixels / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2).copy())


def _padded(processor: ImageProcessor, seen: _Seen) -> dict[str, torch.Tensor]:
    """Pictures of several sizes in one array, with their sizes."""
    sizes = [tile.shape[:2] for tiles, _ in seen for tile in tiles]
    whole = np.zeros((len(seen), 3, *np.max(sizes, axis=0)), np.float32)
    for row, (tiles, _) in zip(whole, seen, strict=True):
        pixels = (tiles[0] / np.float32(127.5) - 1).transpose(2, 0, 1)
        row[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    del processor
    return {"pixel_values": torch.from_numpy(whole), "image_sizes": torch.tensor(sizes)}


def _flat_patches(processor: ImageProcessor, seen: _Seen) -> dict[str, torch.Tensor]:
    """Tiles of several sizes as rows of patches, row by row, with zeros behind those of smaller ones."""
    tiles, side = [tile for parts, _ in seen for tile in parts], processor.patch_size
    grids = [(tile.shape[0] // side, tile.shape[1] // side) for tile in tiles]
    rows = np.zeros((len(tiles), max(rows * cols for rows, cols in grids), 3 * side * side), np.float32)
    for row, tile, (height, width) in zip(rows, tiles, grids, strict=True):
        patches = tile.reshape(height, side, width, side, 3).swapaxes(1, 2).reshape(height * width, -1)
        row[: height * width] = patches / np.float32(127.5) - 1
    mask = np.arange(rows.shape[1]) < np.prod(grids, axis=1)[:, None]
    shapes = {"spatial_shapes": torch.tensor(grids), "pixel_attention_mask": torch.from_numpy(mask.astype(np.int32))}
    return {"pixel_values": torch.from_numpy(rows), **shapes}


def _placed_patches(processor: ImageProcessor, seen: _Seen) -> dict[str, torch.Tensor]:
    """Rows of patches as `_flat_patches`, of values from 0 to 1, with the column and the row of each; -1: none."""
    flat = _flat_patches(processor, seen)
    mask = flat["pixel_attention_mask"].bool()
    places = torch.full((*mask.shape, 2), -1)
    for row, (_, cols) in enumerate(flat["spatial_shapes"].tolist()):
        numbers = torch.arange(int(mask[row].sum()))
        places[row, mask[row]] = torch.stack([numbers % cols, numbers // cols], dim=-1)
    pixels = torch.where(mask[..., None], (flat["pixel_values"] + 1) / 2, 0.0)
    return {"pixel_values": pixels, "image_position_ids": places}


_INPUTS: dict[str, Callable[[ImageProcessor, _Seen], dict[str, torch.Tensor]]] = {
    "gemma3": lambda processor, seen: {"pixel_values": _tiles(processor, seen)},
    "smolvlm": lambda processor, seen: {"pixel_values": _tiles(processor, seen)[None]},
    "internvl": lambda processor, seen: {"pixel_values": _tiles(processor, seen)},
    "lfm2_vl": _flat_patches,
    "gemma4": _placed_patches,
    "gemma4_unified": _placed_patches,
    "mistral3": _padded,
    "llava": _padded,
}
