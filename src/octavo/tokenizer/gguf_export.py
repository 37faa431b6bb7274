"""Writes a vocabulary as GGUF metadata under `tokenizer.ggml.*`, from `tokenizer.json` and its companion files.

Supports byte-level and SentencePiece BPE, and RWKV's vocabulary. The result is read back and must split a set of texts
into the same tokens as the original, so parts of the files that are not converted cannot cause wrong tokens unnoticed.
Source: the GGUF specification, section "Tokenizer".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader.gguf_writer import MetadataValue
from octavo.tokenizer.directory_vocab import configured_eos, named_token_id, read_directory_tokenizer, tokenizer_config
from octavo.tokenizer.gguf_vocab import TokenType, read_gguf_tokenizer
from octavo.tokenizer.pre_tokenizers import GPT2_PATTERN, PRE_TOKENIZERS
from octavo.tokenizer.rwkv_vocab import escaped, is_rwkv
from octavo.tokenizer.template_files import gguf_templates
from octavo.tokenizer.tokenizer import NO_REPLACEMENTS, Tokenizer
from octavo.tokenizer.vocabulary import TokenCoding

logger = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE_FLAGS = ("lstrip", "rstrip", "single_word")
_STOP_KEYS = ("eot", "eom")  # more ids that end an answer, besides `eos`

# Every kind of boundary that pre-tokenizers may treat differently, in composed form.
PROBE_TEXTS = (
    "Hello, world!", " leading", "trailing ", "two  spaces   three    four", "\ttab\t\ttabs", "line\nline\n\nline\r\n",
    " \n \n  x", "it's we'LL I'm they'Ve don't", "1 12 123 1234 12345 3.14159 1,000,000", "x1y22z333",
    "camelCaseWord HTTPServer",
    "def f(x: int) -> str:\n    return f\"{x!r}\"\n", "a_b-c/d\\e|f&g=h+i*j^k~l`m", "(((]]]{{{<<<>>>", "...!!!???;;;",
    "Straße façade naïve Ångström", "Привет, мир! Это — тест.", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界！漢字かなカナ", "안녕하세요 세계",
    "🙂👍🏽👨‍👩‍👧 🇩🇪", "½ ² Ⅷ ①", "\u00a0nbsp\u2003em\u200bzero",
    "https://example.org/a?b=c&d=%20#e", "mixed 中文 and English 123 混合", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "    indented\n        more",
    "\x00\x07\x7f", "ﬁ ligature", "e-mail: first.last@example.com", "$5.00 €7 £9 ¥11 50%", "", " ", "\n",
    "▁ literal ▁▁ marks",
)  # fmt: skip


def gguf_tokenizer(directory: Path, num_tokens: int) -> dict[str, MetadataValue]:
    """Return the keys for the tokenizer next to a safetensors checkpoint, including its chat template.

    num_tokens: rows of the embedding. Ids that the vocabulary lacks become unused tokens.

    Raises ModelLoadError naming the file and the part that a GGUF file cannot express.
    """
    path = directory / "tokenizer.json"
    original = read_directory_tokenizer(directory)
    if original.replacements != NO_REPLACEMENTS:
        logger.warning("%s: the decoder also replaces texts in answers, which GGUF files cannot express", path)
    keys = _rwkv_tokens(original, num_tokens) if is_rwkv(directory) else _tokens(path, original, num_tokens)
    keys |= _named_ids(directory, original, num_tokens)
    keys |= gguf_templates(original.chat_template)
    written = read_gguf_tokenizer(keys)
    if stop_ids := _stop_ids(path, original, written, num_tokens):
        keys |= stop_ids
        written = read_gguf_tokenizer(keys)
    check_same(path, original, written, num_tokens, "as GGUF")
    return keys


def _read(path: Path) -> Mapping[str, Any]:
    """Read a tokenizer.json that the library has already parsed without an error."""
    import msgspec  # imported here because models in one GGUF file do not need it

    form: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    kind = form["model"].get("type", "BPE" if "merges" in form["model"] else None)
    if kind != "BPE":
        raise ModelLoadError(f"{path}: a vocabulary of type {kind!r:.40} cannot be written as GGUF yet; BPE can")
    return form


def _rwkv_tokens(original: Tokenizer, num_tokens: int) -> dict[str, MetadataValue]:
    """Return RWKV's tokens as escaped byte strings."""
    texts = [escaped(original.token_bytes(i)) if text else f"[PAD{i}]" for i, text in enumerate(original.tokens)]
    texts = [*texts[:num_tokens], *(f"[PAD{i}]" for i in range(len(texts), num_tokens))]
    return {_KEY + "model": "rwkv", _KEY + "tokens": texts, _KEY + "token_type": _types(original, texts, None, False)}


def _tokens(path: Path, original: Tokenizer, num_tokens: int) -> dict[str, MetadataValue]:
    form = _read(path)
    if lost := original.tokens[num_tokens:]:
        shown = ", ".join(lost[:5])
        logger.warning("%s: %d tokens without a row in the embedding are left out: %s", path, len(lost), shown)
    for token in form.get("added_tokens", ()):
        if any(token.get(flag) for flag in _SPACE_FLAGS) and token["id"] < num_tokens:
            raise ModelLoadError(
                f"{path}: token {token['content']!r:.60} depends on the text around it, which GGUF files cannot express"
            )
    texts = [text or f"[PAD{i}]" for i, text in enumerate(original.tokens[:num_tokens])]
    texts += [f"[PAD{i}]" for i in range(len(texts), num_tokens)]
    is_scored = original.coding is TokenCoding.SENTENCEPIECE
    types = _types(original, texts, form["model"].get("unk_token"), is_scored)
    keys: dict[str, MetadataValue] = {_KEY + "model": "llama" if is_scored else "gpt2", _KEY + "tokens": texts}
    keys[_KEY + "token_type"] = types
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in form["model"]["merges"]]
    if is_scored:
        keys[_KEY + "scores"] = _scores(texts, types, merges)
        keys[_KEY + "add_space_prefix"] = original.strip_leading_space
    else:
        keys[_KEY + "pre"] = _pre_tokenizer(path, form)
        keys[_KEY + "merges"] = merges
    return keys


def _types(original: Tokenizer, texts: Sequence[str], unknown: str | None, is_scored: bool) -> NDArray[np.int32]:
    types = np.full(len(texts), TokenType.NORMAL, np.int32)
    for i, text in enumerate(texts):
        if i >= len(original.tokens) or not original.tokens[i]:
            types[i] = TokenType.UNUSED
        elif is_scored and text == unknown:
            types[i] = TokenType.UNKNOWN
        elif i in original.special_token_ids:
            types[i] = TokenType.CONTROL
        elif i in original.literal_ids:
            types[i] = TokenType.USER_DEFINED
        elif is_scored and _BYTE_TOKEN.fullmatch(text):
            types[i] = TokenType.BYTE
    return types


def _scores(texts: Sequence[str], types: NDArray[np.int32], merges: Sequence[str]) -> NDArray[np.float32]:
    """Return each token's score, so that SentencePiece joins pieces in the order of the merges.

    It is minus the rank of the first merge that makes the token. Tokens that no merge makes come last.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    last = len(merges)
    is_normal = types == TokenType.NORMAL
    return np.array([-ranks.get(t, last) if n else 0 for t, n in zip(texts, is_normal, strict=True)], np.float32)


def _pre_tokenizer(path: Path, form: Mapping[str, Any]) -> str:
    """Return the name of the pre-tokenizer with the same patterns as the file, in order."""
    normalizer = form.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # readers of GGUF files do not normalize
        raise ModelLoadError(f"{path}: GGUF files have no key for the normalizer {normalizer.get('type')!r:.40}")
    patterns = tuple(_patterns(path, form.get("pre_tokenizer")))
    ignores = bool(form["model"].get("ignore_merges", False))
    for name, kind in PRE_TOKENIZERS.items():
        if kind.patterns == patterns and kind.ignore_merges == ignores:
            return name
    shown = " then ".join(map(repr, patterns))
    raise ModelLoadError(f"{path}: no pre-tokenizer of GGUF files splits by {shown:.300} (ignore_merges: {ignores})")


def _patterns(path: Path, step: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the patterns of a pre-tokenizer. Each splits the pieces that the previous one left."""
    match (step or {}).get("type"), step or {}:
        case "Sequence", {"pretokenizers": inner}:
            for part in inner:
                yield from _patterns(path, part)
        case "Split", {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            yield pattern
        case "Split", {"pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}:
            yield pattern
        case "Digits", {"individual_digits": individual}:
            yield r"\p{N}" if individual else r"\p{N}+"
        case "ByteLevel", {"add_prefix_space": False, "use_regex": False}:
            pass
        case "ByteLevel", {"add_prefix_space": False}:
            yield GPT2_PATTERN
        case kind, _:
            raise ModelLoadError(f"{path}: GGUF files have no name for this use of the pre-tokenizer {kind!r:.40}")


def _named_ids(directory: Path, original: Tokenizer, num_tokens: int) -> dict[str, MetadataValue]:
    """Return the metadata of the special tokens: their ids, and whether bos and eos are added around a text."""
    config = tokenizer_config(directory)
    vocab = {text: i for i, text in enumerate(original.tokens[:num_tokens]) if text}
    names = {"eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {key: named_token_id(directory, config, name, vocab) for key, name in names.items()}
    ids["bos"] = original.bos_token_id
    if ids["eos"] is None:
        ids["eos"] = next(iter(configured_eos(directory, num_tokens)), None)
    for what, found, key in (("before", original.prefix_ids, "bos"), ("after", original.suffix_ids, "eos")):
        if found and found != (ids[key],):
            raise ModelLoadError(f"{directory}: the tokenizer puts ids {list(found)} {what} a text, not only its {key}")
    keys: dict[str, MetadataValue] = {f"{_KEY}{key}_token_id": i for key, i in ids.items() if i is not None}
    keys[_KEY + "add_bos_token"] = bool(original.prefix_ids)
    keys[_KEY + "add_eos_token"] = bool(original.suffix_ids)
    return keys


def _stop_ids(path: Path, original: Tokenizer, written: Tokenizer, num_tokens: int) -> dict[str, MetadataValue]:
    """Return the keys for ids that end an answer but that a reader would not recognize by their tokens' names."""
    missing = sorted(i for i in original.eos_token_ids - written.eos_token_ids if i < num_tokens)
    if len(missing) > len(_STOP_KEYS):
        raise ModelLoadError(
            f"{path}: {len(missing)} more ids besides eos_token end an answer, {missing}; GGUF files have only "
            f"{len(_STOP_KEYS)} keys for them"
        )
    return {f"{_KEY}{key}_token_id": i for key, i in zip(_STOP_KEYS, missing, strict=False)}


def check_same(path: Path, original: Tokenizer, written: Tokenizer, num_tokens: int, where: str) -> None:
    """Raise ModelLoadError if a token has other bytes or a test text has other tokens in the written vocabulary.

    where: description of the written file
    """
    for i in range(min(num_tokens, original.vocab_size)):
        if original.tokens[i] and original.token_bytes(i) != written.token_bytes(i):
            raise ModelLoadError(f"{path}: token {i}, {original.tokens[i]!r:.60}, would have other bytes {where}")
    special = [original.tokens[i] for i in sorted(original.special_token_ids) if i < num_tokens]
    texts = (*PROBE_TEXTS, "".join(PROBE_TEXTS), "a".join(special), *special[:64])
    for text in texts:
        for parse in (False, True):
            before, after = (t.encode(text, parse_special=parse) for t in (original, written))
            if before != after:
                raise ModelLoadError(
                    f"{path}: {where}, {text!r:.60} would have other tokens: {after[:8]}, not {before[:8]}"
                )
