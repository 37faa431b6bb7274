"""The bodies of llama.cpp's `/completion` and `/infill`, and their conversion to model-independent requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from octavo.sampling_params import MAX_CHOICES, MAX_LOGIT_BIAS, SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.content import Media
from octavo.server.generation.infill import Infill
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.prompt import MAX_PROMPTS
from octavo.server.generation.spec import TextOrIds, TextSpec, constraint_named, read_options
from octavo.server.http.json_body import WHOLE, Int, RequestModel, Text
from octavo.server.models.image_reader import ImageSource
from octavo.server.protocols.ignored_fields import LLAMA_CPP, with_ignored
from octavo.server.protocols.llama_sampling import LlamaDrafts, LlamaSampling
from octavo.server.protocols.protocol_fields import AnsweredFields, NullIsAbsent, NumLogprobs
from octavo.server.protocols.sampling_fields import check_grammar

_BAN = -100.0
FIELD_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "suffix": "input_suffix",
}


class PromptObject(NullIsAbsent):
    """A text in which each MEDIA_MARKER represents an image.

    multimodal_data: the images in base64
    """

    prompt_string: Text
    multimodal_data: list[Any] | None = None


MEDIA_MARKER = f"<__media_{secrets.token_hex(16)}__>"
"""The mark of an image in a prompt. It changes at every start, so that no text can forge it; `/props` returns it."""


Piece: TypeAlias = Int | Text
# A list of ids that may contain texts is one prompt; a list of texts and lists is several prompts.
Several: TypeAlias = Annotated[list[Text | PromptObject | list[Piece]], Field(max_length=MAX_PROMPTS)]
Prompts: TypeAlias = Text | PromptObject | list[Piece] | Several
Bias: TypeAlias = "dict[str, Any] | list[Any]"


class AdapterScale(RequestModel):
    """An adapter from the list of `/lora-adapters`, and its scale. Adapters that a request omits are not applied."""

    id: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]
    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0


class LlamaRequest(with_ignored(AnsweredFields, LLAMA_CPP), LlamaSampling, LlamaDrafts):  # type: ignore[misc]
    """The fields that `/completion` and `/infill` share.

    n_predict: -1 means no limit, 0 only computes the prompt
    n_cmpl: number of choices
    """

    n_predict: Int | None = None
    max_tokens: Int | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    n_probs: NumLogprobs | None = None
    post_sampling_probs: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None
    grammar: Text | None = None
    json_schema: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[Text] | None = None
    lora: list[AdapterScale] | None = None
    samplers: list[Any] | None = None

    @property
    def num_predicted(self) -> int:
        """Maximum number of tokens, or -1 for no limit."""
        limit = self.n_predict if self.n_predict is not None else self.max_tokens
        return -1 if limit is None else limit

    @property
    def adapter_scales(self) -> Sequence[tuple[int, float]] | None:
        return None if self.lora is None else [(each.id, each.scale) for each in self.lora]

    def prompts(self) -> Sequence[TextOrIds]:
        """Return the prompts. Each gets its own answer."""
        raise NotImplementedError

    def media(self) -> Sequence[Media]:
        """Return the parts of the prompt that are not text."""
        return ()

    def to_spec(self, tenant: str) -> TextSpec:
        if self.samplers:
            raise refuse("samplers", "sets the order of samplers, but the order is fixed here; leave it out")
        if self.max_tokens is not None and self.max_tokens != self.num_predicted:
            raise refuse("max_tokens", f"is {self.max_tokens} and n_predict is {self.n_predict}; give one of them")
        arguments, limit = self.read_sampling(), self.num_predicted
        if limit < -1:
            reason = f"is {limit}; the smallest value is -1, for no limit"
            raise refuse("n_predict", reason, "integer_below_min_value")
        constraint_field, structured = self._constraint()
        params = SamplingParams(
            **arguments,
            n=self.n_cmpl or 1,
            max_tokens=None if limit == -1 else limit or 1,
            logprobs=self.n_probs or None,
            processed_logprobs=bool(self.post_sampling_probs),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=read_bias(self.logit_bias),
            structured_outputs=structured,
        )
        return TextSpec(
            prompts=self.prompts(),
            media=self.media(),
            media_marker=MEDIA_MARKER,
            params=params,
            given=self.given_names(arguments),
            is_followed=bool(self.stream and (self.timings_per_token or self.return_progress)),
            options=read_options(self, **self.draft_options()),
            tenant=tenant,
            constraint_field=constraint_field,
        )

    def _constraint(self) -> tuple[str, StructuredOutputsParams | None]:
        if self.grammar and self.json_schema is not None:
            raise refuse("grammar", "cannot be combined with json_schema; give one of them", "invalid_value")
        if self.json_schema is not None:
            check_schema(self.json_schema, "json_schema")
            return "json_schema", StructuredOutputsParams(json=self.json_schema)
        if self.grammar:
            check_grammar(self.grammar, "grammar")
            with constraint_named("grammar"):
                return "grammar", StructuredOutputsParams(grammar=self.grammar)
        return "structured_outputs", None


class CompletionRequest(LlamaRequest):
    """One or more texts to continue."""

    prompt: Prompts

    def prompts(self) -> Sequence[TextOrIds]:
        given: Any = self.prompt
        if isinstance(given, PromptObject):
            return [given.prompt_string]
        if isinstance(given, str) or any(isinstance(item, int) for item in given):
            return [given]
        if not 0 < len(given) <= MAX_PROMPTS:
            raise refuse("prompt", f"has {len(given)} prompts; 1 to {MAX_PROMPTS} are allowed", "invalid_value")
        return [item.prompt_string if isinstance(item, PromptObject) else item for item in given]

    def media(self) -> Sequence[Media]:
        several = self.prompt if isinstance(self.prompt, list) else ()
        objects = {"prompt": self.prompt, **{f"prompt[{i}]": item for i, item in enumerate(several)}}
        return [
            Media(
                "image",
                f"{path}.multimodal_data[{i}]",
                ImageSource(data, f"{path}.multimodal_data[{i}]", is_data=True) if isinstance(data, str) else None,
            )
            for path, item in objects.items()
            if isinstance(item, PromptObject)
            for i, data in enumerate(item.multimodal_data or ())
        ]


class ExtraFile(NullIsAbsent):
    filename: Text | None = None
    text: Text


class InfillRequest(LlamaRequest):
    """A gap between two texts to fill.

    prompt: the beginning of the text in the gap
    input_extra: other files of the project
    """

    input_prefix: Text
    input_suffix: Text
    prompt: Text | None = None
    input_extra: list[ExtraFile] | None = None

    def prompts(self) -> Sequence[TextOrIds]:
        files = [(file.filename or "tmp", file.text) for file in self.input_extra or ()]
        return [Infill(self.input_prefix, self.input_suffix, self.prompt or "", files)]


def named_texts(bias: Bias | None) -> list[str]:
    """Return the texts whose tokens a bias refers to; see `with_tokens`."""
    return [key for key, _ in _pairs(bias) if isinstance(key, str) and not _is_id(key)]


def with_tokens(bias: Bias | None, tokens: Mapping[str, Sequence[int]]) -> list[Any]:
    """Return the bias with each text replaced by its tokens.

    tokens: tokens of each of `named_texts`
    """
    pairs: list[Any] = []
    for key, value in _pairs(bias):
        pairs += [[token_id, value] for token_id in tokens[key]] if key in tokens else [[key, value]]
    return pairs


def read_bias(bias: Bias | None) -> dict[int, float] | None:
    """Return token id -> bias. A bias of `false` bans the token. Raises UsageError for any other keys and values."""
    found: dict[int, float] = {}
    for key, value in _pairs(bias):
        if isinstance(key, bool) or not (isinstance(key, int) or _is_id(key)):
            raise refuse("logit_bias", f"names {key!r:.40}, but there is no such token", "invalid_value")
        if value is not False and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise refuse("logit_bias", "must have numbers, or false to ban a token", "invalid_type")
        found[int(key)] = _BAN if value is False else float(value)
    return found or None


def _is_id(key: object) -> bool:
    return isinstance(key, str) and key.isdecimal() and key.isascii() and len(key) < 12


def _pairs(bias: Bias | None) -> list[tuple[Any, Any]]:
    if isinstance(bias, dict):
        return list(bias.items())
    pairs = bias or []
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs) or len(pairs) > MAX_LOGIT_BIAS:
        raise refuse("logit_bias", f"must be a list of at most {MAX_LOGIT_BIAS} pairs [token, bias]", "invalid_value")
    return [(key, value) for key, value in pairs]
