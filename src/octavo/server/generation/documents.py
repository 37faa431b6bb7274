"""Replaces PDF documents in a conversation with their text, if they are to be read as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.config import is_read_as_text
from octavo.server.generation.content import Media, MessagePart, PlainText
from octavo.server.generation.spec import ChatSpec
from octavo.server.models.served_model import ServedModel

_BETWEEN = "\n\n"  # between a document and other texts


async def with_texts(model: ServedModel, spec: ChatSpec) -> ChatSpec:
    """Replace documents in the conversation with their text layers, unless the model is to see the pages.

    Raises UsageError naming the field.
    """
    media = [part for message in spec.messages for part in message.get("content") or () if isinstance(part, Media)]
    if not any(_may_be_text(model, part) for part in media):
        return spec
    model.images.check_count([part.source for part in media if part.source is not None])
    return dataclasses.replace(spec, messages=[await _with_text(model, message) for message in spec.messages])


def _may_be_text(model: ServedModel, part: MessagePart) -> bool:
    """Return whether the part would be read as text if its file is a document."""
    if not isinstance(part, Media) or part.source is None:
        return False
    sees = model.info.images is not None
    return (sees or part.kind == "file") and is_read_as_text(part.pdf_as or model.info.pdf_as, sees=sees)


async def _with_text(model: ServedModel, message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content") or ()
    if not any(_may_be_text(model, part) for part in content):
        return message
    parts: list[MessagePart] = []
    follows_document = False
    for given in content:
        part = await _read(model, given) if _may_be_text(model, given) else given
        is_document = part is not given and isinstance(part, PlainText)
        if isinstance(part, PlainText) and (follows_document or is_document):
            part = PlainText(part.text, before=_BETWEEN if parts else "")
        parts.append(part)
        follows_document = is_document
    return {**message, "content": tuple(parts)}


async def _read(model: ServedModel, part: Media) -> MessagePart:
    """Return a document's text. For any other file, return the part with its fetched data."""
    assert part.source is not None
    source = await model.images.read(part.source)
    text = await model.images.text(source)
    return dataclasses.replace(part, source=source) if text is None else PlainText(text)
