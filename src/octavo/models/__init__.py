"""The model architectures, one per file, found by file name.

Each module here has `build(g, cfg)` and `Config`, a `ModelConfig` with `from_gguf` and `from_hf`. Three more names
are optional. `ALIASES` lists other names of the architecture in GGUF files and config.json. `WEIGHTS` is the table that
turns stored tensors into the graph's weights. `VARIANT_OF` = (architecture, key, value) is for an architecture that
shares its model_type in config.json with another one: this value of the key identifies it. `ALIASES` and `VARIANT_OF`
are tuples written as literals. Files whose names begin with an underscore hold shared parts.
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
from octavo.models._nearest import MISSING, nearest
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models._wrapped import text_part as text_part_of

_DECLARATION = re.compile(r"^(ALIASES|VARIANT_OF) = (\([^()]*\))$", re.MULTILINE)


class ConfigType(Protocol):
    """The `Config` class of an architecture. Both methods raise ModelLoadError naming the key."""

    def from_gguf(self, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
        """Read the configuration of a GGUF file.

        reader: the file's metadata, with the values of its rotary tensors (`rope_freqs.weight`) under their names.
        shapes: the shapes of all weights, by checkpoint name.
        """

    def from_hf(self, reader: ConfigReader) -> ModelConfig:
        """Read the configuration from config.json."""


class Architecture(Protocol):
    """The interface of a module in this package."""

    Config: ConfigType

    def build(self, g: Graph, cfg: Any) -> Value:
        """Build the model in graph `g` and return the logits."""


@cache
def _declarations() -> Mapping[str, Mapping[str, tuple[Any, ...]]]:
    """Read the `ALIASES` and `VARIANT_OF` of every module from its source text.

    Importing all modules would delay every start.
    """
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
    """Map every name of an architecture to its module: {"llama": "llama", "mistral": "llama"}."""
    declared = _declarations().items()
    return {name: module for module, values in declared for name in (module, *values.get("ALIASES", ()))}


@cache
def _variants() -> tuple[tuple[str, str, str, object], ...]:
    """Return the modules that have `VARIANT_OF`, each followed by its three values."""
    declared = sorted(_declarations().items())
    return tuple((module, *values["VARIANT_OF"]) for module, values in declared if "VARIANT_OF" in values)


def architecture_name(name: str, reader: ConfigReader) -> str:
    """Return the module name for an architecture name from a GGUF file or config.json, given this configuration."""
    known = known_architectures()[name]
    for variant, other, key, value in _variants():
        if known == other and reader.value(key) == value:
            return variant
    return known


def text_part(reader: ConfigReader) -> ConfigReader:
    """Return the part of config.json that an architecture reads: for a multimodal model, the part about text."""
    return text_part_of(reader, known_architectures())


def load_architecture(name: str) -> Architecture:
    """Load the module for an architecture name from a GGUF file or config.json.

    Raises ModelLoadError if there is none.
    """
    known = known_architectures()
    if name not in known:
        raise ModelLoadError(f"architecture {name!r:.80} is not supported (docs/models.md lists those that are)")
    return cast(Architecture, importlib.import_module(f"{__name__}.{known[name]}"))


def find_architecture(
    name: str, reader: ConfigReader, read: Callable[[Architecture, ConfigReader], object]
) -> Architecture:
    """Load the module for an architecture name and a configuration.

    read: makes an architecture read the configuration. It is used to find a similar architecture if none has this name.

    Raises ModelLoadError if none does. The message names the most similar supported architecture and the keys that it
    does not know, and the operations that the model needs if they are known.
    """
    if name in known_architectures():
        return load_architecture(architecture_name(name, reader))
    modules = {known: load_architecture(known) for known in sorted(set(known_architectures().values()))}
    near = nearest(name, modules, reader, read)
    found = f"; the nearest supported ones: {near}" if near else ", and no supported one is similar"
    needs = f": it needs {MISSING[name]}" if name in MISSING else ""
    raise ModelLoadError(f"architecture {name!r:.80} is not supported{needs}{found} (docs/models.md lists them all)")


def build_draft_graph(name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Graph | None:
    """Build the unoptimized graph of a model's multi-token-prediction head. Returns None if the model has none.

    Raises the same GraphErrors as `build_graph`.
    """
    module = load_architecture(name)
    if not hasattr(module, "build_draft") or not has_head(cast(DecoderConfig, config), shapes):
        return None
    g = Graph(shapes)
    g.output = module.build_draft(g, config)
    return g


def build_encoder_graph(name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """Build the unoptimized graph of an encoder-decoder model's encoder. Raises GraphError."""
    g = Graph(shapes)
    g.output = cast(Any, load_architecture(name)).build_encoder(g, config)
    return g


def weight_table(architecture: Architecture) -> WeightTable:
    """Return the weight table of a module of this package, or an empty one if it has none."""
    table: WeightTable = getattr(architecture, "WEIGHTS", WeightTable())
    return table


def build_graph(
    name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, classifies: bool = False
) -> Graph:
    """Build the unoptimized graph of a model.

    shapes: the shapes of the checkpoint's weights.
    classifies: the checkpoint has a sequence-classification head.

    Raises GraphError naming the operation, shapes and layer.
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
