"""Search for the supported architecture most similar to an unsupported one, and for the keys in which they differ."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.errors import ModelLoadError
from octavo.models._reading import ConfigReader

if TYPE_CHECKING:
    from octavo.models import Architecture

# Keys that no graph depends on, by their names or parts of them.
_NEUTRAL = frozenset(
    {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "use_cache", "id2label"}
    | {"label2id", "quantization_config", "tokenizer_class", "pretraining_tp", "return_dict"}
    | {
        "problem_type",
        "chunk_size_feed_forward",
        "vocab_size",
        "name_or_path",
        "base_model_tp_plan",
        "task_specific_params",
    }
)
_NEUTRAL_PARTS = (
    "dropout",
    "pdrop",
    "token_id",
    "initializer",
    "init_",
    "output_",
    "aux_loss",
    "z_loss",
    "jitter",
    "_std",
)
_DEEPSEEK4 = (
    "attention over keys that are averaged over windows of tokens, with an indexer that chooses among them; streams of "
    "hidden states mixed by a doubly stochastic matrix; experts by token id"
)
MISSING: Mapping[str, str] = MappingProxyType({"deepseek_v4": _DEEPSEEK4, "deepseek4": _DEEPSEEK4})
"""The operations that known architectures need and no graph has."""

_SHOWN = 4  # keys; an architecture that lacks more is not similar
_ALIKE = 0.8  # similarity of names
_WIDTH = "intermediate_size"
_BEGINNING = 1  # letters that similar names share at the start


def nearest(
    name: str,
    architectures: Mapping[str, Architecture],
    reader: ConfigReader,
    read: Callable[[Architecture, ConfigReader], object],
) -> str:
    """Describe the most similar of `architectures` in a clause such as `llama, which has no key conv_width`.

    Empty if nothing is similar: no name resembles it, and each architecture refuses the configuration or lacks more
    than `_SHOWN` of its keys.

    reader: the unsupported model's configuration.
    read: makes an architecture read the configuration, and raises ModelLoadError.
    """
    found: list[tuple[int, float, str, list[str]]] = []
    for known, architecture in architectures.items():
        own = ConfigReader(reader.values, reader.prefix)
        try:
            read(architecture, own)
        except (ModelLoadError, ArithmeticError, LookupError, TypeError, ValueError):
            continue
        switches = _switches(reader)
        unread = [key for key in switches if key not in own.keys_read]
        if any(isinstance(reader.values[key], Mapping) for key in unread) or f"{reader.prefix}{_WIDTH}" in unread:
            continue  # it lacks a part of the model, such as an encoder, or the width of the MLP
        if len(unread) == len(switches):
            continue  # all its keys have defaults, so any configuration would do
        likeness = difflib.SequenceMatcher(None, name, known).ratio()
        found.append((len(unread), -likeness, known, unread))
    *_, known, unread = min(found, default=(0, 0.0, "", []))
    if not found or len(unread) > _SHOWN:
        # A name with a different beginning belongs to another family: `glm4` is not related to `xglm`.
        related = [known for known in architectures if known[:_BEGINNING] == name[:_BEGINNING]]
        return next(iter(difflib.get_close_matches(name[:80], related, 1, _ALIKE)), "")
    if not unread:
        return f"{known}, which has all its keys"
    return f"{known}, which has no key {', '.join(key.removeprefix(reader.prefix)[:60] for key in unread)}"


def _switches(reader: ConfigReader) -> list[str]:
    """Return the keys that may change a model, leaving out those that are off or do not affect its graph."""
    return [
        key
        for key, value in reader.values.items()
        if key.startswith(reader.prefix)
        and value is not None
        and value is not False
        and (plain := key.removeprefix(reader.prefix)) not in _NEUTRAL
        and not plain.startswith("_")
        and not any(part in plain for part in _NEUTRAL_PARTS)
    ]
