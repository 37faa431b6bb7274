"""The form of content that a chat template accepts: one string, or a list of parts.

A template that loops over parts shows nothing if it receives a string. A template made for strings shows a list as
Python prints it. Neither raises an error, so both forms are tried with a test word that must appear in the result.
Source: llama.cpp, which probes a template's capabilities in this way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WORD = "Octavoprobe"
_LITERAL = re.compile(r"""['"]type['"]\s*:\s*['"]text['"]""")  # a list of parts as Python or JSON prints it
_CALL_ID = "call12345"  # nine letters and digits, which Mistral's templates require


class ContentForms:
    """The content forms that one template accepts for each role. Each form is tried once per role, when it is first
    needed.

    render: returns the template's text for a conversation, or None if it fails
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> None:
        self._render = render
        self._shown: dict[tuple[str, bool], bool] = {}
        self._images: dict[tuple[str, str], bool] = {}

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with their content in the template's form. Content that it accepts directly is
        unchanged.
        """
        return [self._fit(message) for message in messages]

    def shows_image(self, role: str, placeholder: str) -> bool:
        """Return True if the template writes the placeholder for an image next to text in a message of this role."""
        found = self._images.get((role, placeholder))
        if found is None:
            before, after = _around(role)
            message = {**_message(role), "content": [{"type": "image"}, *_parts(_WORD)]}
            text = self._render([*self.fit(before), message, *self.fit(after)]) or ""
            found = text.count(placeholder) == 1 and _WORD.lower() in text.lower() and not _LITERAL.search(text)
            self._images[role, placeholder] = found
        return found

    def _fit(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content, role = message.get("content"), message["role"]
        if isinstance(content, str):
            takes_parts = not self._shows(role, in_parts=False) and self._shows(role, in_parts=True)
            return {**message, "content": _parts(content)} if takes_parts else message
        if not isinstance(content, (list, tuple)) or any(part["type"] != "text" for part in content):
            return message  # other parts than text exist only for templates that accept them
        if not self._shows(role, in_parts=True):
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def _shows(self, role: str, *, in_parts: bool) -> bool:
        """Return True if the template shows text in a message of this role, as a string or as a list of one part."""
        found = self._shown.get((role, in_parts))
        if found is None:
            before, after = _around(role)
            message = {**_message(role), "content": _parts(_WORD) if in_parts else _WORD}
            text = self._render([*self.fit(before), message, *self.fit(after)]) or ""
            found = _WORD.lower() in text.lower() and not (in_parts and _LITERAL.search(text))
            self._shown[role, in_parts] = found
        return found


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _message(role: str) -> dict[str, Any]:
    return {"role": role, **({"name": "f", "tool_call_id": _CALL_ID} if role == "tool" else {})}


def _around(role: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages before and after a message of this role in a typical conversation.

    Before they are used in a test of this role, their own roles are tested.
    """
    user = {"role": "user", "content": "Hello"}
    match role:
        case "user":
            return [], []
        case "assistant":
            return [user], [user]
        case "tool":
            calls = [{"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}]
            return [user, {"role": "assistant", "content": "", "tool_calls": calls}], []
        case _:
            return [], [user]
