"""Drops the oldest turns of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TypeVar

MessageT = TypeVar("MessageT", bound=Mapping[str, object])
PromptT = TypeVar("PromptT", bound=Sized)


def fit_turns(
    messages: Sequence[MessageT], encode: Callable[[Sequence[MessageT]], PromptT], room: int
) -> tuple[PromptT, int]:
    """The prompt of the conversation without its oldest turns, and how many turns were dropped.

    A turn is a user's message with all that follows up to the next. Messages before the first turn stay, and so does
    the last turn, which alone may be longer than `room` tokens.
    encode: makes a prompt of messages, whose length is its tokens; content of turns that were dropped is not in it.
    """
    prompt = encode(messages)
    if len(prompt) <= room:
        return prompt, 0
    begins = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(begins) < 2:
        return prompt, 0
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
