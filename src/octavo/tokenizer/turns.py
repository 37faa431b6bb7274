"""Drops the oldest turns of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TypeVar

MessageT = TypeVar("MessageT", bound=Mapping[str, object])
PromptT = TypeVar("PromptT", bound=Sized)


def fit_turns(
    messages: Sequence[MessageT], encode: Callable[[Sequence[MessageT]], PromptT], room: int
) -> tuple[PromptT, int]:
    """Return the prompt of the conversation without its oldest turns, and the number of turns dropped.

    A turn is a user message with everything that follows up to the next user message. Messages before the first turn
    are kept, and so is the last turn, which may be longer than `room` tokens by itself.

    encode: makes a prompt of messages. The prompt's length is its number of tokens, and it contains no content of
    dropped turns.
    """
    prompt = encode(messages)
    if len(prompt) <= room:
        return prompt, 0
    begins = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(begins) < 2:
        return prompt, 0
    head = messages[: begins[0]]

    # Dropping more turns never makes a prompt longer, so a binary search finds the minimum.
    low, high, best = 1, len(begins) - 1, encode([*head, *messages[begins[-1] :]])
    while low < high:
        middle = (low + high) // 2
        shorter = encode([*head, *messages[begins[middle] :]])
        if len(shorter) <= room:
            high, best = middle, shorter
        else:
            low = middle + 1
    return best, high
