"""The images in the messages of a program, as parts of the content."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from octavo.engine.texts.image_inputs import IMAGE_KEYS, ImageInputs, has_images
from octavo.engine.texts.placing import ItemSeries
from octavo.errors import UsageError
from octavo.prompt import MediaItem
from octavo.tokenizer.image_marks import ImageMarks


class ChatImages:
    """The images of one conversation, and its messages with a mark in place of each.

    Raises UsageError for an image that cannot be read, or if the model only reads text.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], inputs: ImageInputs) -> None:
        processor = inputs.require()
        self.marks = ImageMarks(processor.placeholder, processor.wrapping)
        self._inputs = inputs
        self._items: list[MediaItem | ItemSeries] = []
        self.messages = [self._marked(message) for message in messages]

    @property
    def items(self) -> list[MediaItem | ItemSeries]:
        """The images in the order of their marks in the messages."""
        return [self._items[number] for number in self.marks.numbers(self.messages)]

    def _marked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)) or not has_images([message]):
            return message
        pieces: list[str] = []
        follows_text = False
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in IMAGE_KEYS:
                pieces.append(self._mark(part, str(kind)))
            elif kind == "text" and isinstance(part.get("text"), str):
                pieces.append(("\n" if follows_text else "") + part["text"])  # as the server puts texts in a row
            else:
                raise UsageError(f"a part of content is text or an image, not {part!r:.80}")
            follows_text = kind == "text"
        return {**message, "content": "".join(pieces)}

    def _mark(self, part: Mapping[str, Any], kind: str) -> str:
        value = _value(part, kind)
        if not isinstance(value, (MediaItem, ItemSeries)):
            read = self._inputs.video if kind == "video" else self._inputs.item
            value = read(_opened(value))
        self._items.append(value)
        return self.marks.add()


def with_texts(messages: Sequence[Mapping[str, Any]], inputs: ImageInputs) -> list[Mapping[str, Any]]:
    """The messages with the texts of PDF documents in their places. Raises UsageError for one that has none."""
    return [_with_text(message, inputs) if has_images([message]) else message for message in messages]


def _with_text(message: Mapping[str, Any], inputs: ImageInputs) -> Mapping[str, Any]:
    parts = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = inputs.document_text(_opened(_value(part, str(kind)))) if kind in IMAGE_KEYS else None
        parts.append(part if text is None else {"type": "text", "text": text})
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    is_text = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return {**message, "content": "\n\n".join(texts) if is_text else parts}


def _value(part: Mapping[str, Any], kind: str) -> Any:
    """An image, or a name of it, in a part of this kind."""
    value = part.get(kind)
    if isinstance(value, Mapping):  # of OpenAI's clients
        value = value.get("file_data" if kind == "file" else "url")
    return value


def _opened(value: Any) -> Any:
    """The bytes of a data: URL, a path of a file: URL; anything else unchanged."""
    if not isinstance(value, str) or ("://" not in value[:16] and not value.startswith("data:")):
        return value
    if value.startswith("data:"):
        head, _, text = value.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise UsageError("an image is a data: URL that is not base64; write data:image/png;base64,...") from None
    if value.startswith("file://"):
        return unquote(urlsplit(value).path)
    raise UsageError(f"an image is at {value!r:.80}, and nothing is fetched here; give its bytes or a path")
