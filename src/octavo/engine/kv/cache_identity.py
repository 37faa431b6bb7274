"""The names of cached blocks: hashes of all that the keys and values in a block depend on."""

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
    """All that the bytes of a block depend on beside its tokens and those before it.

    model: names the content of the weights and the operations on them.
    layout: names the way in which the numbers are computed and lie in a block: its tokens, groups of layers, number
    types, the kernels. Two engines with the same identity may exchange the bytes of their blocks.
    """

    model: bytes
    layout: bytes

    @classmethod
    def unique(cls) -> CacheIdentity:
        """One that no other engine has: nothing is known of the model."""
        return cls(secrets.token_bytes(_KEY_BYTES), b"")

    @property
    def is_unique(self) -> bool:
        """True of what `unique` returns: nothing that is named by it can be found again."""
        return not self.layout

    def root(self, salt: str = "", adapter: bytes = b"") -> bytes:
        """The parent of a sequence's first block. Only sequences with the same salt and adapter share blocks."""
        found = hashlib.blake2b(digest_size=_KEY_BYTES)
        for part in (self.model, self.layout, adapter, salt.encode()):
            found.update(len(part).to_bytes(8, "little") + part)
        return found.digest()


def block_key(parent: bytes, token_ids: Sequence[int], marks: bytes = b"") -> bytes:
    """The name of a full block: of its tokens after those of `parent`, the key of the block before it, or the root.

    marks: of the spans in the block, see `Prompt.marks`. Blocks of one root have the same number of tokens, so what
    follows the tokens cannot be taken for some.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes() + marks, digest_size=_KEY_BYTES).digest()


def states_key(block: bytes) -> bytes:
    """The name of the states of a sequence after a full block."""
    return block + _OF_STATES


def is_states_key(key: bytes) -> bool:
    return key[_KEY_BYTES:] == _OF_STATES
