"""Adapters made by PEFT for tiny models, with random factors, and PEFT's own logits with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.tiny_models import expected_logits


def save_peft(
    model: PreTrainedModel, folder: Path, token_ids: list[int], *, seed: int = 0, **settings: Any
) -> NDArray[np.float32]:
    """Save a random PEFT adapter in a folder, and return the model's logits with it, [tokens, vocab].

    Its numbers are exact in bfloat16, the type in which the CPU backend stores them.

    settings: arguments of `LoraConfig`; by default the adapter changes the linears of all layers.
    """
    import peft

    targets = {} if "target_parameters" in settings else {"target_modules": "all-linear"}
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **targets, **settings})
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name or "modules_to_save" in name:
                parameter.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.shape[-1] ** -0.5)
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
    adapted.save_pretrained(str(folder))
    return expected_logits(adapted, token_ids)
