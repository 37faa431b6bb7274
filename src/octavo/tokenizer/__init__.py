"""Converts text to token ids and back, renders chat templates, and decodes streams of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ModelLoadError
from octavo.tokenizer.directory_vocab import padded_tokenizer, read_directory_tokenizer
from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.loader.checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer of a checkpoint, from the GGUF file itself or the files next to the safetensors.

    Raises ModelLoadError naming the missing or invalid part.
    """
    if checkpoint.format == "safetensors":
        tokenizer, length = read_directory_tokenizer(checkpoint.path.parent), checkpoint.config.padded_length
        return padded_tokenizer(tokenizer, checkpoint.path.parent, length) if length else tokenizer
    try:
        tokenizer = read_gguf_tokenizer(checkpoint.file.metadata)
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    num_tokens, shapes = tokenizer.vocab_size, checkpoint.weights.shapes
    embedded, output = (shapes.get(f"{name}.weight", (num_tokens,))[0] for name in ("embed_tokens", "lm_head"))
    if embedded != num_tokens or output < num_tokens:
        raise ModelLoadError(
            f"{checkpoint.path}: the embedding has {embedded} rows and the output {output}, but the vocabulary has "
            f"{num_tokens} tokens"
        )
    return tokenizer
