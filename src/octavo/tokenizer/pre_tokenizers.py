"""The ways in which byte-level BPE vocabularies split text into words, by their names in GGUF files.

Source: the `pre_tokenizer` entries of the published `tokenizer.json` files, and the names that llama.cpp's converter
    writes as `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass

from octavo.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)


def _cased_words(suffix: str) -> str:
    """Return a pattern for capitals followed by small letters and optionally `suffix`, so that camelCase is split."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"


_GPT4O = rf"{_cased_words(_CONTRACTION + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_TEKKEN = rf"{_cased_words('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_KANA_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_HAN_HANGUL = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A way to split text. Each pattern splits the pieces that the previous one left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word in the vocabulary is one token, regardless of merges
    add_bos: bool = False  # if the file does not specify it


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Each splitting pattern with its names.
_KINDS = {
    ("default",): _DEFAULT,
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    (
        "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
        "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "roberta-bpe",
    ): PreTokenizer((GPT2_PATTERN,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): PreTokenizer(
        (r"\p{N}", GPT2_PATTERN)
    ),
    (
        "qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2",
    ): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,)),
    ("deepseek-llm",): PreTokenizer((
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7FF}]]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _HAN_HANGUL,
        r"\p{N}+",
    )),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer((r"\p{N}{1,3}", _KANA_HAN, _DEEPSEEK3)),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    ("bloom", "gpt3-finnish", "poro-chat"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM, r"\p{N}")),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"): PreTokenizer((_GPT4O,)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((_BAILING,)),
    ("seed-coder",): PreTokenizer((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",
    )),
}  # fmt: skip

PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names}


def get_pre_tokenizer(name: str | None) -> PreTokenizer:
    """Return the pre-tokenizer with this name, or the default one for None, as in files from before April 2024.

    Raises ModelLoadError for an unknown name and suggests the nearest one. A wrong pre-tokenizer would cause no error:
    the text would look right, but the model would answer badly.
    """
    if name is None:
        logger.warning("the file names no pre-tokenizer (tokenizer.ggml.pre): the default one is used")
        return _DEFAULT
    known = PRE_TOKENIZERS.get(name)
    if known is None:
        nearest = difflib.get_close_matches(name, PRE_TOKENIZERS, n=1, cutoff=0)
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {name!r:.80}, a pre-tokenizer that Octavo does not support; "
            f"the nearest is {nearest[0]!r}"
        )
    return known
