"""The content of messages in every protocol: an ordered row of parts, from the request to the chat template.

To read another kind of part, add a class to `MessagePart`, let the protocols make it, and give it to the template here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from octavo.server.errors import refuse


@dataclass(frozen=True, slots=True)
class PlainText:
    """before: stands between this text and the one before it, where a template takes a message as one string."""

    text: str
    before: str = ""


MediaKind: TypeAlias = Literal["image", "audio", "video", "file"]


@dataclass(frozen=True, slots=True)
class Media:
    """A part that is no text, and that no model here reads. where: the field of the request that holds it."""

    kind: MediaKind
    where: str


MessagePart: TypeAlias = PlainText | Media
MessageContent: TypeAlias = tuple[MessagePart, ...]

_NAMES: dict[MediaKind, str] = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file"}


def plain(text: str) -> MessageContent:
    """The content that is this text."""
    return (PlainText(text),)


def in_a_row(parts: Iterable[MessagePart], separator: str) -> MessageContent:
    """These parts as one content; the separator stands before each text but the first part."""
    return tuple(_after(part, separator) if i else part for i, part in enumerate(parts))


def joined(first: MessageContent, then: MessageContent, separator: str) -> MessageContent:
    """One content after another. Nothing separates it from an empty one, which is left out."""
    if not then or not any(isinstance(part, Media) or part.before or part.text for part in first):
        return then or first
    return (*first, _after(then[0], separator), *then[1:])


def text_of(content: MessageContent) -> str:
    """The texts of a content as one string."""
    return "".join(part.before + part.text for part in content if isinstance(part, PlainText))


def template_content(content: MessageContent, model: str) -> str:
    """The content as chat templates take it. model: its name. Raises UsageError for a part that the model cannot
    read."""
    check_readable((part for part in content if isinstance(part, Media)), model)
    return text_of(content)


def check_readable(media: Iterable[Media], model: str) -> None:
    """Raises UsageError that names the first of these parts, and the model."""
    for part in media:
        raise refuse(part.where, f"is {_NAMES[part.kind]}, but {model} reads text only")


def _after(part: MessagePart, separator: str) -> MessagePart:
    return replace(part, before=separator) if isinstance(part, PlainText) else part
