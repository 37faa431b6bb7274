"""Tiny random vision models, in transformers, and their answers about pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedModel

from octavo.media.processor import Picture, read_processor
from tests.support.directory_tokenizers import QWEN2, split
from tests.support.tiny_vision import gemma, internvl, pixtral, qwen, siglip
from tests.support.tiny_vision.family import SPECIALS, TEMPLATE, Tiny

FAMILIES: dict[str, Tiny] = {
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **siglip.FAMILIES,
    **internvl.FAMILIES,
    **pixtral.FAMILIES,
}
# Of the families, each with another value of what their configurations switch.
SWITCHES: dict[str, Tiny] = {**qwen.SWITCHES, **gemma.SWITCHES, **siglip.SWITCHES, **internvl.SWITCHES}
# Numbers that are no parameters: about the middle of each.
_BUFFERS = {
    "input_min": -1.3,
    "input_max": 1.1,
    "output_min": -1.2,
    "output_max": 1.4,
    "std_bias": 0.3,
    "std_scale": 1.2,
}


def tiny(name: str) -> Tiny:
    """Return a family, or a variant of one."""
    return {**FAMILIES, **SWITCHES}[name]


def tiny_model(name: str) -> PreTrainedModel:
    """Return the model in float32, with weights large enough that every part of it affects the logits."""
    torch.manual_seed(tiny(name).seed)
    model = AutoModelForImageTextToText.from_config(
        tiny(name).config(), dtype=torch.float32, attn_implementation="eager"
    )
    is_scaled = name.startswith("gemma")  # embeddings, by the model; larger ones would be all that it says
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            width = parameter.shape[1:].numel() if parameter.dim() > 1 else 1
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else width**-0.5)
            is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
            if (
                parameter.dim() == 1
                and is_norm
                and not (name.startswith(("qwen3_5", "gemma3")) and "language_model" in parameter_name)
            ):
                parameter += 1.0
                if "q_norm" in parameter_name and name.startswith("gemma4"):  # whose attention has no other scale
                    parameter *= 0.4
            if ("embed_tokens" in parameter_name and not is_scaled) or "pos_embed" in parameter_name:
                parameter *= parameter.shape[-1] ** 0.25
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(tuple(_BUFFERS)):
                middle = _BUFFERS[buffer_name.rpartition(".")[2]]
                buffer.uniform_(middle - 0.2, middle + 0.2)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """Save everything that a loader reads except the vocabulary, and return the folder."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny(name).preprocessor))
    (folder / "tokenizer.json").write_text(tokenizer_text())
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def tokenizer_text() -> str:
    """Return a tokenizer with one token per byte after the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split(QWEN2)  # which GGUF files have a name for
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return str(tokenizer.to_str())


def picture(seed: int, height: int, width: int) -> Picture:
    """Draw a picture of soft shapes, so that resizing matters little and positions matter much."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 16.0
    waves = [np.sin(a * y + b * x + c) for a, b, c in rng.uniform(0, 3, (3, 3))]
    return Picture(((np.stack(waves, axis=-1) + 1) * 127).astype(np.uint8))


def expected_logits(
    name: str, model: PreTrainedModel, parts: Sequence[list[int] | Picture], continuation: Sequence[int] = ()
) -> NDArray[np.float32]:
    """Return the logits [positions, vocab] for a prompt of alternating token ids and pictures, and the tokens after
    it.
    """
    return np.asarray(_output(name, model, parts, continuation).logits[0].numpy())


def expected_states(name: str, model: PreTrainedModel, parts: Sequence[list[int] | Picture]) -> NDArray[np.float32]:
    """Return the last hidden states after the final norm: [positions, hidden]."""
    return np.asarray(_output(name, model, parts, output_hidden_states=True).hidden_states[-1][0].numpy())


def _output(
    name: str,
    model: PreTrainedModel,
    parts: Sequence[list[int] | Picture],
    continuation: Sequence[int] = (),
    **options: bool,
) -> Any:
    family = tiny(name)
    config = family.config()
    processor = read_processor(config.model_type, config.to_dict(), family.preprocessor)
    tokenizer = Tokenizer.from_str(tokenizer_text())
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
    given = family.inputs(processor, seen) if seen else {}
    if family.kinds:
        given[family.kinds] = (tokens == soft).int()
    mask = torch.ones_like(tokens)
    if config.model_type == "gemma4_unified" and seen:  # whose forward alone differs from generate in global layers
        places = torch.arange(mask.shape[1])[None]
        shape = torch.zeros(*mask.shape, 1)
        mask = model.create_masks_for_generate(model.config, shape, mask, None, places, given[family.kinds])
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask, **given, **options)
