"""The images in a program's messages, given as parts of the messages' content."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from octavo.config import check_pdf_as
from octavo.engine.texts.image_inputs import IMAGE_KEYS, ImageInputs, has_images
from octavo.engine.texts.placing import ItemSeries
from octavo.errors import UsageError
from octavo.prompt import MediaItem
from octavo.tokenizer.image_marks import ImageMarks


class ChatImages:
    """The images of one conversation, and its messages with a mark in place of each image.

    Raises UsageError for an image that cannot be read, or if the model reads only text.
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
                pieces.append(("\n" if follows_text else "") + part["text"])  # joined like in the server
            else:
                raise UsageError(f"a content part must be text or an image, not {part!r:.80}")
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
    """Return the messages with text in place of the PDF documents that are to be read as text.

    Raises UsageError for a document without text, and for an invalid `pdf_as` in a part.
    """
    return [_with_text(message, inputs) if has_images([message]) else message for message in messages]


def _with_text(message: Mapping[str, Any], inputs: ImageInputs) -> Mapping[str, Any]:
    texts = [_text_of(part, inputs) for part in message["content"]]
    if not any(texts):
        return message
    joined: list[Any] = []
    for given, text in zip(message["content"], texts, strict=True):
        part = given if text is None else {"type": "text", "text": text}
        if joined and _is_text(part) and _is_text(joined[-1]):
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n\n{part['text']}"}
        else:
            joined.append(part)
    is_text = len(joined) == 1 and _is_text(joined[0])
    return {**message, "content": joined[0]["text"] if is_text else joined}


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text_of(part: object, inputs: ImageInputs) -> str | None:
    """Return the text of a document, or None if the part is not a document or its pages are to be read as images."""
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_KEYS:
        return None
    pdf_as = None if part.get("pdf_as") is None else check_pdf_as(part["pdf_as"])
    return inputs.document_text(_opened(_value(part, part["type"]))) if inputs.reads_documents(pdf_as) else None


def _value(part: Mapping[str, Any], kind: str) -> Any:
    """Return the image, or the name of one, from a part of this kind."""
    value = part.get(kind)
    if isinstance(value, Mapping):  # form used by OpenAI's clients
        value = value.get("file_data" if kind == "file" else "url")
    return value


def _opened(value: Any) -> Any:
    """Return the bytes of a data: URL or the path of a file: URL; anything else unchanged."""
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
    raise UsageError(f"an image is at {value!r:.80}, but nothing is fetched here; give its bytes or a path")
