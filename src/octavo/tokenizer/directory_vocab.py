"""Reads a vocabulary from `tokenizer.json`, `tiktoken.model` or RWKV's file, and its small companion files.

Source: the serialization of the `tokenizers` library, and the files that transformers' `save_pretrained` writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from octavo.errors import ModelLoadError
from octavo.loader.json_file import read_optional
from octavo.tokenizer import rwkv_vocab, tiktoken_vocab
from octavo.tokenizer.decoder_steps import Replacements, read_replacements
from octavo.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from octavo.tokenizer.quiet_thread import run_quietly
from octavo.tokenizer.template_files import read_directory_templates
from octavo.tokenizer.text_growth import MAX_STEPS, MODEL_PARTS, NO_GROWTH, TEXT_PARTS, TextGrowth, growth_of
from octavo.tokenizer.tokenizer import Padding, Tokenizer
from octavo.tokenizer.vocabulary import (
    MAX_TOKENS,
    UNREACHABLE,
    TokenCoding,
    build_pair,
    end_of_turn_ids,
    library_errors_as,
)

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 128 << 20  # the largest published one has 33 MB
_PROBE = "a" * 64 + "1" * 64 + " " * 64 + "\n!"  # runs on which a badly written pattern never finishes
_TOKEN_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_KNOWN_PATTERNS = frozenset(pattern for known in PRE_TOKENIZERS.values() for pattern in known.patterns)
_KNOWN_PATTERNS |= {tiktoken_vocab.PATTERN}


def read_directory_tokenizer(directory: Path) -> Tokenizer:
    """Build the tokenizer. Raises ModelLoadError naming the file and the problem."""
    if rwkv_vocab.is_rwkv(directory):
        return rwkv_vocab.read_rwkv(directory, read_directory_templates(directory))
    path, config, growth = directory / "tokenizer.json", tokenizer_config(directory), NO_GROWTH
    if not path.is_file() and (directory / tiktoken_vocab.FILE_NAME).is_file():
        path = directory / tiktoken_vocab.FILE_NAME
        loaded = tiktoken_vocab.read_tiktoken(directory, config)
    else:
        loaded, growth = _load(path)
    vocab = loaded.get_vocab(with_added_tokens=True)
    added = dict(sorted(loaded.get_added_tokens_decoder().items()))
    num_tokens = max([*vocab.values(), *added, -1]) + 1
    if not 0 < num_tokens <= MAX_TOKENS:
        raise ModelLoadError(f"{path}: ids go up to {num_tokens - 1}; a vocabulary has 1 to {MAX_TOKENS} tokens")
    tokens = [""] * num_tokens
    for text, i in vocab.items():
        tokens[i] = text
    steps = [] if loaded.decoder is None else _steps(json.loads(loaded.decoder.__getstate__()))
    coding, strip = _coding(path, steps)
    control = {token.content: i for i, token in added.items() if token.special}
    user = [token for token in added.values() if not token.special]
    # Matched in the text before normalization, which removes the guards.
    special_tokens = [
        AddedToken(**{**token.__getstate__(), "normalized": False}) for token in added.values() if token.special
    ]
    in_order = _outside(loaded, added, special_tokens)
    plain, special = build_pair(loaded.model, loaded.normalizer, loaded.pre_tokenizer, user, special_tokens, in_order)
    for i, token in added.items():
        if token.content and special.token_to_id(token.content) != i:
            raise ModelLoadError(f"{path}: added token {token.content!r:.80} has id {i}, which leaves a gap before it")
    bos = named_token_id(directory, config, "bos_token", vocab)
    eos = named_token_id(directory, config, "eos_token", vocab)
    prefix, suffix = _surroundings(loaded, config, bos, eos)
    separator, marks_second = _pair(loaded, config)
    return Tokenizer(
        plain=plain,
        special=special,
        tokens=tokens,
        coding=coding,
        literal_ids=frozenset(added),
        special_token_ids=frozenset(control.values()),
        prefix_ids=prefix,
        suffix_ids=suffix,
        strip_leading_space=strip,
        bos_token_id=bos if bos is not None else (prefix[0] if prefix else None),
        eos_token_ids=end_of_turn_ids(
            control, [*([] if eos is None else [eos]), *configured_eos(directory, num_tokens)]
        ),
        chat_template=read_directory_templates(directory),
        growth=growth,
        may_panic=_has_unknown_patterns(loaded),
        separator_ids=separator,
        marks_second=marks_second,
        replacements=_replacements(path, steps),
        special_tokens=_special_tokens(config),
    )


def padded_tokenizer(tokenizer: Tokenizer, directory: Path, length: int) -> Tokenizer:
    """Return the tokenizer of a model that needs lower-case texts padded to `length` tokens. Raises ModelLoadError."""
    config = tokenizer_config(directory)
    token_id = named_token_id(directory, config, "pad_token", {token: i for i, token in enumerate(tokenizer.tokens)})
    if token_id is None:
        raise ModelLoadError(f"{directory / 'tokenizer_config.json'} names no pad_token, which is needed for padding")
    for core in (tokenizer.plain, tokenizer.special):
        core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [core.normalizer])])
    return replace(tokenizer, padding=Padding(length, token_id, config.get("padding_side") == "left"))


def _outside(
    loaded: tokenizers.Tokenizer, added: Mapping[int, AddedToken], special_tokens: Iterable[AddedToken]
) -> list[AddedToken]:
    """Return the added tokens that the model's own vocabulary lacks, by id, if their order matters.

    It matters if a control token, such as Qwen's `<|im_end|>`, has a lower id than an ordinary one, such as
    `<tool_call>`. Otherwise the result is empty.
    """
    known = loaded.get_vocab(with_added_tokens=False)
    matched = {token.content: token for token in special_tokens}
    outside = [matched.get(token.content, token) for token in added.values() if token.content not in known]
    kinds = [token.special for token in outside]
    return outside if kinds != sorted(kinds) else []


def _load(path: Path) -> tuple[tokenizers.Tokenizer, TextGrowth]:
    """Load the file and try it on texts, after checking what it may do to them."""
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing; safetensors models need it for the tokenizer")
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"{path} has {size:,} bytes; the limit is {MAX_TOKENIZER_BYTES:,}")
    content = path.read_bytes()
    growth = growth_of(path, _parts(path, content))
    with library_errors_as(ModelLoadError, f"{path} is not a tokenizer"):
        loaded = run_quietly(partial(tokenizers.Tokenizer.from_buffer, content))
    decoder = loaded.decoder
    if decoder is not None and (steps := decoder.__getstate__().count(b'"type"')) > MAX_STEPS:
        raise ModelLoadError(f"{path}: {type(decoder).__name__} has {steps} steps; the limit is {MAX_STEPS}")
    loaded.no_truncation()
    loaded.no_padding()
    with library_errors_as(ModelLoadError, f"{path} cannot encode text"):
        run_quietly(partial(loaded.encode, _PROBE))
        run_quietly(partial(loaded.encode, "a", "a"))  # the post-processor has a separate form for pairs
    return loaded, growth


def _parts(path: Path, content: bytes) -> Mapping[str, Any]:
    """Return the parts of the file that change texts. The vocabulary is skipped, because it may be large."""
    import msgspec  # imported here because models in one GGUF file do not need it

    def chosen(raw: bytes | msgspec.Raw, names: Iterable[str]) -> dict[str, Any]:
        # The values of other names are skipped.
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(fields[name]) for name in names if name in fields}

    try:
        whole = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        return chosen(content, TEXT_PARTS) | {"model": chosen(whole["model"], MODEL_PARTS)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ModelLoadError(f"{path} is not a tokenizer: {type(error).__name__}: {error}") from None


def _has_unknown_patterns(loaded: tokenizers.Tokenizer) -> bool:
    """Return True if the normalizer or the pre-tokenizer may panic on a text because of a regular expression or a
    search tree.
    """
    for part in (loaded.normalizer, loaded.pre_tokenizer):
        stack = [] if part is None else [json.loads(part.__getstate__())]
        while stack:
            item = stack.pop()
            if isinstance(item, dict):
                if (
                    "precompiled_charsmap" in item
                    or not {item[key] for key in item if key == "Regex"} <= _KNOWN_PATTERNS
                ):
                    return True
                stack += item.values()
            elif isinstance(item, list):
                stack += item
    return False


def _replacements(path: Path, steps: Sequence[Mapping[str, Any]]) -> Replacements:
    try:
        found, others = read_replacements(steps)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None
    if others:
        logger.warning("%s: the decoder's replacement of %s is not plain text; it is ignored", path, others[0][:80])
    return found


def _coding(path: Path, steps: Sequence[Mapping[str, Any]]) -> tuple[TokenCoding, bool]:
    """Return the byte encoding of tokens, and whether the vocabulary adds a space before a text.

    steps: steps of the decoder
    """
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return TokenCoding.BYTE_LEVEL, False
    if "WordPiece" in kinds:
        return TokenCoding.WORDPIECE, True
    for step in steps:
        if step.get("type") == "Metaspace" and step.get("replacement") == "▁":
            return TokenCoding.SENTENCEPIECE, step.get("prepend_scheme", "always") != "never"
    if any(step.get("type") == "Replace" and step.get("content") == " " for step in steps):
        return TokenCoding.SENTENCEPIECE, any(step.get("type") == "Strip" and step.get("start") for step in steps)
    found = ", ".join(map(str, kinds)) or "missing"
    raise ModelLoadError(
        f"{path}: the decoder is {found}; supported are ByteLevel, WordPiece, Metaspace and SentencePiece's"
    )


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _surroundings(
    loaded: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that are added before and after a text.

    They come from the post-processor, unless `add_bos_token` and `add_eos_token` override it.
    """
    bare = loaded.encode("a", add_special_tokens=False).ids
    full = loaded.encode("a").ids
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
    if isinstance(wanted := config.get("add_bos_token"), bool) and bos is not None:
        prefix = (bos,) if wanted else ()
    if isinstance(wanted := config.get("add_eos_token"), bool) and eos is not None:
        suffix = (eos,) if wanted else ()
    return prefix, suffix


def _pair(loaded: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the ids that the post-processor puts between two texts, and whether the second text has a different type
    id.
    """
    pair = loaded.encode("a", "a")  # the texts that `_load` has tried
    texts = pair.sequence_ids
    if 0 not in texts or 1 not in texts:
        return (), False
    begin, end = len(texts) - texts[::-1].index(0), texts.index(1)
    inputs = config.get("model_input_names")
    has_types = not isinstance(inputs, list) or "token_type_ids" in inputs
    return tuple(pair.ids[begin:end]), has_types and pair.type_ids[end] == 1


def named_token_id(directory: Path, config: Mapping[str, Any], name: str, vocab: Mapping[str, int]) -> int | None:
    """Return the id of a token named in tokenizer_config.json, such as `bos_token`. Raises ModelLoadError."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str) or token not in vocab:
        raise ModelLoadError(f"{directory / 'tokenizer_config.json'}: {name} is {token!r:.80}, which is not a token")
    return vocab[token]


def configured_eos(directory: Path, num_tokens: int) -> list[int]:
    """Return the `eos_token_id` of the generation configuration or, if it has none, of the model configuration.

    An id beyond the vocabulary of `num_tokens` can never be generated, so it is left out with a warning.
    """
    for name in ("generation_config.json", "config.json"):
        values = read_optional(directory / name)
        text = values.get("text_config")  # in a vision model
        value = values.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if type(i) is not int:
                raise ModelLoadError(f"{directory / name}: eos_token_id is {i!r:.40}; ids are 0 to {num_tokens - 1}")
            if not 0 <= i < num_tokens:
                logger.warning(UNREACHABLE, directory / name, "eos_token_id", i, num_tokens)
        if found := [i for i in ids if 0 <= i < num_tokens]:
            return found
    return []


def tokenizer_config(directory: Path) -> Mapping[str, Any]:
    """Return `tokenizer_config.json`, with the names of tokens that are only in the older `special_tokens_map.json`."""
    names = read_optional(directory / "special_tokens_map.json")
    return {key: value for key, value in names.items() if key in _TOKEN_NAMES} | read_optional(
        directory / "tokenizer_config.json"
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named tokens, such as `pad_token`, including tokens with names that only this model
    uses.
    """
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in _TOKEN_NAMES} | (extra if isinstance(extra, dict) else {})
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
