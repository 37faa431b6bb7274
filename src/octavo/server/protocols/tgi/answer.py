"""Answers of Text Generation Inference's routes, with one event per token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.server.generation.events import ChoiceEnd, Event, TextDelta, TokenLogprobs
from octavo.server.generation.spec import TextSpec
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.shown_tokens import finite, most_likely, token_text
from octavo.server.protocols.tgi.errors import TGI
from octavo.server.protocols.tgi.request import GenerateRequest
from octavo.tokenizer.tokenizer import Detokenizer


class TgiWriter(AnswerWriter[GenerateRequest, TextSpec]):
    """Writes one event per token. The last token's event also contains the whole text.

    A token that may be the last one is held back until it is clear what follows. All other tokens are sent at once.
    """

    dialect = TGI.dialect

    def __post_init__(self) -> None:
        wanted = self.request.wanted
        self._params = self.spec.params.sampling
        self._num_top_tokens = wanted.top_n_tokens or 0
        self._detokenizer = Detokenizer(self.model.tokenizer, skip_special_tokens=False)
        self._text = self.request.inputs if wanted.return_full_text else ""
        self._num_tokens = 0
        self._tokens: list[dict[str, Any]] = []
        self._top_tokens: list[list[dict[str, Any]]] = []
        self._held: dict[str, Any] | None = None
        self._finish_reason = ""

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, TextDelta):
            self._text += event.text
            self._num_tokens += len(event.token_ids)
            for item in event.logprobs:
                yield from self._release()
                self._held = self._token_event(item)
            if self._held is not None and not self._may_be_last(event):
                yield from self._release()
        elif isinstance(event, ChoiceEnd):
            stop = "stop_sequence" if isinstance(event.stop_reason, str) else "eos_token"
            self._finish_reason = "length" if event.finish_reason == "length" else stop
            if self._tokens:
                self._tokens[-1]["text"] += self._detokenizer.flush()
                yield None, self._last_event()

    def body(self) -> dict[str, Any]:
        whole: dict[str, Any] = {"generated_text": self._text}
        if not self.request.wanted.has_details:
            return whole
        details = {**self._details(), "prefill": self._prefill(), "tokens": self._tokens}
        if self._num_top_tokens:
            details["top_tokens"] = self._top_tokens
        return {**whole, "details": details}

    def _release(self) -> Iterator[NamedEvent]:
        if self._held is not None:
            yield None, self._held
            self._held = None

    def _may_be_last(self, event: TextDelta) -> bool:
        length = len(self.generation.prompt_token_ids[0]) + self._num_tokens
        ends_text = event.token_ids[-1:] != () and event.token_ids[-1] in self.model.tokenizer.eos_token_ids
        return (
            self._num_tokens == self._params.max_tokens
            or length >= self.model.info.max_model_len
            or ends_text
            or self._params.structured_outputs is not None  # a grammar may end after any token
            or self._text.endswith(tuple(self._params.stop))
        )

    def _token_event(self, item: TokenLogprobs) -> dict[str, Any]:
        token_id = item.token_id
        token = self._token(token_id, item.entries[token_id].logprob, self._detokenizer.push([token_id]))
        self._tokens.append(token)
        event: dict[str, Any] = {"index": len(self._tokens), "token": token, "generated_text": None, "details": None}
        if self._num_top_tokens:
            event["top_tokens"] = [
                self._token(other, entry.logprob, self._name(other))
                for other, entry in most_likely(item.entries, self._num_top_tokens)
            ]
            self._top_tokens.append(event["top_tokens"])
        return event

    def _last_event(self) -> dict[str, Any]:
        last = self._held or {"index": len(self._tokens), "token": {**self._tokens[-1], "text": ""}}
        self._held = None
        details = {**self._details(), "input_length": len(self.generation.prompt_token_ids[0])}
        return {**last, "generated_text": self._text, "details": details}

    def _details(self) -> dict[str, Any]:
        counts = {"generated_tokens": self._num_tokens, "seed": self._params.seed, **self.truncation}
        return {"finish_reason": self._finish_reason, **counts}

    def _prefill(self) -> list[dict[str, Any]]:
        positions: Any = self.generation.prompt_logprobs[0]
        if not positions:
            return []
        token_ids = self.generation.prompt_token_ids[0]
        return [
            {"id": token_id, "text": self._name(token_id), "logprob": entries and finite(entries[token_id].logprob)}
            for token_id, entries in zip(token_ids, positions, strict=True)
        ]

    def _token(self, token_id: int, logprob: float, text: str) -> dict[str, Any]:
        special = token_id in self.model.tokenizer.special_token_ids
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": special}

    def _name(self, token_id: int) -> str:
        return token_text(self.model.tokenizer, token_id)[0]
