"""The prompts and answers in slots. Moves their blocks out of the cache and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo.engine.kv.cache_identity import is_states_key
from octavo.engine.kv.prefix_move import PrefixMove, begin_load, begin_save, forget_prefix

if TYPE_CHECKING:
    from octavo.engine.kv.kv_cache import KVCacheManager
    from octavo.engine.kv.prompt_file import KeptPrompt
    from octavo.engine.request import Request
    from octavo.engine.slots import SlotAction


class SlotContent(NamedTuple):
    """A request's prompt and answer, and the keys of their full blocks."""

    token_ids: list[int]
    hashes: list[bytes]
    salt: str


class SlotPrompts:
    """The contents of slots by number.

    If a request names no slot, its slot is the number of its row in the batch builder.
    Only for the engine's thread, except `size_of_key` and `wanted_keys`.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._contents: dict[int, SlotContent] = {}

    def note(self, request: Request) -> None:
        """Put the first choice of a finished request into its slot."""
        if request.slot >= 0 and request.sequences:
            sequence = request.sequences[0]
            salt = request.options.cache_salt
            self._contents[request.slot] = SlotContent(sequence.token_ids, sequence.block_hashes, salt)

    def content(self, slot: int, salt: str) -> SlotContent:
        """Return the content of a slot. It is empty if it belongs to another salt."""
        found = self._contents.get(slot)
        return found if found is not None and found.salt == salt else SlotContent([], [], salt)

    def save(self, action: SlotAction) -> tuple[SlotContent, PrefixMove]:
        """Have the next step copy the cached part of a slot's content to memory."""
        content = self.content(action.slot, action.salt)
        size, limit = self._kv_cache.block_size, action.max_tokens
        hashes = content.hashes if limit is None else content.hashes[: limit // size]
        move = begin_save(self._kv_cache, hashes)
        num_blocks = move.num_tokens // size
        kept = SlotContent(content.token_ids[: num_blocks * size], hashes[:num_blocks], content.salt)
        return kept, move

    def restore(self, action: SlotAction, prompt: KeptPrompt) -> PrefixMove:
        """Have the next step put a prompt into the cache, for requests that begin with it."""
        move, tier = begin_load(self._kv_cache, prompt.hashes, prompt.data), self._kv_cache.tier
        if tier is not None and prompt.is_private and tier.is_private(action.salt or "private"):
            for key in (*move.blocks, *move.slots):
                tier.hide(key)
        self._contents[action.slot] = SlotContent(prompt.token_ids, prompt.hashes, action.salt)
        return move

    def erase(self, action: SlotAction) -> int:
        """Forget a slot's content. Return how many of its tokens were in the cache."""
        hashes = self.content(action.slot, action.salt).hashes
        self._contents.pop(action.slot, None)
        return forget_prefix(self._kv_cache, hashes)

    def size_of_key(self, key: bytes) -> int:
        """Return the size in bytes of the block or states with this key. Thread-safe."""
        return self._kv_cache.moved_bytes[is_states_key(key)]

    def wanted_keys(self, hashes: list[bytes]) -> set[bytes]:
        """Return the keys for as much of a prompt with these hashes as fits into the cache. Thread-safe."""
        positions = range(min(len(hashes), self._kv_cache.pool.num_blocks))
        return {key for position in positions for key in self._kv_cache.keys_at(hashes, position)}
