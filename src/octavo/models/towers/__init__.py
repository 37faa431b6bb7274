"""The encoders of images, one family in each file, found by its `MODEL_TYPES`.

A module here has `MODEL_TYPES`, the values of `model_type` of config.json, and `PROJECTORS`, those of
`projector_type` of mmproj files; `Config` (see `TowerConfig`), `build(g, cfg)`, and `WEIGHTS`, its table of tensors.
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
    """The class `Config` of a family. All functions raise ModelLoadError naming the key.

    Families without `PROJECTORS` have only the first one.
    """

    def from_hf(self, reader: ConfigReader) -> TowerConfig:
        """reader: config.json."""

    def from_gguf(self, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> TowerConfig:
        """reader: the metadata of an mmproj file under `clip.vision.`; text: those of the model's own file.
        shapes: of the stored tensors, by the names of the graph.
        """

    def processor_settings(self, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        """The arguments of `octavo.media.processor.read_processor` of an mmproj file."""


class Tower(Protocol):
    """A module of this package."""

    MODEL_TYPES: tuple[str, ...]
    PROJECTORS: tuple[str, ...]
    WEIGHTS: WeightTable
    Config: TowerConfigType

    def build(self, g: Graph, cfg: Any) -> Value:
        """Write the encoder down in `g` and return its rows [MERGED, `cfg.output_width`]."""


def tower_name(tower: Tower) -> str:
    """The name of a family's file here."""
    return cast(ModuleType, tower).__name__.rpartition(".")[2]


@cache
def towers() -> tuple[Tower, ...]:
    """All families."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return tuple(cast(Tower, importlib.import_module(f"{__name__}.{name}")) for name in names)


def tower_of(model_type: object) -> Tower | None:
    """The encoder of images of models with this `model_type` in config.json, or None if there is none."""
    return next((tower for tower in towers() if model_type in tower.MODEL_TYPES), None)


def tower_of_projector(projector: object) -> Tower | None:
    """That of mmproj files with this `projector_type`, or None if there is none."""
    return next((tower for tower in towers() if projector in tower.PROJECTORS), None)
