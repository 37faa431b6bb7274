"""Tiny random models with a multi-token-prediction head, and what transformers' layer computes for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from tests.support.safetensors_writer import safetensors
from tests.support.tiny_models import stored_tensors, tiny_model

Tensors = dict[str, NDArray[np.float32]]

HEADS = ["deepseek3", "glm4moe", "qwen3next", "qwen35", "mimo"]

_PARTS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_QWEN_PARTS = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
_MIMO_PARTS = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")


@dataclass(frozen=True, slots=True)
class TinyHead:
    """A model whose last layer belongs to its head.

    parts: other tensors of the head, by graph name.
    """

    name: str
    model: PreTrainedModel
    parts: Tensors

    @property
    def num_layers(self) -> int:
        """Number of layers without the head."""
        return int(self.model.config.num_hidden_layers) - 1

    def save(self, directory: Path, **changes: Any) -> Path:
        """Save the model and return the directory.

        changes: other values of config.json.
        """
        number = self.num_layers
        plain = f"model.layers.{number}."
        names = {part: f"{plain}{part}" for part in _PARTS}
        own = plain
        if self.name.startswith("qwen"):
            own, names = "mtp.layers.0.", dict(zip(_PARTS, _QWEN_PARTS, strict=True))
        if self.name == "mimo":
            own = "model.mtp_layers.0."
            names = {part: f"{own}{name}" for part, name in zip(_PARTS, _MIMO_PARTS, strict=True)}
        tensors = {name.replace(plain, own): array for name, array in stored_tensors(self.model).items()}
        tensors |= {f"{names[part]}.weight": array for part, array in self.parts.items()}
        changes = {"model_type": "mimo", **changes} if self.name == "mimo" else changes
        config = self.model.config.to_dict() | {"num_hidden_layers": number, "num_nextn_predict_layers": 1} | changes
        if config.get("layer_types") is not None:
            config["layer_types"] = config["layer_types"][:number]
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "model.safetensors").write_bytes(safetensors(tensors))
        return directory

    def logits(self, token_ids: list[int], hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of the tokens after these, computed by transformers' layer.

        hidden: [tokens, columns].
        """
        model = self.model
        inner = model.model
        with torch.no_grad():
            embeddings = inner.embed_tokens(torch.tensor(token_ids))
            pair = [self._norm("enorm", embeddings), self._norm("hnorm", torch.tensor(hidden))]
            x = torch.cat(pair[::-1] if self.name == "mimo" else pair, dim=1) @ torch.tensor(self.parts["eh_proj"]).T
            layers, norm, kinds = inner.layers, inner.norm, getattr(inner.config, "layer_types", None)
            inner.layers, inner.norm = nn.ModuleList([layers[-1]]), nn.Identity()
            inner.config.num_hidden_layers, inner.config.layer_types = 1, kinds and kinds[-1:]
            try:
                x = inner(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            finally:
                inner.layers, inner.norm, inner.config.num_hidden_layers = layers, norm, len(layers)
                inner.config.layer_types = kinds
            found: NDArray[np.float32] = model.lm_head(self._norm("shared_head.norm", x)).numpy()
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(self.parts[name]) + self.name.startswith("qwen")
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * weight


def tiny_head(name: str, change: Callable[[str, torch.Tensor], None] | None = None, **options: Any) -> TinyHead:
    """Make a model with a head.

    change: called with each parameter of the model.
    options: other values of its configuration.
    """
    model = tiny_model("qwen2" if name == "mimo" else name, **options)
    if change is not None:
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                change(parameter_name, parameter)
    rng, width = np.random.default_rng(7), model.config.hidden_size
    parts = {"eh_proj": rng.normal(size=(width, 2 * width)) * (2 * width) ** -0.5}
    for part in ("enorm", "hnorm", "shared_head.norm"):
        parts[part] = rng.normal(size=width) * 0.1 + (not name.startswith("qwen"))
    return TinyHead(name, model, {part: array.astype(np.float32) for part, array in parts.items()})


def agreeing_head(name: str, **options: Any) -> TinyHead:
    """Make a model whose next token depends only on the last one, and a head that always predicts it."""

    def change(parameter: str, values: torch.Tensor) -> None:
        if parameter.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "o_proj.bias")):
            values.zero_()

    head = tiny_head(name, change, **options)
    width = head.model.config.hidden_size
    one = np.full(width, 0.0 if name.startswith("qwen") else 1.0, np.float32)
    projection = np.eye(width, 2 * width, width if name == "mimo" else 0, dtype=np.float32)
    norm = head.model.model.norm.weight.detach().float().numpy()
    return TinyHead(name, head.model, {"eh_proj": projection, "enorm": one, "hnorm": one, "shared_head.norm": norm})
