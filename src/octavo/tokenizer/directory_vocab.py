"""A vocabulary from `tokenizer.json` and the small files beside it.

Source: the serialization of the `tokenizers` library, and the files that transformers' `save_pretrained` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import ModelLoadError
from octavo.loader.json_file import read_json_object
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import MAX_TOKENS, TokenCoding, build_pair, end_of_turn_ids, library_errors_as

MAX_TOKENIZER_BYTES = 128 << 20  # the largest published one has 33 MB
MAX_CONFIG_BYTES = 4 << 20
_PROBE = "a" * 64 + "1" * 64 + " " * 64 + "\n!"  # runs on which a careless pattern never finishes
MAX_STEPS = 256  # of normalizers, pre-tokenizers and decoders


def read_directory_tokenizer(directory: Path) -> Tokenizer:
    """Builds the tokenizer. Raises ModelLoadError naming the file and the problem."""
    path = directory / "tokenizer.json"
    loaded = _load(path)
    config = _optional(directory / "tokenizer_config.json")
    vocab = loaded.get_vocab(with_added_tokens=True)
    added = dict(sorted(loaded.get_added_tokens_decoder().items()))
    num_tokens = max([*vocab.values(), *added, -1]) + 1
    if not 0 < num_tokens <= MAX_TOKENS:
        raise ModelLoadError(f"{path}: ids go up to {num_tokens - 1}; a vocabulary has 1 to {MAX_TOKENS} tokens")
    tokens = [""] * num_tokens
    for text, i in vocab.items():
        tokens[i] = text
    coding, strip = _coding(path, loaded)
    control = {token.content: i for i, token in added.items() if token.special}
    plain, special = build_pair(
        loaded.model,
        loaded.normalizer,
        loaded.pre_tokenizer,
        [token for token in added.values() if not token.special],
        # Matched in the text before normalization, which removes the guards.
        [AddedToken(**{**token.__getstate__(), "normalized": False}) for token in added.values() if token.special],
    )
    for i, token in added.items():
        if token.content and special.token_to_id(token.content) != i:
            raise ModelLoadError(f"{path}: added token {token.content!r:.80} has id {i}, which leaves a gap before it")
    bos = _token_id(directory, config, "bos_token", vocab)
    eos = _token_id(directory, config, "eos_token", vocab)
    prefix, suffix = _surroundings(path, loaded, config, bos, eos)
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
            control, [*([] if eos is None else [eos]), *_configured_eos(directory, num_tokens)]
        ),
        chat_template=read_chat_template(directory),
    )


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing; safetensors models need it for the tokenizer")
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"{path} has {size:,} bytes; the limit is {MAX_TOKENIZER_BYTES:,}")
    with library_errors_as(ModelLoadError, f"{path} is not a tokenizer"):
        loaded = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    for part in (loaded.normalizer, loaded.pre_tokenizer, loaded.decoder):
        if part is not None and (steps := part.__getstate__().count(b'"type"')) > MAX_STEPS:
            raise ModelLoadError(f"{path}: {type(part).__name__} has {steps} steps; the limit is {MAX_STEPS}")
    return loaded


def _coding(path: Path, loaded: tokenizers.Tokenizer) -> tuple[TokenCoding, bool]:
    """The byte encoding of tokens; and True if the vocabulary adds the first space of a text."""
    decoder = loaded.decoder
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return TokenCoding.BYTE_LEVEL, False
    for step in steps:
        if step.get("type") == "Metaspace" and step.get("replacement") == "▁":
            return TokenCoding.SENTENCEPIECE, step.get("prepend_scheme", "always") != "never"
    if any(step.get("type") == "Replace" and step.get("content") == " " for step in steps):
        return TokenCoding.SENTENCEPIECE, any(step.get("type") == "Strip" and step.get("start") for step in steps)
    found = ", ".join(map(str, kinds)) or "missing"
    raise ModelLoadError(f"{path}: the decoder is {found}; Octavo knows ByteLevel, Metaspace and SentencePiece's")


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _surroundings(
    path: Path, loaded: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor adds before and after a text; `add_bos_token` and `add_eos_token` overrule it."""
    loaded.no_truncation()
    loaded.no_padding()
    with library_errors_as(ModelLoadError, f"{path} cannot encode text"):
        bare = loaded.encode("a", add_special_tokens=False).ids
        full = loaded.encode("a").ids
        loaded.encode(_PROBE)
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
    if isinstance(wanted := config.get("add_bos_token"), bool) and bos is not None:
        prefix = (bos,) if wanted else ()
    if isinstance(wanted := config.get("add_eos_token"), bool) and eos is not None:
        suffix = (eos,) if wanted else ()
    return prefix, suffix


def _token_id(directory: Path, config: Mapping[str, Any], name: str, vocab: Mapping[str, int]) -> int | None:
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str) or token not in vocab:
        raise ModelLoadError(f"{directory / 'tokenizer_config.json'}: {name} is {token!r:.80}, which is not a token")
    return vocab[token]


def _configured_eos(directory: Path, num_tokens: int) -> list[int]:
    """The `eos_token_id` of the generation configuration or, if it has none, of the model configuration."""
    for name in ("generation_config.json", "config.json"):
        value = _optional(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for i in ids:
            if type(i) is not int or not 0 <= i < num_tokens:
                raise ModelLoadError(f"{directory / name}: eos_token_id is {i!r:.40}; ids are 0 to {num_tokens - 1}")
        return ids
    return []


def read_chat_template(directory: Path) -> str | None:
    """The source of the model's chat template, from `chat_template.jinja` or else `tokenizer_config.json`.

    Of several named templates it is the default one. None: the model has none. Raises ModelLoadError.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size:,} bytes; the limit is {MAX_CONFIG_BYTES:,}")
        return path.read_text("utf-8", "replace")
    path = directory / "tokenizer_config.json"
    template = _optional(path).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if (template := named.get("default")) is None:
            raise ModelLoadError(f"{path}: chat_template names no default template")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"{path}: chat_template is a {type(template).__name__}")
    return template


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, MAX_CONFIG_BYTES) if path.is_file() else {}
