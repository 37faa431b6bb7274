"""Conversations that outgrow the context lose their oldest turns, and as few as possible."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from octavo.tokenizer.turns import fit_turns

Messages = Sequence[dict[str, str]]


def encode(messages: Messages) -> list[int]:
    return [ord(c) for message in messages for c in message["content"]]


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text("ab", max_size=5)), max_size=12),
    st.integers(0, 40),
)
def test_as_few_turns_as_possible(pairs: list[tuple[str, str]], room: int) -> None:
    messages = [{"role": "system", "content": "s"}, *({"role": r, "content": c} for r, c in pairs)]
    token_ids, dropped = fit_turns(messages, encode, room)
    begins = [i for i, m in enumerate(messages) if m["role"] == "user"]
    choices = [encode(messages)]
    if begins:
        choices += [encode([*messages[: begins[0]], *messages[i:]]) for i in begins[1:]]
    wanted = next((i for i, choice in enumerate(choices) if len(choice) <= room), len(choices) - 1)
    assert (token_ids, dropped) == (choices[wanted], wanted)
