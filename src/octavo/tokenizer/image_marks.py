"""Marks that represent the images of a conversation in its texts, from the request to the rendered prompt."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any


class ImageMarks:
    """The marks of one conversation. They are random, so that no user's text contains one.

    placeholder: text that the model's chat templates write for an image
    wrapping: the texts around the placeholder, for templates that write none
    """

    def __init__(self, placeholder: str, wrapping: tuple[str, str] = ("", "")) -> None:
        self.placeholder = placeholder
        self._shown = placeholder.join(wrapping)
        self._count = 0
        self._name = f"image-{secrets.token_hex(8)}"
        self._pattern = re.compile(rf"<{self._name}-(\d+)>")

    def add(self) -> str:
        """Add an image and return its mark."""
        self._count += 1
        return f"<{self._name}-{self._count - 1}>"

    def numbers(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the numbers of the images in these messages, in order. The image that was added first has number 0."""
        texts = (message.get("content") for message in messages)
        return [int(number) for text in texts if isinstance(text, str) for number in self._pattern.findall(text)]

    def in_parts(self, content: str) -> list[dict[str, str]] | str:
        """Return the content as parts for a template, with `{"type": "image"}` for each mark. A text without marks
        stays a string.
        """
        pieces = self._pattern.split(content)
        if len(pieces) == 1:
            return content
        parts: list[dict[str, str]] = []
        for i, piece in enumerate(pieces):  # every second piece is a number
            if i % 2:
                parts.append({"type": "image"})
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def shown(self, rendered: str) -> str:
        """Return the rendered text with each remaining mark replaced by the wrapped placeholder."""
        return self._pattern.sub(lambda _: self._shown, rendered)
