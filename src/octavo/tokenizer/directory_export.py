"""Writes a vocabulary from a GGUF file as `tokenizer.json` and its companion files, for transformers to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, processors

from octavo.errors import ModelLoadError
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.gguf_export import check_same
from octavo.tokenizer.template_files import template_files
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import TokenCoding


def tokenizer_files(original: Tokenizer, max_length: int) -> dict[str, str]:
    """Return the content of `tokenizer.json`, `tokenizer_config.json` and the chat templates, by path.

    max_length: maximum number of tokens in a sequence

    Raises ModelLoadError for a vocabulary other than BPE.
    """
    if original.coding is TokenCoding.WORDPIECE or not isinstance(original.plain.model, tokenizers.models.BPE):
        raise ModelLoadError("only vocabularies of type BPE can be written as tokenizer.json yet")
    if original.joiner is not None:
        raise ModelLoadError("tokenizer.json ranks its merges and cannot express pieces with equal scores")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(original.prefix_ids),
        "add_eos_token": bool(original.suffix_ids),
    }
    if original.bos_token_id is not None:
        config["bos_token"] = original.tokens[original.bos_token_id]
    if original.eos_token_ids:
        config["eos_token"] = original.tokens[main_eos(original)]
    files = {"tokenizer.json": _whole(original).to_str(pretty=True)}
    files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return files | template_files(original.chat_template)


def main_eos(tokenizer: Tokenizer) -> int:
    """Return the id that ends an answer.

    If there are several, it is the id that is added at the end of every text or, if there is none, the highest id.
    """
    return tokenizer.suffix_ids[-1] if tokenizer.suffix_ids else max(tokenizer.eos_token_ids)


def check_files(folder: Path, original: Tokenizer) -> None:
    """Read the files back. Raises ModelLoadError if a token, a text or an id has changed."""
    written = read_directory_tokenizer(folder)
    check_same(folder / "tokenizer.json", original, written, original.vocab_size, "in tokenizer.json")
    for name in ("bos_token_id", "eos_token_ids", "prefix_ids", "suffix_ids", "special_token_ids", "chat_template"):
        before, after = getattr(original, name), getattr(written, name)
        if before != after:
            raise ModelLoadError(f"{folder}: the tokenizer's {name} would change from {before!r:.80} to {after!r:.80}")


def _whole(original: Tokenizer) -> tokenizers.Tokenizer:
    """Return a single tokenizer that encodes and decodes, has all added tokens, and adds BOS and EOS."""
    whole = tokenizers.Tokenizer.from_str(original.plain.to_str())
    special = [original.tokens[i] for i in sorted(original.special_token_ids)]
    whole.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    if original.coding is TokenCoding.BYTE_LEVEL:
        whole.decoder = decoders.ByteLevel()
    else:
        strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if original.strip_leading_space else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        whole.decoder = decoders.Sequence(steps)
    before, after = ([original.tokens[i] for i in ids] for ids in (original.prefix_ids, original.suffix_ids))
    if before or after:
        used = {original.tokens[i]: i for i in (*original.prefix_ids, *original.suffix_ids)}
        single, pair = [*before, "$A", *after], [*before, "$A", *after, *before, "$B:1", *after]
        whole.post_processor = processors.TemplateProcessing(single, pair, list(used.items()))
    return whole
