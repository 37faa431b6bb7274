"""The body of `/v1/completions`, and the request that it makes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from octavo.errors import UsageError
from octavo.sampling_params import MAX_CHOICES, MAX_LOGPROBS, BeamSearchParams, SamplingParams
from octavo.server.errors import refuse
from octavo.server.generation.prompt import MAX_PROMPTS
from octavo.server.generation.spec import TextSpec, read_options
from octavo.server.http.json_body import Int, Text
from octavo.server.protocols.sampling_fields import SamplingFields

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """One prompt or several, each as text or as token ids."""

    prompt: Text | list[Any] = Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    )
    echo: bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_prompt(self) -> bool:
        """True if the prompt is scored and nothing is generated."""
        return self.max_tokens == 0 and bool(self.echo)

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


def to_text_spec(body: CompletionRequest, tenant: str) -> TextSpec:
    """The request to a model. Raises UsageError for what cannot be honoured."""
    prompts = _prompts(body.prompt)
    _check(body)
    params = _sampling_params(body)
    limit, side = body.truncation()
    return TextSpec(
        params=params,
        options=read_options(body),
        constraint_field=body.constraint_field,
        tenant=tenant,
        truncate_prompt_tokens=limit,
        truncation_side=side,
        max_tokens_may_shrink=body.max_tokens is None,
        prompts=prompts,
    )


def _prompts(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """One prompt or several; a list of numbers is one prompt. Raises UsageError if the list is mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refuse("prompt", "is an empty list; give at least one", "empty_array")
    if _is_token_id(prompt[0]):
        return [_token_ids(prompt)]
    if len(prompt) > MAX_PROMPTS:
        reason = f"has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed; send several requests"
        raise refuse("prompt", reason, "array_above_max_length")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) for item in prompt):
        return [_token_ids(item) for item in prompt]
    raise _wrong_type()


def _token_ids(items: list[Any]) -> list[int]:
    if not all(map(_is_token_id, items)):
        raise _wrong_type()
    return [int(item) for item in items]


def _is_token_id(item: object) -> bool:
    return (isinstance(item, int) and not isinstance(item, bool)) or (isinstance(item, float) and item.is_integer())


def _wrong_type() -> UsageError:
    message = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    return UsageError(message, param="prompt", code="invalid_type")


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None:
        count = 1 if body.n is None else body.n
        if body.best_of < count:
            raise refuse("best_of", f"is {body.best_of}, less than n {count}", "invalid_value")
        if body.best_of > 1 and body.stream:
            raise refuse("best_of", "cannot be streamed; use n", "invalid_value")
        if body.best_of > count:
            reason = f"is {body.best_of}, more than n {count}: choosing among answers is not supported"
            raise refuse("best_of", reason, "unsupported_value")
    if body.prompt_logprobs is not None and (body.stream or body.echoes_logprobs):
        reason = "needs stream: false, and cannot be combined with echo and logprobs"
        raise refuse("prompt_logprobs", reason, "invalid_value")


def _sampling_params(body: CompletionRequest) -> SamplingParams | BeamSearchParams:
    # The engine makes at least one token. If none was asked for, it is not shown.
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else 1 if body.only_prompt else body.max_tokens
    if body.echoes_logprobs:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    return body.sampling_params(max_tokens, body.logprobs)
