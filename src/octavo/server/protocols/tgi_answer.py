"""The answer of Text Generation Inference: one event a token, and the details of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.generation.events import ChoiceEnd, Event, TextDelta, TokenLogprobs
from octavo.server.generation.running import Generation
from octavo.server.generation.spec import TextSpec
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.openai_answer import MIN_LOGPROB, most_likely, token_text
from octavo.server.protocols.protocol_errors import tgi_body
from octavo.server.protocols.tgi_request import GenerateRequest
from octavo.tokenizer.detokenizer import Detokenizer


class TgiWriter(AnswerWriter[GenerateRequest, TextSpec]):
    """Writes one event a token. The last token's event also has the whole text. A token that may be the last one waits
    for what comes after it; all others go out at once."""

    def __init__(self, body: GenerateRequest, spec: TextSpec, model: ServedModel, generation: Generation) -> None:
        super().__init__(body, spec, model, generation)
        self._params = spec.params.sampling
        self._num_top_tokens = body.wanted.top_n_tokens or 0
        self._detokenizer = Detokenizer(model.tokenizer, skip_special_tokens=False)
        self._text = body.inputs if body.wanted.return_full_text else ""
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
            self._end(event)
            if self._tokens:
                yield None, self._last_event()

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        yield None, tgi_body(error, self.generation.request_id)

    def body(self) -> dict[str, Any]:
        whole: dict[str, Any] = {"generated_text": self._text}
        if not self.request.wanted.has_details:
            return whole
        details: dict[str, Any] = {
            "finish_reason": self._finish_reason,
            "generated_tokens": self._num_tokens,
            "seed": self._params.seed,
            "prefill": self._prefill(),
            "tokens": self._tokens,
        }
        if self._num_top_tokens:
            details["top_tokens"] = self._top_tokens
        return {**whole, "details": details | self.truncation}

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
            or self._params.structured_outputs is not None  # which may end after any token
            or self._text.endswith(tuple(self._params.stop_strings))
        )

    def _token_event(self, item: TokenLogprobs) -> dict[str, Any]:
        token_id = item.token_id
        token = self._token(token_id, item.entries[token_id].logprob, self._detokenizer.push([token_id]))
        self._tokens.append(token)
        event: dict[str, Any] = {
            "index": len(self._tokens),
            "token": token,
            "generated_text": None,
            "details": None,
        }
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
        details = {
            "finish_reason": self._finish_reason,
            "generated_tokens": self._num_tokens,
            "input_length": len(self.generation.prompt_token_ids[0]),
            "seed": self._params.seed,
        }
        return {**last, "generated_text": self._text, "details": details | self.truncation}

    def _end(self, end: ChoiceEnd) -> None:
        if self._tokens:
            self._tokens[-1]["text"] += self._detokenizer.flush()
        if end.finish_reason == "length":
            self._finish_reason = "length"
        else:
            self._finish_reason = "stop_sequence" if isinstance(end.stop_reason, str) else "eos_token"

    def _prefill(self) -> list[dict[str, Any]]:
        positions: Any = self.generation.prompt_logprobs[0]
        if not positions:
            return []
        token_ids = self.generation.prompt_token_ids[0]
        return [
            {
                "id": token_id,
                "text": self._name(token_id),
                "logprob": entries and max(entries[token_id].logprob, MIN_LOGPROB),
            }
            for token_id, entries in zip(token_ids, positions, strict=True)
        ]

    def _token(self, token_id: int, logprob: float, text: str) -> dict[str, Any]:
        special = token_id in self.model.tokenizer.special_token_ids
        return {"id": token_id, "text": text, "logprob": max(logprob, MIN_LOGPROB), "special": special}

    def _name(self, token_id: int) -> str:
        return token_text(self.model.tokenizer, token_id)[0]
