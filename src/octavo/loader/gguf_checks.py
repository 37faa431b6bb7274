"""Checks of GGUF metadata that hold for every architecture, made before anything relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octavo.errors import ModelLoadError

MAX_ARCHITECTURE_CHARACTERS = 64
MAX_CHAT_TEMPLATE_CHARACTERS = 1 << 20

# The padding id is not among them: nothing reads it, and older files put 2^32 - 1 there for "none".
_SPECIAL_IDS = ("bos", "eos", "unknown", "eot", "eom")


def check_metadata(path: Path, metadata: Mapping[str, object]) -> None:
    """Checks architecture and chat template: presence, type and size."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ARCHITECTURE_CHARACTERS:
        shown = "missing" if name is None else f"{name!r:.40}"
        raise ModelLoadError(
            f"{path}: general.architecture is {shown}; a name of at most {MAX_ARCHITECTURE_CHARACTERS} characters "
            "is needed"
        )
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ModelLoadError(f"{path}: tokenizer.chat_template is of type {type(template).__name__}, not a string")
    if len(template) > MAX_CHAT_TEMPLATE_CHARACTERS:
        raise ModelLoadError(
            f"{path}: tokenizer.chat_template has {len(template)} characters, the limit is "
            f"{MAX_CHAT_TEMPLATE_CHARACTERS}"
        )


def check_vocabulary(path: Path, metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that the vocabulary is consistent in itself and with the weights of `shapes` (by checkpoint name)."""
    if "tokenizer.ggml.tokens" not in metadata:
        return
    tokens = metadata["tokenizer.ggml.tokens"]
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{path}: tokenizer.ggml.tokens is {tokens!r:.40}; a list of strings is needed")
    _check_list(path, metadata, "tokenizer.ggml.scores", len(tokens), "f")
    _check_list(path, metadata, "tokenizer.ggml.token_type", len(tokens), "iu")
    if not isinstance(metadata.get("tokenizer.ggml.merges", []), list):
        raise ModelLoadError(f"{path}: tokenizer.ggml.merges is not a list of strings")
    for special in _SPECIAL_IDS:
        key = f"tokenizer.ggml.{special}_token_id"
        token_id = metadata.get(key, 0)
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"{path}: {key} is {token_id!r:.40}; it must be an id from 0 to {len(tokens) - 1}")
    rows = shapes.get("embed_tokens.weight", (len(tokens),))[0]
    if rows != len(tokens):
        raise ModelLoadError(f"{path}: the embedding has {rows} rows, but the vocabulary has {len(tokens)} tokens")
    rows = shapes.get("lm_head.weight", (len(tokens),))[0]
    if rows < len(tokens):
        raise ModelLoadError(f"{path}: the output has {rows} rows, but the vocabulary has {len(tokens)} tokens")


def _check_list(path: Path, metadata: Mapping[str, object], key: str, length: int, kinds: str) -> None:
    """Checks that the array of numbers under `key`, if present, has one item per token. kinds: `dtype.kind` letters."""
    if key not in metadata:
        return
    items = metadata[key]
    if not isinstance(items, np.ndarray) or items.dtype.kind not in kinds:
        found = items.dtype.name if isinstance(items, np.ndarray) else type(items).__name__
        wanted = "floats" if kinds == "f" else "integers"
        raise ModelLoadError(f"{path}: {key} is of type {found}; an array of {wanted} is needed")
    if len(items) != length:
        raise ModelLoadError(f"{path}: {key} has {len(items)} items, but the vocabulary has {length} tokens")
