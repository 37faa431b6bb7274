"""The content of messages in every protocol: an ordered sequence of parts, from the request to the chat template.

If the model accepts images, an image becomes a mark in the text. Parts that a model cannot read are refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from octavo.config import PdfAs
from octavo.server.errors import refuse
from octavo.server.models.image_reader import READ_URLS, ImageSource, image_processor, names_media
from octavo.server.models.served_model import ServedModel
from octavo.tokenizer.image_marks import ImageMarks


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text part.

    before: separator between this text and the previous one, for templates that take a message as one string
    """

    text: str
    before: str = ""


MediaKind: TypeAlias = Literal["image", "audio", "video", "file"]


@dataclass(frozen=True, slots=True)
class Media:
    """A part that is not text.

    where: path of the field to name in errors about the part
    source: where to read the image or file, or None if its form is not supported
    pdf_as: how to read a PDF document, or None for the default in `EngineConfig.pdf_as`
    """

    kind: MediaKind
    where: str
    source: ImageSource | None = field(default=None, compare=False)
    pdf_as: PdfAs | None = None


MessagePart: TypeAlias = PlainText | Media
MessageContent: TypeAlias = tuple[MessagePart, ...]

_READS: dict[MediaKind, str] = {
    **dict.fromkeys(("image", "audio"), "text and images only"),
    "video": "only text, images, and videos given as data: URLs",
    "file": "only text, images, videos and PDF documents given as data",
}
_NAMES: dict[MediaKind, str] = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file"}


def plain(text: str) -> MessageContent:
    """Return content that consists of this text."""
    return (PlainText(text),)


def of_file(data: str | None, filename: str | None, where: str, field: str) -> Media:
    """Return the part for a file in base64 or in a data: URL.

    where: path of the field to name in errors about the part
    field: path of the field that contains the data
    """
    if data is None or not (data.startswith(READ_URLS) or names_media(filename)):
        return Media("file", where)
    is_image = data.startswith("data:image/")
    return Media("image" if is_image else "file", where, ImageSource(data, field, is_data=not data.startswith("data:")))


def in_a_row(parts: Iterable[MessagePart], separator: str) -> MessageContent:
    """Join parts into one message content. The separator is added before each text that is not the first part."""
    return tuple(_after(part, separator) if i else part for i, part in enumerate(parts))


def joined(first: MessageContent, then: MessageContent, separator: str) -> MessageContent:
    """Join two message contents. If one is empty, return the other without a separator."""
    if not then or not any(isinstance(part, Media) or part.before or part.text for part in first):
        return then or first
    return (*first, _after(then[0], separator), *then[1:])


def text_of(content: MessageContent) -> str:
    """Join all texts in a message's content into one string."""
    return "".join(part.before + part.text for part in content if isinstance(part, PlainText))


class ImagePlan:
    """Collects the images of a conversation, or of texts, in the order of their marks.

    model: the model that will read the images

    The methods raise UsageError naming the first part that the model cannot read.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.sources: list[ImageSource] = []
        self.marks: ImageMarks | None = None
        if model.info.images is not None:
            processor = image_processor(model.info.images)
            self.marks = ImageMarks(processor.placeholder, processor.wrapping)

    def text(self, content: MessageContent) -> str:
        """Return the content as one string, with a mark in place of each image and no separator around it."""
        pieces, follows_text = [], True
        for part in content:
            if isinstance(part, Media):
                pieces.append(self.mark(part))
            else:
                pieces.append((part.before if follows_text else "") + part.text)
            follows_text = isinstance(part, PlainText)
        return "".join(pieces)

    def mark(self, part: Media) -> str:
        """Add an image and return its mark."""
        is_known = part.kind == "image" or part.source is not None
        if self.marks is None or not is_known:
            reads = "text only" if self.marks is None else _READS[part.kind]
            if is_known and self._model.info.no_images:
                raise refuse(part.where, f"is {_NAMES[part.kind]}, but {self._model.name} {self._model.info.no_images}")
            remedy = ": send its text, or use a vision model" if part.kind == "file" and is_known else ""
            raise refuse(part.where, f"is {_NAMES[part.kind]}, but {self._model.name} reads {reads}{remedy}")
        if part.source is None:
            raise refuse(
                part.where, "is an image in a form that is not supported; send it as data:image/png;base64,..."
            )
        self.sources.append(part.source)
        return self.marks.add()


def _after(part: MessagePart, separator: str) -> MessagePart:
    return replace(part, before=separator) if isinstance(part, PlainText) else part
