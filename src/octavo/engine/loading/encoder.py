"""Loads the vision part of a model: its compiled image encoder and the cache of encoded rows."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from octavo.backends import Backend, ExecutorLimits, get_backend
from octavo.backends.memory import Sizes
from octavo.engine.limits import ImageLimits
from octavo.engine.loading.devices import backend_name, threads_of_rank
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.patches import PATCHES
from octavo.loader.model_file import mmproj_files
from octavo.loader.vision_files import has_vision

if TYPE_CHECKING:
    from octavo.backends.split import Device
    from octavo.config import EngineConfig
    from octavo.engine.encoding.encodings import Encodings
    from octavo.loader.checkpoint import Checkpoint
    from octavo.loader.vision import VisionPart

logger = logging.getLogger(__name__)

_SEEING = ("qwen2vl", "qwen3vl", "qwen3vlmoe")  # all models of these architectures read images
CPU_IMAGE_TOKENS = 1024  # larger images take many seconds there


def image_tokens(config: EngineConfig) -> int | None:
    """Return the most tokens per image, or None for the limit of the model's own processor."""
    if config.image_max_tokens is not None:
        return config.image_max_tokens
    name = backend_name(config)
    is_gpu = name.startswith("torch") and not cast("Device", get_backend(name)).uses_main_memory
    return None if is_gpu else CPU_IMAGE_TOKENS


def vision_of(config: EngineConfig, checkpoint: Checkpoint) -> VisionPart | None:
    """Return the vision part of a model, or None if it has none or the options turn it off. Raises ModelLoadError."""
    can_see = hasattr(checkpoint.config, "tie_word_embeddings") or checkpoint.config.own_pooling is not None
    if config.mmproj == "none" or not can_see:
        return None
    if not has_vision(checkpoint, config.mmproj):
        return None
    from octavo.loader.vision import open_vision  # imports processors and encoders, which text does not need

    return open_vision(checkpoint, config.mmproj, image_tokens(config))


def why_no_images(config: EngineConfig, checkpoint: Checkpoint, vision: VisionPart | None) -> str:
    """Return the reason why a vision model reads only text.

    Empty if it can read images or is not known to be a vision model.
    """
    if vision is not None or checkpoint.format != "gguf":
        return ""
    if config.mmproj is None and mmproj_files(checkpoint.path):
        return "reads text only: no mmproj file next to it fits (see the log); name its own with --mmproj"
    if checkpoint.architecture not in _SEEING:
        return ""
    return (
        "reads text only: its vision encoder is missing; put mmproj-*.gguf next to the model or name it with --mmproj"
    )


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """The vision part's memory in bytes, and the number of tokens per image.

    square_tokens: tokens of an image of 1024 x 1024 pixels.
    max_patches: most patches of an image.
    """

    weight_bytes: int
    workspace_bytes: int
    cache_bytes: int
    square_tokens: int
    max_patches: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.cache_bytes


def image_needs(config: EngineConfig, checkpoint: Checkpoint) -> ImageNeeds | None:
    """Return the needs of a model's vision part, without loading it, or None if the model reads only text.

    Raises ModelLoadError.
    """
    vision = vision_of(config, checkpoint)
    if vision is None:
        return None
    with closing(vision):
        sizes = encoder_sizes(config, vision)
        tokens = vision.processor.layout(1024, 1024).num_tokens
    return ImageNeeds(
        sizes.weight_bytes, sizes.workspace_bytes, config.media_cache_bytes, tokens, vision.processor.max_patches
    )


def load_encodings(config: EngineConfig, vision: VisionPart) -> Encodings:
    """Compile the image encoder and return it with an empty cache.

    Raises ModelLoadError if the weights do not fit it.
    """
    from octavo.engine.encoding.encodings import Encodings
    from octavo.engine.encoding.image_encoder import ImageEncoder

    limits, sizes = _planned(config, vision)
    executor = _backend(config).compile(sizes, vision.weights, limits, num_threads=threads_of_rank(config))
    encoder = ImageEncoder(executor, vision.processor, vision.config, vision.tables(), limits.further_rows[PATCHES])
    return Encodings(encoder, config.media_cache_bytes)


def image_limits(vision: VisionPart) -> ImageLimits:
    """Return the limits for images that a model's encoder takes."""
    return ImageLimits(
        max_patches=vision.processor.max_patches,
        patch_size=vision.processor.patch_size,
        merge_size=vision.config.merge_size,
        position_components=vision.config.sight.components,
        longest_span=vision.config.sight.both_ways,
    )


def encoder_sizes(config: EngineConfig, vision: VisionPart) -> Sizes:
    """Return the sizes of the compiled encoder. Raises ModelLoadError if the weights do not fit it."""
    return _planned(config, vision)[1]


def _planned(config: EngineConfig, vision: VisionPart) -> tuple[ExecutorLimits, Sizes]:
    limits = ExecutorLimits(1, 1, 1, 1, further_rows=vision.config.most_rows(vision.processor.max_patches))
    try:
        graph = vision.graph()
        return limits, _backend(config).sizes(graph, vision.weights, limits, num_threads=threads_of_rank(config))
    except GraphError as error:  # a weight is missing or has another shape than the configuration says
        raise ModelLoadError(f"{vision.path}: the image encoder: {error}") from error


def _backend(config: EngineConfig) -> Backend:
    return get_backend(backend_name(config))
