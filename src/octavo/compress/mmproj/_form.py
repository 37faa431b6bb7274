"""The form of an image encoder in an mmproj file, and the keys that all families write.

Source: the keys that llama.cpp reads (`tools/mtmd/clip.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.compress.forms._gguf import Keys, Sources
from octavo.loader.checkpoint import Checkpoint
from octavo.media.processor import ImageProcessor
from octavo.models.towers._tower import TowerConfig

PREFIX = "clip.vision."
_ACTIVATION_KEYS = {"gelu": "clip.use_gelu", "gelu_tanh": "clip.use_gelu", "silu": "clip.use_silu"}


@dataclass(frozen=True, slots=True)
class MmprojForm:
    """The form in which a family of image encoders is written to mmproj files. Each module names it `MMPROJ`.

    projector: function that returns the value of `clip.projector_type` for a configuration.
    keys: function that returns `image_size` and the keys that only this family writes, without the prefix
        `clip.vision.`, for a configuration and the image processor. They are read back, and the result is compared with
        the configuration.
    stored: function that returns the configuration that a reader of the file gets, and the weights by their names in
        the graph of that configuration.
    further: function that makes additional tensors from the text model's checkpoint. No graph of Octavo uses them.
    activation: the activation in the layers, if the configuration has none.
    norm_eps: the epsilon of the norms, if the configuration has none.
    projector_key: the key for the result of `projector`.
    """

    projector: Callable[[Any], str]
    keys: Callable[[Any, Any], Keys]
    stored: Callable[[Any, Sources], tuple[Any, Sources]] = field(default=lambda cfg, weights: (cfg, weights))
    further: Callable[[Checkpoint], Sources] = field(default=lambda _checkpoint: {})
    activation: str = "gelu"
    norm_eps: float = 1e-6
    projector_key: str = "clip.projector_type"


def shared_keys(form: MmprojForm, cfg: TowerConfig, processor: ImageProcessor, tensors: Sources) -> Keys:
    """Return the keys that all families write, with their prefixes.

    tensors: the tensors of the file.
    """
    up = tensors.get("v.blk.0.ffn_up.weight")
    keys: Keys = {
        "embedding_length": cfg.hidden_size,
        "block_count": cfg.num_layers,
        "attention.head_count": cfg.num_heads,
        "attention.layer_norm_epsilon": float(getattr(cfg, "norm_eps", form.norm_eps)),
        "feed_forward_length": 0 if up is None else up.shape[0],
        "projection_dim": cfg.output_width // (1 + cfg.sight.num_added),
        "patch_size": processor.patch_size,
        "image_mean": np.array(processor.normalization.mean, np.float32),
        "image_std": np.array(processor.normalization.std, np.float32),
    }
    whole: Keys = {"clip.has_vision_encoder": True, form.projector_key: form.projector(cfg)}
    activation = str(getattr(cfg, "activation", form.activation))
    if activation in _ACTIVATION_KEYS:  # a file without either key means quick_gelu
        whole[_ACTIVATION_KEYS[activation]] = True
    return whole | {PREFIX + key: value for key, value in keys.items()}
