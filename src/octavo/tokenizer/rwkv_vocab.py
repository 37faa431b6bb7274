"""RWKV's vocabulary of byte strings. At each position, the longest token that matches the text is taken.

Sources: `rwkv_vocab_v20230424.txt`, published with the checkpoints, and the tokenizer model `rwkv` of llama.cpp.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, models, pre_tokenizers

from octavo.errors import ModelLoadError
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import MAX_TOKENS, TokenCoding, build_pair, byte_level_text

FILE_NAME = "rwkv_vocab_v20230424.txt"
MAX_BYTES = 32 << 20
MAX_TOKEN_BYTES = 1 << 10
END = "<|rwkv_tokenizer_end_of_text|>"
"""The name of token 0, which ends a text."""

# Only a single literal, because an expression could be nested as deeply as it is long.
_LINE = re.compile(r"""([0-9]{1,9}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) ([0-9]{1,9})""")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class LongestMatch:
    """Joins single-byte tokens, from left to right, into the longest tokens of the vocabulary."""

    def __init__(self, ids: Mapping[bytes, int]) -> None:
        """Initialize the search.

        ids: the ids of all tokens by their bytes, including all 256 single bytes
        """
        self._ids = ids
        self._byte_of = {ids[bytes([byte])]: byte for byte in range(256)}
        lengths: dict[bytes, set[int]] = defaultdict(set)
        for token in ids:
            lengths[token[:2]].add(len(token))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}

    def join(self, ids: Sequence[int]) -> list[int]:
        """Replace each run of single-byte tokens with the longest tokens of the vocabulary. All other tokens are
        kept.
        """
        found: list[int] = []
        text = bytearray()
        for token in ids:
            if (byte := self._byte_of.get(token)) is None:
                found += [*self._split(bytes(text)), token]
                text.clear()
            else:
                text.append(byte)
        return found + self._split(bytes(text))

    def _split(self, text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            fitting = (text[at : at + length] for length in self._lengths.get(text[at : at + 2], ()))
            token = next((part for part in fitting if part in self._ids), text[at : at + 1])
            found.append(self._ids[token])
            at += len(token)
        return found


def is_rwkv(directory: Path) -> bool:
    """Return True if this checkpoint has RWKV's tokenizer."""
    return (directory / FILE_NAME).is_file() and not (directory / "tokenizer.json").is_file()


def read_rwkv(directory: Path, template: TemplateSet | None) -> Tokenizer:
    """Read the tokenizer from the file in a checkpoint's folder. Raises ModelLoadError naming the line."""
    path = directory / FILE_NAME
    return rwkv_tokenizer(str(path), [b"", *_read_file(path)], END, template)


def _read_file(path: Path) -> list[bytes]:
    """Return the tokens from number 1 on. Raises ModelLoadError naming file and line."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ModelLoadError(f"{path} has {size:,} bytes; the limit is {MAX_BYTES:,}")
    tokens: list[bytes] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            if len(tokens) + 1 == MAX_TOKENS:
                raise ModelLoadError(f"{path}: line {number} is one too many; a vocabulary has {MAX_TOKENS:,} tokens")
            data = _token(line.rstrip(b"\r"), len(tokens) + 1)
            if data is None:
                raise ModelLoadError(f"{path}: line {number}, {line[:60]!r}, is not the next id, a text and its length")
            tokens.append(data)
    return tokens


def _token(line: bytes, number: int) -> bytes | None:
    """Return the bytes of the token in a line, or None if the line is not a valid entry with this number."""
    try:
        found = _LINE.fullmatch(line.decode())
        token = ast.literal_eval(found[2]) if found else None
        data = token.encode() if isinstance(token, str) else token
    except (ValueError, SyntaxError):  # includes invalid UTF-8
        return None
    if found is None or not isinstance(data, bytes) or not 0 < len(data) <= MAX_TOKEN_BYTES:
        return None
    return data if (int(found[1]), int(found[3])) == (number, len(data)) else None


def rwkv_tokenizer(source: str, tokens: Sequence[bytes], end: str, template: TemplateSet | None) -> Tokenizer:
    """Build the tokenizer from its tokens.

    source: name of the file, for errors
    tokens: [V]; entries without bytes are unused
    end: name of token 0. This token ends a text.

    Raises ModelLoadError if a single byte is not a token.
    """
    ids = {data: i for i, data in reversed(list(enumerate(tokens))) if i and data}
    if missing := [byte for byte in range(256) if bytes([byte]) not in ids]:
        raise ModelLoadError(f"{source}: the byte 0x{missing[0]:02X} is not a token, so some texts cannot be encoded")
    texts = [end if i == 0 else byte_level_text(data) for i, data in enumerate(tokens)]
    vocab = {text: i for i, text in reversed(list(enumerate(texts))) if text}
    control = [AddedToken(end, normalized=False, special=True)]
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain, special = build_pair(models.BPE(vocab, []), None, splitter, [], control)
    return Tokenizer(
        plain=plain,
        special=special,
        tokens=texts,
        coding=TokenCoding.BYTE_LEVEL,
        literal_ids=frozenset({0}),
        special_token_ids=frozenset({0}),
        prefix_ids=(),
        suffix_ids=(),
        strip_leading_space=False,
        bos_token_id=None,
        eos_token_ids=frozenset({0}),
        chat_template=template,
        joiner=LongestMatch(ids),
    )


def escaped(data: bytes) -> str:
    r"""Return a token's bytes as GGUF files write them: printable characters, and escapes such as `\n` and `\xff`."""
    return repr(data)[2:-1]


def unescaped(text: str) -> bytes:
    """Convert the result of `escaped` back to bytes."""
    return _ESCAPE.sub(
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else _ESCAPED.get(found[2], found[2]), text.encode()
    )
