"""The hashes that identify the content of a sequence's blocks."""

from __future__ import annotations

from octavo.engine.kv.cache_identity import CacheIdentity, block_key
from octavo.engine.request import Request, Sequence


def extend_hashes(identity: CacheIdentity, sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Compute the missing hashes of the first num_blocks blocks of block_size tokens."""
    hashes, request = sequence.block_hashes, sequence.request
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = hashes[-1] if hashes else _root(identity, request)
        marks = request.prompt.marks(start, start + block_size) + _activation(request, start, block_size)
        hashes.append(block_key(parent, sequence.token_ids[start : start + block_size], marks))


def _root(identity: CacheIdentity, request: Request) -> bytes:
    """Return the root hash.

    It depends on an adapter's content, not on its name, which may be given to another adapter.
    """
    held = request.adapter if not request.adapter_start else None
    adapter = b"" if held is None else held.adapter.digest
    return identity.root(request.options.cache_salt, adapter)


def _activation(request: Request, start: int, size: int) -> bytes:
    """Return the mark of an activated adapter for the block in which it starts to act, or no bytes for any other block.

    Earlier blocks are the same as the base model's.
    """
    if request.adapter is None or not start <= request.adapter_start < start + size or not request.adapter_start:
        return b""
    position = (request.adapter_start - start).to_bytes(4, "little")
    return b"adapter" + position + request.adapter.adapter.digest
