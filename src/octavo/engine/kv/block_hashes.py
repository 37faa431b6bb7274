"""The hashes of a sequence's blocks: the names under which their content is found again."""

from __future__ import annotations

from octavo.engine.kv.cache_identity import CacheIdentity, block_key
from octavo.engine.request import Request, Sequence


def extend_hashes(identity: CacheIdentity, sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Compute the hashes of the first num_blocks blocks of block_size tokens, as far as the sequence lacks them."""
    hashes, request = sequence.block_hashes, sequence.request
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = hashes[-1] if hashes else _root(identity, request)
        marks = request.prompt.marks(start, start + block_size) + _activation(request, start, block_size)
        hashes.append(block_key(parent, sequence.token_ids[start : start + block_size], marks))


def _root(identity: CacheIdentity, request: Request) -> bytes:
    """Depends on the content of an adapter, not on its name: another one may get the name at any time."""
    held = request.adapter if not request.adapter_start else None
    adapter = b"" if held is None else held.adapter.digest
    return identity.root(request.options.cache_salt, adapter)


def _activation(request: Request, start: int, size: int) -> bytes:
    """The mark of the block in which an activated adapter begins to act; those before it are the base's."""
    if request.adapter is None or not start <= request.adapter_start < start + size or not request.adapter_start:
        return b""
    position = (request.adapter_start - start).to_bytes(4, "little")
    return b"adapter" + position + request.adapter.adapter.digest
