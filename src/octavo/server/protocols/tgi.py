"""The bodies and answers of Text Generation Inference, and the request that a body makes of a model."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.events import ChoiceEnd, Event, TextDelta, TokenLogprobs
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import TextSpec, given, read_options
from octavo.server.http.json_body import WHOLE, Int, RequestModel, Text, quote
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.ignored_fields import TGI as TGI_FIELDS
from octavo.server.protocols.ignored_fields import with_ignored
from octavo.server.protocols.openai_answer import finite, most_likely, token_text
from octavo.server.protocols.protocol_errors import TGI
from octavo.server.protocols.protocol_fields import AnsweredFields, NumLogprobs, with_parameters
from octavo.tokenizer.tokenizer import Detokenizer

DEFAULT_MAX_NEW_TOKENS = 100

_NUMBERS = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed")
FIELD_NAMES = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "structured_outputs": "parameters.grammar",
    "logprobs": "parameters.top_n_tokens",
    **{name: f"parameters.{name}" for name in (*_NUMBERS, "stop")},
}


class Grammar(RequestModel):
    """The form of the text. value: a JSON schema; for json_schema `{"schema": ...}`; for regex its text."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | Text


class Parameters(with_parameters(RequestModel, *_NUMBERS)):  # type: ignore[misc]
    """Generation is greedy without do_sample and without any value that shapes the distribution."""

    max_new_tokens: Int | None = None
    do_sample: bool | None = None
    stop: list[Text] | None = None
    truncate: Annotated[int, Field(ge=1), WHOLE] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: NumLogprobs | None = None
    grammar: Grammar | None = None
    best_of: Int | None = None
    watermark: bool | None = None
    adapter_id: Text | None = None

    @property
    def has_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)

    @property
    def samples(self) -> bool:
        shapes = {self.temperature, self.top_p, self.typical_p} - {None, 1.0}
        return bool(self.do_sample or self.top_k is not None or shapes)


class GenerateRequest(with_ignored(AnsweredFields, TGI_FIELDS)):  # type: ignore[misc]
    """stream: for `/` and `/generate`. model: an addition to TGI, for servers with several models."""

    inputs: Text
    parameters: Parameters | None = None

    @property
    def wanted(self) -> Parameters:
        return self.parameters or Parameters()

    def to_spec(self, tenant: str) -> TextSpec:
        parameters = self.wanted
        named = given(parameters, *_NUMBERS) if parameters.samples else SamplingParams.__dataclass_fields__
        _refuse_unsupported(parameters, bool(self.stream))
        return TextSpec(
            prompts=[self.inputs],
            params=_sampling_params(parameters, bool(self.stream)),
            given=frozenset(named),
            options=read_options(self),
            tenant=tenant,
            truncate_prompt_tokens=parameters.truncate,
        )


def _refuse_unsupported(wanted: Parameters, stream: bool) -> None:
    lonely_tokens = wanted.top_n_tokens and not (stream or wanted.has_details)
    has_low_top_k = wanted.top_k is not None and wanted.top_k < 1
    greedy = "must be above 0; leave it and do_sample out for the most likely token"
    only_one = f"is {quote(wanted.best_of)}; it can only be 1"
    no_adapters = "names an adapter, and this server has none; leave it out"
    for name, is_wrong, reason, code in (
        ("best_of", wanted.best_of not in (None, 1), only_one, "unsupported_value"),
        ("watermark", wanted.watermark, "is not supported; leave it out", "unsupported_value"),
        ("adapter_id", wanted.adapter_id is not None, no_adapters, "unsupported_value"),
        ("decoder_input_details", wanted.decoder_input_details and stream, "needs stream: false", "unsupported_value"),
        ("top_n_tokens", lonely_tokens, "needs details: true, or a stream", "invalid_value"),
        ("temperature", wanted.temperature == 0, greedy, "decimal_below_min_value"),
        ("top_k", has_low_top_k, "must be at least 1; leave it out for all tokens", "integer_below_min_value"),
    ):
        if is_wrong:
            raise refuse(f"parameters.{name}", reason, code)


def _sampling_params(wanted: Parameters, stream: bool) -> SamplingParams:
    arguments = given(wanted, *_NUMBERS, "stop")
    if not wanted.samples:
        arguments["temperature"] = 0.0
    elif wanted.seed is None:
        arguments["seed"] = secrets.randbits(63)  # it is reported, so that the answer can be reproduced
    return SamplingParams(
        **arguments,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if wanted.max_new_tokens is None else wanted.max_new_tokens,
        include_stop_str_in_output=True,
        logprobs=(wanted.top_n_tokens or 0) if stream or wanted.has_details else None,
        prompt_logprobs=0 if wanted.decoder_input_details else None,
        structured_outputs=None if wanted.grammar is None else _structured(wanted.grammar),
    )


def _structured(grammar: Grammar) -> StructuredOutputsParams:
    param = "parameters.grammar.value"
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            raise refuse(param, "must be a regular expression in a string", "invalid_type")
        return StructuredOutputsParams(regex=grammar.value)
    schema: Any = grammar.value
    if grammar.type == "json_schema":
        if not isinstance(schema, dict) or "schema" not in schema:
            raise refuse(param, 'must be an object with the schema as "schema"', "missing_required_parameter")
        schema = schema["schema"]
    if not isinstance(schema, str):
        check_schema(schema, param)
    return StructuredOutputsParams(json=schema)


class TgiWriter(AnswerWriter[GenerateRequest, TextSpec]):
    """Writes one event a token. The last token's event also has the whole text. A token that may be the last one waits
    for what comes after it; all others go out at once."""

    dialect = TGI

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
            or self._params.structured_outputs is not None  # which may end after any token
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
