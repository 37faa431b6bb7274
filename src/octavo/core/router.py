"""Chooses the replica for a request: the one that has seen most of its prompt, unless others are much less loaded.

If no replica has seen the prompt, a `prompt_cache_key` decides.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from octavo.generation_request import RequestOptions
from octavo.prompt import Prompt

BLOCK_TOKENS = 32  # a prefix is known in pieces of this length
# A running sequence delays a new one as much as computing this many tokens of its prompt.
RUNNING_TOKENS = 64
# And a hint that requests belong together is worth as much: where two more run, the next one goes elsewhere.
HINT_TOKENS = 2 * RUNNING_TOKENS
MAX_HINTS = 4096  # remembered per replica
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt as the router sees it: for each full block, a digest of everything up to the block's end, including
    spans.

    hint: the digest of the prompt's `prompt_cache_key`, if it has one.
    """

    num_tokens: int
    blocks: tuple[bytes, ...]
    num_sequences: int = 1
    hint: bytes = b""

    @classmethod
    def of(cls, prompt: Prompt, options: RequestOptions | None = None, num_sequences: int = 1) -> RoutedPrompt:
        """Compute a prompt's digests.

        options: prompts with different values of `cache_salt` share neither blocks nor a `prompt_cache_key`.
        """
        salt, key = ("", "") if options is None else (options.cache_salt, options.prompt_cache_key)
        hint = blake2b(f"{len(salt)} {salt}{key}".encode(), digest_size=_DIGEST_BYTES).digest() if key else b""
        data, blocks, digest = memoryview(array("i", prompt.token_ids)), [], salt.encode()
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            start = end - BLOCK_TOKENS
            material = digest + data[start:end].tobytes() + prompt.marks(start, end)
            digest = blake2b(material, digest_size=_DIGEST_BYTES).digest()
            blocks.append(digest)
        return cls(len(prompt), tuple(blocks), num_sequences, hint)


@dataclass(slots=True)
class _Replica:
    """A replica's load, and the prompts it has seen.

    capacity: size of its cache in tokens.
    seen: blocks of prompts that its cache may hold, the most recent last.
    """

    capacity: int
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    hints: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # from the latest prompts, the latest last
    num_sequences: int = 0
    waiting_tokens: int = 0  # tokens of prompts without a first token
    held_tokens: int = 0  # tokens of all prompts and answers
    last_turn: int = 0

    def shared_tokens(self, prompt: RoutedPrompt) -> int:
        """Return the number of tokens at the beginning of the prompt that the replica has seen."""
        count = 0
        for block in prompt.blocks:
            if block not in self.seen:
                break
            count += 1
        return count * BLOCK_TOKENS

    def cost(self, prompt: RoutedPrompt) -> int:
        """Return the number of tokens to compute, or to wait for, before the first token of the answer."""
        new_tokens = prompt.num_tokens - self.shared_tokens(prompt)
        excess = max(self.held_tokens + new_tokens - self.capacity, 0) if self.held_tokens else 0
        saved = HINT_TOKENS if prompt.hint in self.hints else 0
        return new_tokens + self.waiting_tokens + RUNNING_TOKENS * self.num_sequences + excess - saved

    def remember(self, prompt: RoutedPrompt) -> None:
        for block in reversed(prompt.blocks):  # its beginning is the latest, because an engine evicts ends first
            self.seen[block] = None
            self.seen.move_to_end(block)
        while len(self.seen) * BLOCK_TOKENS > self.capacity:
            self.seen.popitem(last=False)
        if prompt.hint:
            self.hints[prompt.hint] = None
            self.hints.move_to_end(prompt.hint)
            if len(self.hints) > MAX_HINTS:
                self.hints.popitem(last=False)


class Visit:
    """One request at a replica. Every visit must end with `leave`."""

    def __init__(self, replica: _Replica, number: int, prompt: RoutedPrompt, new_tokens: int) -> None:
        self.number = number  # number of the replica
        self._replica = replica
        self._num_sequences = prompt.num_sequences
        self._held_tokens, self._waiting_tokens = prompt.num_tokens, new_tokens
        replica.num_sequences += self._num_sequences
        replica.held_tokens += self._held_tokens
        replica.waiting_tokens += self._waiting_tokens

    def grow(self, num_tokens: int) -> None:
        """Record that the answer has `num_tokens` more tokens, which implies that the prompt has been computed."""
        self._replica.waiting_tokens -= self._waiting_tokens
        self._waiting_tokens = 0
        self._replica.held_tokens += num_tokens
        self._held_tokens += num_tokens

    def leave(self) -> None:
        """Record that the request has ended. May be called twice."""
        self.grow(0)
        self._replica.held_tokens -= self._held_tokens
        self._replica.num_sequences -= self._num_sequences
        self._held_tokens = self._num_sequences = 0


class Router:
    """Tracks the load of each replica, and the prompts that its cache may hold. Belongs to one event loop."""

    def __init__(self, capacities: Sequence[int]) -> None:
        """capacities: cache size of each replica in tokens."""
        self._replicas = [_Replica(capacity) for capacity in capacities]
        self._turn = 0

    def choose(self, prompt: RoutedPrompt, numbers: Collection[int]) -> int:
        """Choose the replica with the lowest cost. On ties, choose the one that was chosen least recently."""
        return min(numbers, key=lambda i: (self._replicas[i].cost(prompt), self._replicas[i].last_turn))

    def enter(self, number: int, prompt: RoutedPrompt) -> Visit:
        """Count the request at a replica. From then on, the replica is assumed to have seen the request's prompt."""
        replica = self._replicas[number]
        self._turn += 1
        replica.last_turn = self._turn
        visit = Visit(replica, number, prompt, prompt.num_tokens - replica.shared_tokens(prompt))
        replica.remember(prompt)
        return visit

    def is_idle(self, number: int) -> bool:
        """True if this replica has no requests."""
        return not self._replicas[number].num_sequences

    def forget(self, number: int) -> None:
        """Record that a replica was restarted and its cache is empty."""
        self._replicas[number].seen.clear()
        self._replicas[number].hints.clear()
