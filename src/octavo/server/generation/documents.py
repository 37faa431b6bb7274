"""The texts of PDF documents in a conversation, for models that only read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.server.generation.content import Media, MessagePart, PlainText
from octavo.server.generation.spec import ChatSpec
from octavo.server.models.served_model import ServedModel

_BETWEEN = "\n\n"  # a document and other texts


async def with_texts(model: ServedModel, spec: ChatSpec) -> ChatSpec:
    """The conversation with the text layers of its documents in their places; a model that sees gets the pages.

    Raises UsageError that names the field.
    """
    files = [part for message in spec.messages for part in _files(message)]
    if model.info.images is not None or not files:
        return spec
    model.images.check_count([part.source for part in files if part.source is not None])
    messages = [await _with_text(model, message) if _files(message) else message for message in spec.messages]
    return dataclasses.replace(spec, messages=messages)


def _files(message: Mapping[str, Any]) -> list[Media]:
    parts = message.get("content") or ()
    return [part for part in parts if isinstance(part, Media) and part.kind == "file"]


async def _with_text(model: ServedModel, message: Mapping[str, Any]) -> dict[str, Any]:
    parts: list[MessagePart] = []
    follows_document = False
    for part in message["content"]:
        text = await _text(model, part)
        if text is not None:
            parts.append(PlainText(text, before=_BETWEEN if parts else ""))
        elif follows_document and isinstance(part, PlainText):
            parts.append(PlainText(part.text, before=_BETWEEN))
        else:
            parts.append(part)
        follows_document = text is not None
    return {**message, "content": tuple(parts)}


async def _text(model: ServedModel, part: MessagePart) -> str | None:
    """The text of a document; None: the part is another one."""
    if not isinstance(part, Media) or part.kind != "file" or part.source is None:
        return None
    return await model.images.text(part.source)
