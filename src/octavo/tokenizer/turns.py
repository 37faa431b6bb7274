"""Drops the oldest turns of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

MessageT = TypeVar("MessageT", bound=Mapping[str, object])


def fit_turns(
    messages: Sequence[MessageT], encode: Callable[[Sequence[MessageT]], list[int]], room: int
) -> tuple[list[int], int]:
    """The token ids of the conversation without its oldest turns, and how many turns were dropped.

    A turn is a user's message with all that follows up to the next. Messages before the first turn stay, and so does
    the last turn, which alone may be longer than `room` tokens. encode: makes a prompt of messages.
    """
    token_ids = encode(messages)
    if len(token_ids) <= room:
        return token_ids, 0
    begins = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(begins) < 2:
        return token_ids, 0
    head = messages[: begins[0]]

    # Dropping more never makes a prompt longer: the fewest that suffice are found by halving.
    low, high, best = 1, len(begins) - 1, encode([*head, *messages[begins[-1] :]])
    while low < high:
        middle = (low + high) // 2
        shorter = encode([*head, *messages[begins[middle] :]])
        if len(shorter) <= room:
            high, best = middle, shorter
        else:
            low = middle + 1
    return best, high
