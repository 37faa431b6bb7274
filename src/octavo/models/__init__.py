"""The architectures, one in each file, found by file name.

A module here has `Config` (see `ModelConfig`; with `from_gguf` and `from_hf`) and `build(g, cfg)`. Optionally it has
`ALIASES`, further names of the architecture in GGUF files and config.json, and `WEIGHTS`, the table that turns stored
tensors into the graph's weights. `VARIANT_OF` = (architecture, key, value): its config.json has the other's
model_type, and this value tells it apart. `ALIASES` and `VARIANT_OF` are tuples of plain values, written as such.
Files with a leading underscore are shared parts.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig, ModelConfig
from octavo.models._heads import has_head
from octavo.models._nearest import nearest
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models._wrapped import text_part as text_part_of

_DECLARATION = re.compile(r"^(ALIASES|VARIANT_OF) = (\([^()]*\))$", re.MULTILINE)


class ConfigType(Protocol):
    """The class `Config` of an architecture. Both functions raise ModelLoadError naming the key."""

    def from_gguf(self, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
        """reader: the file's metadata, with the values of its rotary tensors (`rope_freqs.weight`) under their names;
        shapes: those of all weights, by checkpoint name."""

    def from_hf(self, reader: ConfigReader) -> ModelConfig:
        """reader: config.json."""


class Architecture(Protocol):
    """A module of this package."""

    Config: ConfigType

    def build(self, g: Graph, cfg: Any) -> Value:
        """Write the model down in `g` and return the logits."""


@cache
def _declarations() -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
    """The `ALIASES` and `VARIANT_OF` of every module, from its text: importing all of them would delay every start."""
    modules = [(folder, m.name) for folder in __path__ for m in pkgutil.iter_modules([folder]) if not m.ispkg]
    texts = {
        name: Path(folder, f"{name}.py").read_text("utf-8") for folder, name in modules if not name.startswith("_")
    }
    return {
        name: {key: ast.literal_eval(value) for key, value in _DECLARATION.findall(text)}
        for name, text in texts.items()
    }


@cache
def known_architectures() -> Mapping[str, str]:
    """Every name of an architecture with its module: {"llama": "llama", "mistral": "llama"}."""
    declared = _declarations().items()
    return {name: module for module, values in declared for name in (module, *values.get("ALIASES", ()))}


@cache
def _variants() -> tuple[tuple[str, str, str, object], ...]:
    """The modules with `VARIANT_OF`, each with what is in it."""
    declared = sorted(_declarations().items())
    return tuple((module, *values["VARIANT_OF"]) for module, values in declared if "VARIANT_OF" in values)


def architecture_name(name: str, reader: ConfigReader) -> str:
    """The name of the module for an architecture name of GGUF or config.json and this configuration."""
    known = known_architectures()[name]
    for variant, other, key, value in _variants():
        if known == other and reader.value(key) == value:
            return variant
    return known


def text_part(reader: ConfigReader) -> ConfigReader:
    """The part of config.json that an architecture reads: of a model that also sees or hears, that about text."""
    return text_part_of(reader, known_architectures())


def load_architecture(name: str) -> Architecture:
    """The module for an architecture name of GGUF or config.json. Raises ModelLoadError if there is none."""
    known = known_architectures()
    if name not in known:
        raise ModelLoadError(f"architecture {name!r:.80} is not supported (docs/models.md lists those that are)")
    return cast(Architecture, importlib.import_module(f"{__name__}.{known[name]}"))


def find_architecture(
    name: str, reader: ConfigReader, read: Callable[[Architecture, ConfigReader], object]
) -> Architecture:
    """The same for a model with this configuration, which `read` makes an architecture read.

    Raises ModelLoadError naming the nearest of the supported architectures and the keys that it does not have.
    """
    if name in known_architectures():
        return load_architecture(architecture_name(name, reader))
    modules = {known: load_architecture(known) for known in sorted(set(known_architectures().values()))}
    near = nearest(name, modules, reader, read)
    found = f"; nearest of the supported ones: {near}" if near else ", and no supported one is near it"
    raise ModelLoadError(f"architecture {name!r:.80} is not supported{found} (docs/models.md lists them all)")


def build_draft_graph(name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Graph | None:
    """The unoptimized graph of the head of a model that predicts further tokens, or None if it has none.

    Raises GraphError as `build_graph`.
    """
    module = load_architecture(name)
    if not hasattr(module, "build_draft") or not has_head(cast(DecoderConfig, config), shapes):
        return None
    g = Graph(shapes)
    g.output = module.build_draft(g, config)
    return g


def build_encoder_graph(name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """The unoptimized graph of the encoder of a model whose decoder sees its rows. Raises GraphError."""
    g = Graph(shapes)
    g.output = cast(Any, load_architecture(name)).build_encoder(g, config)
    return g


def weight_table(architecture: Architecture) -> WeightTable:
    """The table of a module of this package; an empty one if it has none."""
    table: WeightTable = getattr(architecture, "WEIGHTS", WeightTable())
    return table


def build_graph(
    name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, classifies: bool = False
) -> Graph:
    """The unoptimized graph of a model.

    shapes: those of the checkpoint's weights.
    classifies: the checkpoint has a head of sequence classification.
    Raises GraphError naming operation, shapes, layer.
    """
    if classifies:
        # A decoder is written down with its head, which the checkpoint lacks; it is replaced before it is used.
        shapes = {"lm_head.weight": shapes.get("embed_tokens.weight", ()), **shapes}
    g = Graph(shapes)
    g.output = load_architecture(name).build(g, config)
    if classifies and g.generates:
        hidden_states = g.hidden_states
        del g.nodes[-1]
        g.output = g.linear(hidden_states, "score")
    return g
