"""Tiny models with embeddings of texts and images: CLIP, SigLIP, SigLIP 2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors
from transformers import AutoModel, CLIPConfig, PreTrainedConfig, PreTrainedModel, Siglip2Config, SiglipConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from octavo.media.processor import Picture
from tests.support.tiny_vision import tokenizer_text
from tests.support.tiny_vision.family import SIGLIP, SPECIALS, VOCAB_SIZE

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_END, _PAD = "<|im_end|>", "<|endoftext|>"
# With 2 as the end transformers takes the token of the highest id, as the first files of CLIP have a wrong number.
_BEGIN, _LAST = "<|vision_start|>", "<|vision_end|>"
_CLIP = {
    "text_config": {**_TEXT, "bos_token_id": SPECIALS.index(_BEGIN), "eos_token_id": SPECIALS.index(_LAST)},
    "vision_config": {**SIGLIP, "image_size": 24},
    "projection_dim": 40,
}
_SIGLIP = {"text_config": {**_TEXT, "projection_size": 48}, "vision_config": {**SIGLIP, "image_size": 24}}
_NAFLEX = {**_SIGLIP, "vision_config": {**SIGLIP, "num_patches": 25}}
_SQUARE = {"size": {"height": 24, "width": 24}}


@dataclass(frozen=True)
class Pair:
    """A tiny model.

    judge: image processor of transformers.
    around: tokens before and after a text.
    """

    config: type[PreTrainedConfig]
    values: Mapping[str, Any]
    judge: type[Any]
    preprocessor: Mapping[str, Any]
    around: tuple[str, ...]
    is_padded: bool = True


PAIRS = {
    "clip": Pair(
        CLIPConfig,
        _CLIP,
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
        (_BEGIN, "$A", _LAST),
        is_padded=False,
    ),
    "siglip": Pair(SiglipConfig, _SIGLIP, SiglipImageProcessorPil, _SQUARE, ("$A", _END)),
    "siglip-odd": Pair(  # the last pixels are in no patch
        SiglipConfig,
        {**_SIGLIP, "vision_config": {**SIGLIP, "image_size": 26}},
        SiglipImageProcessorPil,
        {"size": {"height": 26, "width": 26}},
        ("$A", _END),
    ),
    "siglip2": Pair(
        Siglip2Config, _NAFLEX, Siglip2ImageProcessorPil, {"patch_size": 4, "max_num_patches": 30}, ("$A", _END)
    ),
}


def pair_model(name: str) -> PreTrainedModel:
    """Return the model in float32, with weights large enough that every part of it affects the embeddings."""
    torch.manual_seed(3)
    pair = PAIRS[name]
    model = AutoModel.from_config(pair.config(**pair.values), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            width = parameter.shape[1:].numel() if parameter.dim() > 1 else 1
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else width**-0.5)
            if parameter.dim() == 1 and "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter += 1.0
            if "_embedding" in parameter_name or parameter_name.endswith("probe"):
                parameter *= 3.0
    return model.eval()


def save_pair(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """Save everything that a loader reads, and return the folder."""
    model.save_pretrained(folder)
    pair = PAIRS[name]
    (folder / "preprocessor_config.json").write_text(json.dumps(pair.preprocessor))
    tokenizer = Tokenizer.from_str(tokenizer_text())
    control = [(token, SPECIALS.index(token)) for token in pair.around if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(" ".join(pair.around), None, control)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    names = {"eos_token": _END, "pad_token": _PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def text_vector(name: str, model: PreTrainedModel, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return a text's embedding, with padding if the model was trained with it."""
    pair = PAIRS[name]
    ids = list(token_ids)
    if pair.is_padded:
        ids += [SPECIALS.index(_PAD)] * (_TEXT["max_position_embeddings"] - len(ids))
    with torch.no_grad():
        return np.asarray(model.get_text_features(torch.tensor([ids])).pooler_output[0].numpy())


def image_vector(name: str, model: PreTrainedModel, picture: Picture) -> NDArray[np.float32]:
    pair = PAIRS[name]
    inputs = pair.judge(**pair.preprocessor)([picture.pixels], return_tensors="pt")
    with torch.no_grad():
        return np.asarray(model.get_image_features(**inputs).pooler_output[0].numpy())
