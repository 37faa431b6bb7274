"""A vocabulary of bytes, for grammars."""

from __future__ import annotations

from tests.support.fake_executor import FakeTokenizer

NUM_TOKENS = 259


class ByteTokenizer(FakeTokenizer):
    """A tokenizer in which 0 is BOS and 1 is EOS, followed by one token per byte and one extra token."""

    vocab_size = NUM_TOKENS

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return ([0] if add_special_tokens else []) + [2 + byte for byte in text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 2:
            return b"<bos>" if token_id == 0 else b"<eos>"
        return bytes([token_id - 2]) if token_id < 258 else b'":'
