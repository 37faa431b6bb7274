"""Text to token ids and back: vocabularies, chat templates, streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.loader.checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint, from the GGUF file itself or from the files beside the safetensors.

    Raises ModelLoadError naming the missing or invalid part.
    """
    if checkpoint.format == "gguf":
        return read_gguf_tokenizer(checkpoint.metadata)
    return read_directory_tokenizer(checkpoint.directory)
