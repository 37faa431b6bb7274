"""`/v1/responses/compact`: reduces a long conversation to its user messages and a summary that the model writes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

from octavo.sampling_params import SamplingParams
from octavo.server.generation.content import joined, plain
from octavo.server.generation.events import Event, TextDelta, Usage
from octavo.server.generation.spec import ChatSpec, read_options
from octavo.server.http.json_body import Int
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.ignored_fields import COMPACTION, with_ignored
from octavo.server.protocols.responses.answer import usage_of
from octavo.server.protocols.responses.request import ItemFields, MessageItem
from octavo.server.protocols.responses.stored_items import stored_items
from octavo.server.protocols.sealed_text import seal

_MAX_TOKENS = 2048
_ASK = (
    "Please summarize our conversation so far: what I asked for, what was done and found (names, paths, figures and "
    "decisions), and what is left to do. Write the summary and nothing else."
)
_BEGINNING = "Summary of the conversation so far:\n"


class CompactRequest(with_ignored(ItemFields, COMPACTION)):  # type: ignore[misc]
    """The conversation to compact. If it is too long for the context, its oldest turns are dropped first.

    max_output_tokens: maximum length of the summary
    """

    stream: Literal[False] | None = None
    max_output_tokens: Int | None = None

    def to_spec(self, tenant: str) -> ChatSpec:
        messages, ask = self.chat_messages(), plain(_ASK)
        if messages[-1]["role"] == "user":  # templates want alternating roles
            messages[-1]["content"] = joined(messages[-1]["content"], ask, "\n\n")
        else:
            messages.append({"role": "user", "content": ask})
        return ChatSpec(
            params=SamplingParams(max_tokens=self.max_output_tokens or _MAX_TOKENS),
            tenant=tenant,
            options=read_options(self),
            truncate_prompt_tokens=-1,
            truncation_side="turns",
            messages=messages,
        )


class CompactionWriter(AnswerWriter[CompactRequest, ChatSpec]):
    """Writes the user messages and the item that contains the summary."""

    def __post_init__(self) -> None:
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
        elif isinstance(event, Usage):
            self._usage = {**usage_of(event), **self.truncation}
        return iter(())

    def body(self) -> dict[str, Any]:
        items = [item for item in self.request.all_items if isinstance(item, MessageItem) and item.role == "user"]
        summary = seal(_BEGINNING + "".join(self._texts).strip())
        compaction = {"id": f"cmp_{secrets.token_hex(16)}", "type": "compaction", "encrypted_content": summary}
        return {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*stored_items(items), compaction],
            "usage": self._usage,
        }
