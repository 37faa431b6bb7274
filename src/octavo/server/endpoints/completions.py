"""`POST /v1/completions`: texts to continue and texts to score, as OpenAI's and vLLM's clients ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.sampling_params import MAX_CHOICES, MAX_LOGPROBS, BeamSearchParams, SamplingParams
from octavo.server.endpoints.chat_completions import LAST_EVENT
from octavo.server.generation.naming import constraint_named
from octavo.server.generation.prompt import MAX_PROMPTS
from octavo.server.generation.run import start_text
from octavo.server.generation.spec import Generation, TextSpec, read_options
from octavo.server.http.json_body import Int, JsonRoute, Text
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import COMPLETION, streamed_answer
from octavo.server.protocols.answering import AnswerWriter, answer, tenant_of
from octavo.server.protocols.completion_answer import CompletionWriter, TextOptions
from octavo.server.protocols.protocol_errors import request_id_of
from octavo.server.protocols.sampling_fields import SamplingFields
from octavo.server.state import state_of

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JsonRoute, tags=["openai"])


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


@router.post("/v1/completions", responses=streamed_answer(COMPLETION))
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continues texts; with `stream` in server-sent events. `max_tokens: 0` with `echo` and `logprobs` scores them."""
    prompts = _prompts(body.prompt)
    _check(body)
    params = _sampling_params(body)
    limit, side = body.truncation()
    spec = TextSpec(
        params=params,
        prompts=prompts,
        options=read_options(body),
        tenant=tenant_of(request),
        truncate_prompt_tokens=limit,
        truncation_side=side,
        max_tokens_may_shrink=body.max_tokens is None,
    )

    async def start(model: ServedModel) -> tuple[Generation, AnswerWriter]:
        with constraint_named(body.constraint_param):
            generation = await start_text(state_of(request), model, spec, request_id_of(request))
        return generation, CompletionWriter(model, generation, _options(body, spec))

    return await answer(request, body.model, start, stream=bool(body.stream), last=LAST_EVENT)


def _prompts(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """One or several: a list of numbers is one prompt. Raises UsageError where the list is mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise UsageError("prompt is an empty list; give at least one", param="prompt", code="empty_array")
    if _is_token_id(prompt[0]):
        return [_token_ids(prompt)]
    if len(prompt) > MAX_PROMPTS:
        message = f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed: send several requests"
        raise UsageError(message, param="prompt", code="array_above_max_length")
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
            raise UsageError(f"best_of is {body.best_of}, less than n {count}", param="best_of", code="invalid_value")
        if body.best_of > 1 and body.stream:
            raise UsageError("best_of cannot be streamed; use n", param="best_of", code="invalid_value")
        if body.best_of > count:
            message = f"best_of is {body.best_of}, more than n {count}: choosing among answers is not supported"
            raise UsageError(message, param="best_of", code="unsupported_value")
    if body.prompt_logprobs is not None and (body.stream or _shows_prompt_logprobs(body)):
        message = "prompt_logprobs needs stream: false, and cannot be combined with echo and logprobs"
        raise UsageError(message, param="prompt_logprobs", code="invalid_value")


def _shows_prompt_logprobs(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.logprobs is not None


def _only_prompt(body: CompletionRequest) -> bool:
    return body.max_tokens == 0 and bool(body.echo)


def _sampling_params(body: CompletionRequest) -> SamplingParams | BeamSearchParams:
    # The engine makes one token at least; of a request for none it is not shown.
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else 1 if _only_prompt(body) else body.max_tokens
    if _shows_prompt_logprobs(body):
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    return body.sampling_params(max_tokens, body.logprobs)


def _options(body: CompletionRequest, spec: TextSpec) -> TextOptions:
    return TextOptions(
        stream=bool(body.stream),
        num_top_logprobs=body.logprobs,
        includes_usage=body.includes_usage,
        has_running_usage=body.has_running_usage,
        has_token_ids=bool(body.return_token_ids),
        has_timings=bool(body.timings),
        reports_truncation=body.truncate_prompt_tokens is not None,
        prompts=spec.prompts,
        num_choices=spec.params.num_choices,
        echo=bool(body.echo),
        only_prompt=_only_prompt(body),
        has_prompt_logprobs=body.prompt_logprobs is not None,
    )
