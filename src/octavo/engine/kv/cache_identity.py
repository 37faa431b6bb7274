"""The names of cached blocks: hashes of everything that the keys and values in a block depend on."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_KEY_BYTES = 32
_OF_STATES = b"states"


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything that the bytes of a block depend on, apart from its own tokens and those before it.

    model: the content of the weights and the operations on them.
    layout: how numbers are computed and stored in a block: tokens per block, groups of layers, number types, kernels.
    Engines with the same identity may exchange the bytes of blocks.
    """

    model: bytes
    layout: bytes

    @classmethod
    def unique(cls) -> CacheIdentity:
        """Return an identity that no other engine has, for a model whose content is unknown."""
        return cls(secrets.token_bytes(_KEY_BYTES), b"")

    @property
    def is_unique(self) -> bool:
        """True for the result of `unique`: nothing stored under it can be found again."""
        return not self.layout

    def root(self, salt: str = "", adapter: bytes = b"") -> bytes:
        """Return the parent of a sequence's first block. Only sequences with the same salt and adapter share blocks."""
        found = hashlib.blake2b(digest_size=_KEY_BYTES)
        for part in (self.model, self.layout, adapter, salt.encode()):
            found.update(len(part).to_bytes(8, "little") + part)
        return found.digest()


def block_key(parent: bytes, token_ids: Sequence[int], marks: bytes = b"") -> bytes:
    """Return the name of a full block with these tokens.

    parent: the key of the previous block, or the root.
    marks: the spans in the block, see `Prompt.marks`. All blocks under one root have the same number of tokens, so the
    marks cannot be mistaken for tokens.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes() + marks, digest_size=_KEY_BYTES).digest()


def states_key(block: bytes) -> bytes:
    """Return the name of a sequence's states after a full block."""
    return block + _OF_STATES


def is_states_key(key: bytes) -> bool:
    return key[_KEY_BYTES:] == _OF_STATES
