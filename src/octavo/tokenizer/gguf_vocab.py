"""Reads a vocabulary from the metadata of a GGUF file, and checks every array and id.

Source: the GGUF specification, section "Tokenizer", and the token types of the SentencePiece model proto.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import repeat
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.errors import ModelLoadError
from octavo.tokenizer import rwkv_vocab
from octavo.tokenizer.pre_tokenizers import get_pre_tokenizer
from octavo.tokenizer.score_merges import ScoreMerges
from octavo.tokenizer.template_files import read_gguf_templates
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import (
    MAX_TOKENS,
    UNREACHABLE,
    TokenCoding,
    build_pair,
    end_of_turn_ids,
    library_errors_as,
)

logger = logging.getLogger(__name__)

MAX_TOKEN_CHARS = 1 << 11
MAX_MERGES = 1 << 21
MAX_MERGE_WORK = 1 << 28  # Gemma's 262,144 tokens need the most among published vocabularies, 2^24

_KEY = "tokenizer.ggml."
_NAMED_IDS = ("bos", "eos", "eot", "eom", "unknown")
# Models whose mask token takes the white space before it.
_MASKING_PRE = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_MASKING_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3", "modern-bert")
MAX_WORD_CHARS = 100  # longest word that WordPiece splits; a longer one is unknown, as in BERT
# BERT's tokens: their texts and their keys. The specification misspells the separator's key.
_BERT_TOKENS = {
    "cls": ("[CLS]", "cls", "bos"),
    "sep": ("[SEP]", "seperator", "eos"),
    "unknown": ("[UNK]", "unknown"),
}
# llama.cpp recognizes RWKV's turns by the name of their template. This is that template.
_RWKV_TEMPLATE_NAME = "rwkv-world"
_RWKV_TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'User', 'assistant': 'Assistant'}.get(message['role'], 'System') }}: "
    "{{ message['content'] | trim }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_TOKEN_NAMES = {f"{name}_token": name for name in ("bos", "eos", "cls", "mask")}
_TOKEN_NAMES |= {"unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding"}
# Values of `tokenizer.ggml.token_type`, from 1.
TokenType = IntEnum("TokenType", ["NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The token arrays of the file. V = number of tokens."""

    texts: list[str]  # [V]
    vocab: dict[str, int]
    types: NDArray[np.int64]  # [V]; empty means all normal
    ids: Mapping[str, int]  # by "bos", "eos", ...

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Return the tokens of these types, text -> id, ordered by id."""
        found = np.flatnonzero(np.isin(self.types, types))
        return {self.texts[i]: int(i) for i in found}


def read_gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer. Raises ModelLoadError naming the key and the problem."""
    kind = _string(metadata, _KEY + "model")
    if kind is None or kind not in READERS:
        nearest = difflib.get_close_matches(str(kind), READERS, n=1, cutoff=0)[0]
        raise ModelLoadError(
            f"{_KEY}model is {_shown(kind)}; Octavo supports {', '.join(READERS)}; the nearest is {nearest!r}"
        )
    return READERS[kind](metadata, _read_tokens(metadata))


def _wordpiece(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    """Build BERT's vocabulary.

    In GGUF files, tokens that begin a word start with U+2581. BERT's own files mark all other tokens instead, with
    `##`.
    """
    control = frozenset(tokens.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED).values())
    named = {name: _special_id(metadata, tokens, *keys) for name, keys in _BERT_TOKENS.items()}
    literal = control | frozenset(named.values())
    texts = [text if i in literal else _original_piece(text) for i, text in enumerate(tokens.texts)]
    vocab = dict(zip(reversed(texts), reversed(range(len(texts))), strict=True))
    # A vocabulary without capitals was trained on text without them.
    is_lower = not any(text != text.lower() for i, text in enumerate(texts) if i not in literal)
    model = models.WordPiece(vocab, unk_token=texts[named["unknown"]], max_input_chars_per_word=MAX_WORD_CHARS)
    plain, special = build_pair(
        model,
        normalizers.BertNormalizer(lowercase=is_lower),
        pre_tokenizers.BertPreTokenizer(),
        [],
        [AddedToken(texts[i], normalized=False, special=True) for i in sorted(literal)],
    )
    return Tokenizer(
        plain=plain,
        special=special,
        tokens=texts,
        coding=TokenCoding.WORDPIECE,
        literal_ids=literal,
        special_token_ids=literal,
        prefix_ids=(named["cls"],),
        suffix_ids=(named["sep"],),
        strip_leading_space=True,
        bos_token_id=named["cls"],
        eos_token_ids=frozenset({named["sep"]}),
        chat_template=None,
        separator_ids=(named["sep"],),
        marks_second=True,
        special_tokens=_special_tokens(metadata, tokens),
    )


def _special_tokens(metadata: Mapping[str, object], tokens: _Tokens) -> dict[str, str]:
    """Return the texts of the tokens that the file names, under the names of tokenizer_config.json."""
    ids = {name: metadata.get(f"{_KEY}{key}_token_id") for name, key in _TOKEN_NAMES.items()}
    return {name: tokens.texts[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens.texts)}


def _special_id(metadata: Mapping[str, object], tokens: _Tokens, text: str, *keys: str) -> int:
    """Return the id under one of the keys, or the id of the token with this text."""
    for key in keys:
        value = metadata.get(f"{_KEY}{key}_token_id")
        if value is not None and _is_reachable(value, f"{_KEY}{key}_token_id", len(tokens.texts)):
            return value
    if text not in tokens.vocab:
        raise ModelLoadError(f"{_KEY}{keys[0]}_token_id is missing, and so is the token {text}")
    return tokens.vocab[text]


def _original_piece(text: str) -> str:
    return text[1:] if text.startswith("▁") else f"##{text}"


def _unigram(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    """Build a vocabulary with SentencePiece's unigram model, used by XLM-RoBERTa and T5. Kudo, arXiv 1804.10959."""
    scores = _scores(metadata, len(tokens.texts))
    unknown = tokens.ids.get("unknown", next(iter(tokens.of_type(TokenType.UNKNOWN).values()), None))
    if unknown is None:
        raise ModelLoadError(f"{_KEY}unknown_token_id is missing, and no token is of the type unknown")
    with library_errors_as(ModelLoadError, f"{_KEY}tokens cannot be read"):
        model = models.Unigram(list(zip(tokens.texts, scores.tolist(), strict=True)), unknown, False)
    steps = [*_charsmap(metadata), normalizers.Replace(Regex(" {2,}"), " ")]
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    coding = TokenCoding.SENTENCEPIECE
    tokenizer = _finish(metadata, tokens, coding, model, normalizers.Sequence(steps), words, False)
    return replace(tokenizer, separator_ids=tokenizer.suffix_ids * 2)


def _longest_match(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    unused = set(tokens.of_type(TokenType.UNUSED).values())
    data = [b"" if i in unused else rwkv_vocab.unescaped(text) for i, text in enumerate(tokens.texts)]
    template = read_gguf_templates(metadata)
    if template is not None and template.default == _RWKV_TEMPLATE_NAME:
        template = TemplateSet.of({"default": _RWKV_TEMPLATE})
    return rwkv_vocab.rwkv_tokenizer(f"{_KEY}tokens", data, tokens.texts[0], template)


def _byte_level(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    kind = get_pre_tokenizer(_string(metadata, _KEY + "pre"))
    model = _merging_model(metadata, tokens, ignore_merges=kind.ignore_merges)
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _finish(metadata, tokens, TokenCoding.BYTE_LEVEL, model, None, pre_tokenizer, kind.add_bos)


def _merging_model(metadata: Mapping[str, object], tokens: _Tokens, **options: Any) -> models.BPE:
    """Return a byte-pair encoding with the file's merges.

    options: options of `models.BPE`
    """
    merges = _without_control(_strings(metadata, "merges", MAX_MERGES), tokens.of_type(TokenType.CONTROL))
    pairs = _split_merges(merges)
    try:
        with library_errors_as(ModelLoadError, f"{_KEY}merges cannot be read"):
            return models.BPE(tokens.vocab, pairs, **options)
    except ModelLoadError:
        for i, pair in enumerate(pairs):
            if missing := [token for token in (*pair, "".join(pair)) if token not in tokens.vocab]:
                what = f"entry {i}, {' '.join(pair)!r:.80}: {missing[0]!r:.80}"
                raise ModelLoadError(f"{_KEY}merges: {what} is not in the vocabulary") from None
        raise


def _sentencepiece_merges(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    """Build Gemma 4's vocabulary: SentencePiece's tokens, joined by the merges of the file.

    Runs of newlines are words of their own, and a run that is a token stays whole. Source: llama.cpp, the tokenizer
    model `gemma4`.
    """
    fallback = _byte_fallback(tokens)
    model = _merging_model(metadata, tokens, **fallback)
    runs = [text for text in tokens.vocab if text.strip("\n") == ""]
    if any(len(model.tokenize(run)) > 1 for run in runs):
        # The library can keep either all words that are tokens whole, or none. Other such words are rare: whole lines.
        model.ignore_merges = True
    lines = pre_tokenizers.Split(Regex("[^\n]+|\n+"), "isolated")
    spaces = normalizers.Replace(" ", "▁")
    metadata = {key: value for key, value in metadata.items() if key != _KEY + "add_bos_token"}
    metadata[_KEY + "add_space_prefix"] = False
    return _finish(metadata, tokens, TokenCoding.SENTENCEPIECE, model, spaces, lines, True)


def _byte_fallback(tokens: _Tokens) -> dict[str, Any]:
    """Return the options of `models.BPE` for characters without a token: use their bytes, or the unknown token."""
    unknown = tokens.ids.get("unknown")
    has_bytes = all(f"<0x{b:02X}>" in tokens.vocab for b in range(256))
    if unknown is None and not has_bytes:
        raise ModelLoadError(
            f"{_KEY}unknown_token_id is missing, and so are some of the 256 byte tokens <0x00> to <0xFF>"
        )
    text = None if unknown is None else tokens.texts[unknown]
    return {"unk_token": text, "fuse_unk": True, "byte_fallback": has_bytes}


def _sentencepiece(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    if _KEY + "scores" in metadata:
        scores = _scores(metadata, len(tokens.texts))
    else:
        logger.warning("%sscores is missing: the leftmost pieces of a text are joined first", _KEY)
        scores = np.zeros(len(tokens.texts))
    merges = _merges_from_scores(tokens, scores)
    joiner = _joiner(tokens, scores, merges)
    model = models.BPE(tokens.vocab, [] if joiner is not None else merges, **_byte_fallback(tokens))
    normalizer = _sentencepiece_normalizer(metadata)
    tokenizer = _finish(metadata, tokens, TokenCoding.SENTENCEPIECE, model, normalizer, None, True)
    return tokenizer if joiner is None else replace(tokenizer, joiner=joiner)


def _scores(metadata: Mapping[str, object], num_tokens: int) -> NDArray[np.float64]:
    scores = _numbers(metadata, "scores", num_tokens, "if").astype(np.float64)
    if not np.isfinite(scores).all():
        raise ModelLoadError(f"{_KEY}scores: entry {int(np.flatnonzero(~np.isfinite(scores))[0])} is not a number")
    return scores


def _joiner(tokens: _Tokens, scores: NDArray[np.float64], merges: Sequence[tuple[str, str]]) -> ScoreMerges | None:
    """Return the joiner that makes the merges by score, or None if no two joined pieces have the same score.

    Without such ties, an ordinary byte-pair encoding gives the same result.
    """
    user = tokens.of_type(TokenType.USER_DEFINED)  # found in the text before any merge
    pairs = [(left, right) for left, right in merges if not {left, right, left + right} & user.keys()]
    joined = [tokens.vocab[piece] for piece in {left + right for left, right in pairs}]
    if len(np.unique(scores[joined])) == len(joined):
        return None
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for left, right in pairs:
        piece = tokens.vocab[left + right]
        found[tokens.vocab[left], tokens.vocab[right]] = float(scores[piece]), piece
    return ScoreMerges(found)


def _sentencepiece_normalizer(metadata: Mapping[str, object]) -> normalizers.Normalizer:
    steps = _charsmap(metadata)
    remove_extra = _bool(metadata, _KEY + "remove_extra_whitespaces", False)
    if remove_extra:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A "), "")]
    if _bool(metadata, _KEY + "add_space_prefix", True):
        steps.append(normalizers.Prepend("▁"))
    steps.append(normalizers.Replace(" ", "▁"))
    if remove_extra:
        steps.append(normalizers.Replace(Regex(r"▁+\z"), ""))
    return normalizers.Sequence(steps)


def _charsmap(metadata: Mapping[str, object]) -> list[normalizers.Normalizer]:
    """Return the normalizer for the file's replacement table, if it has one."""
    steps: list[normalizers.Normalizer] = []
    if (charsmap := metadata.get(_KEY + "precompiled_charsmap")) is not None:
        with library_errors_as(ModelLoadError, f"{_KEY}precompiled_charsmap cannot be read"):
            steps.append(normalizers.Precompiled(np.asarray(charsmap, np.uint8).tobytes()))
            steps[0].normalize_str("a ﬁ ①")  # a damaged table fails only when used
    return steps


def _finish(
    metadata: Mapping[str, object],
    tokens: _Tokens,
    coding: TokenCoding,
    model: models.Model,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    add_bos_default: bool,
) -> Tokenizer:
    control = tokens.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    user = tokens.of_type(TokenType.USER_DEFINED)
    spaces = _space_takers(metadata, [*user, *control])
    plain, special = build_pair(
        model,
        normalizer,
        pre_tokenizer,
        [AddedToken(text, normalized=False, **spaces.get(text, {})) for text in user],
        [AddedToken(text, normalized=False, special=True, **spaces.get(text, {})) for text in control],
    )
    bos, eos = tokens.ids.get("bos"), tokens.ids.get("eos")
    add_bos = _bool(metadata, _KEY + "add_bos_token", add_bos_default)
    add_eos = _bool(metadata, _KEY + "add_eos_token", False)
    if add_eos and eos is None and _KEY + "eos_token_id" not in metadata:
        raise ModelLoadError(f"{_KEY}add_eos_token is true, but {_KEY}eos_token_id is missing")
    if add_bos and bos is None and _KEY + "add_bos_token" in metadata and _KEY + "bos_token_id" not in metadata:
        raise ModelLoadError(f"{_KEY}add_bos_token is true, but {_KEY}bos_token_id is missing")
    return Tokenizer(
        plain=plain,
        special=special,
        tokens=tokens.texts,
        coding=coding,
        literal_ids=frozenset(control.values()) | frozenset(user.values()),
        special_token_ids=frozenset(control.values()),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if add_eos and eos is not None else (),
        strip_leading_space=coding is TokenCoding.SENTENCEPIECE and _bool(metadata, _KEY + "add_space_prefix", True),
        bos_token_id=bos,
        eos_token_ids=end_of_turn_ids(
            {**user, **control}, [tokens.ids[n] for n in ("eos", "eot", "eom") if n in tokens.ids]
        ),
        chat_template=read_gguf_templates(metadata),
        special_tokens=_special_tokens(metadata, tokens),
    )


def _space_takers(metadata: Mapping[str, object], special: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return the options of tokens that take adjacent white space.

    GGUF files cannot express this, so models with such tokens are recognized by name. Source: llama.cpp, the end of
    `llama_vocab::impl::load`.
    """
    name, architecture = (str(metadata.get(f"general.{key}", "")).lower() for key in ("name", "architecture"))
    if metadata.get(_KEY + "pre") in _MASKING_PRE or architecture in _MASKING_ARCHITECTURES:
        return {"<mask>": {"lstrip": True}, "[MASK]": {"lstrip": True}}
    if "phi-3" in name or "phi3" in name:
        return {text: {"rstrip": True} for text in special if text not in ("<unk>", "<s>", "<|endoftext|>")}
    return {}


def _read_tokens(metadata: Mapping[str, object]) -> _Tokens:
    texts = _strings(metadata, "tokens", MAX_TOKENS)
    if not texts:
        raise ModelLoadError(f"{_KEY}tokens is empty")
    if max(map(len, texts)) > MAX_TOKEN_CHARS:
        i = next(i for i, text in enumerate(texts) if len(text) > MAX_TOKEN_CHARS)
        raise ModelLoadError(f"{_KEY}tokens: token {i} has {len(texts[i])} characters; the limit is {MAX_TOKEN_CHARS}")
    # The first of two equal tokens counts, because the merges were learnt with it.
    vocab = dict(zip(reversed(texts), reversed(range(len(texts))), strict=True))
    types = np.empty(0, np.int64)
    if _KEY + "token_type" in metadata:
        types = _numbers(metadata, "token_type", len(texts), "iu").astype(np.int64)
    return _Tokens(texts, vocab, types, _named_ids(metadata, types, len(texts)))


def _named_ids(metadata: Mapping[str, object], types: np.ndarray, num_tokens: int) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name in _NAMED_IDS:
        key = f"{_KEY}{name}_token_id"
        if key not in metadata:
            continue
        if _is_reachable(value := metadata[key], key, num_tokens):
            ids[name] = value
    if metadata[_KEY + "model"] not in ("gpt2", "gemma4"):
        # SentencePiece's ids for these tokens, for files that leave them out.
        kinds = {"unknown": TokenType.UNKNOWN, "bos": TokenType.CONTROL, "eos": TokenType.CONTROL}
        for i, (name, kind) in enumerate(kinds.items()):
            if i < len(types) and types[i] == kind:
                ids.setdefault(name, i)
    return ids


def _is_reachable(value: object, key: str, num_tokens: int) -> TypeGuard[int]:
    """Return True if the id is in the vocabulary.

    An id beyond the vocabulary, often 2^32 - 1 for "none", is logged. Raises ModelLoadError for a value that is no id.
    """
    if type(value) is not int:
        raise ModelLoadError(f"{key} is {_shown(value)}; the vocabulary has ids 0 to {num_tokens - 1}")
    if not 0 <= value < num_tokens:
        logger.warning(UNREACHABLE, "the file", key, value, num_tokens)
    return 0 <= value < num_tokens


def _without_control(merges: list[str], control: Mapping[str, int]) -> list[str]:
    """Leave out merges whose result is a control token, because they would turn ordinary text into that token."""
    making = {f"{token[:cut]} {token[cut:]}" for token in control for cut in range(1, len(token))}.intersection(merges)
    return [merge for merge in merges if merge not in making] if making else merges


def _split_merges(merges: list[str]) -> list[tuple[str, str]]:
    if not set(map(str.count, merges, repeat(" "))) <= {1}:
        i = next(i for i, merge in enumerate(merges) if merge.count(" ") != 1)
        raise ModelLoadError(f"{_KEY}merges: entry {i}, {merges[i]!r:.80}, is not two tokens with one space between")
    # A single split is several times faster than one for each of 150,000 merges.
    halves = " ".join(merges).split(" ") if merges else []
    return list(zip(halves[::2], halves[1::2], strict=True))


def _merges_from_scores(tokens: _Tokens, scores: NDArray[np.float64]) -> list[tuple[str, str]]:
    """Convert SentencePiece's scores to the merges of a byte-pair encoding, in order of priority.

    scores: [V]

    SentencePiece repeatedly joins the two neighbours whose joined piece has the highest score, leftmost first. That is
    byte-pair encoding with a merge for every way to split every piece in two, ranked by the piece's score. Among equal
    scores the longer piece comes first, then the longer left half, so that a run of the same character grows from the
    left as it does in SentencePiece.

    Raises ModelLoadError for tokens so long that splitting them would take seconds. Source: Kudo and Richardson,
    "SentencePiece" (2018), and its `bpe_model.cc`.
    """
    texts, vocab = tokens.texts, tokens.vocab
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if (work := int((lengths**2).sum())) > MAX_MERGE_WORK:
        raise ModelLoadError(
            f"the tokens are too long in total: their squared lengths add up to {work}; the limit is {MAX_MERGE_WORK}"
        )
    unmerged = tokens.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE, TokenType.UNUSED)
    merges: list[tuple[str, str]] = []
    for i in np.lexsort((-lengths, -scores)):
        piece = texts[i]
        if piece in unmerged:
            continue
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in vocab:
                right = piece[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges


def _strings(metadata: Mapping[str, object], name: str, limit: int) -> list[str]:
    value = metadata.get(_KEY + name)
    if not isinstance(value, list) or not all(map(str.__instancecheck__, value)):
        raise ModelLoadError(f"{_KEY}{name} is {_shown(value)}; it must be a list of strings")
    if len(value) > limit:
        raise ModelLoadError(f"{_KEY}{name} has {len(value)} entries; the limit is {limit}")
    return value


def _numbers(metadata: Mapping[str, object], name: str, length: int, kinds: str) -> NDArray[Any]:
    """Return the array `name`, which must have one entry per token.

    kinds: the allowed `dtype.kind` letters
    """
    value = metadata.get(_KEY + name)
    array = np.asarray(value) if isinstance(value, (list, np.ndarray)) else np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ModelLoadError(f"{_KEY}{name} is {_shown(value)}; it must be a list of numbers")
    if len(array) != length:
        raise ModelLoadError(f"{_KEY}{name} has {len(array)} entries, the vocabulary {length} tokens")
    return array


def _bool(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key} is {_shown(value)}; it must be true or false")
    return value


def _string(metadata: Mapping[str, object], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{key} is {_shown(value)}; it must be a string")
    return value


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.60} ({type(value).__name__})"


READERS: Mapping[str, Callable[[Mapping[str, object], _Tokens], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece_merges,
    "bert": _wordpiece,
    "t5": _unigram,
    "rwkv": _longest_match,
}
"""`tokenizer.ggml.model` -> reader of the vocabulary."""
