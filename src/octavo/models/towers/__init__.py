"""The image encoders, one family per file, found by their `MODEL_TYPES`.

Each module here has `MODEL_TYPES`, the `model_type` values of config.json; `PROJECTORS`, the `projector_type` values of
mmproj files; `Config` (see `TowerConfig`); `build(g, cfg)`; and `WEIGHTS`, its table of tensors.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models.towers._tower import TowerConfig


class TowerConfigType(Protocol):
    """The `Config` class of a family. All methods raise ModelLoadError naming the key.

    Families without `PROJECTORS` have only `from_hf`.
    """

    def from_hf(self, reader: ConfigReader) -> TowerConfig:
        """Read the configuration from config.json."""

    def from_gguf(self, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> TowerConfig:
        """Read the configuration of an mmproj file.

        reader: the file's metadata under `clip.vision.`.
        text: metadata of the model's own file.
        shapes: shapes of the stored tensors, by graph name.
        """

    def processor_settings(self, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        """Return the arguments for `octavo.media.processor.read_processor` from an mmproj file."""


class Tower(Protocol):
    """The interface of a module in this package."""

    MODEL_TYPES: tuple[str, ...]
    PROJECTORS: tuple[str, ...]
    WEIGHTS: WeightTable
    Config: TowerConfigType

    def build(self, g: Graph, cfg: Any) -> Value:
        """Build the encoder in graph `g` and return its rows [MERGED, `cfg.output_width`]."""


def tower_name(tower: Tower) -> str:
    """Return the name of a family's file in this package."""
    return cast(ModuleType, tower).__name__.rpartition(".")[2]


@cache
def towers() -> tuple[Tower, ...]:
    """Load all families."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return tuple(cast(Tower, importlib.import_module(f"{__name__}.{name}")) for name in names)


def tower_of(model_type: object) -> Tower | None:
    """Return the image encoder for a `model_type` in config.json, or None if there is none."""
    return next((tower for tower in towers() if model_type in tower.MODEL_TYPES), None)


def tower_of_projector(projector: object) -> Tower | None:
    """Return the image encoder for a `projector_type` in an mmproj file, or None if there is none."""
    return next((tower for tower in towers() if projector in tower.PROJECTORS), None)
