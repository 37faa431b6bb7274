"""The body of `/v1/completions`, and its conversion to a model-independent request."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Field, Tag, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from octavo.errors import UsageError
from octavo.sampling_params import MAX_CHOICES
from octavo.server.errors import refuse
from octavo.server.generation.prompt import MAX_PROMPTS
from octavo.server.generation.spec import TextSpec, read_options
from octavo.server.http.json_body import WHOLE, WHOLE_NUMBERS, Int, Text
from octavo.server.protocols.cache_breakpoints import openai_breakpoints
from octavo.server.protocols.ignored_fields import COMPLETIONS, with_ignored
from octavo.server.protocols.protocol_fields import NumLogprobs, kind_of_inputs
from octavo.server.protocols.sampling_fields import SamplingFields

DEFAULT_MAX_TOKENS = 16


def _name_the_types(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Refuse lists of mixed types with an error about the whole list."""
    try:
        return read(value)
    except ValidationError as error:
        if len(error.errors()[0]["loc"]) < 2:
            raise
        message = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise UsageError(message, param="prompt", code="invalid_type") from None


_MANY = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
Prompts: TypeAlias = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Tag("texts"), _MANY]
    | Annotated[list[int], Field(min_length=1, fail_fast=True), WHOLE_NUMBERS, Tag("tokens")]
    | Annotated[list[Annotated[list[int], Field(fail_fast=True), WHOLE_NUMBERS]], Tag("token lists"), _MANY],
    Discriminator(kind_of_inputs),
    WrapValidator(_name_the_types),
]


class CompletionRequest(with_ignored(SamplingFields, COMPLETIONS)):  # type: ignore[misc]
    """One or more prompts, each as text or as token ids."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(json_schema_extra={"minimum": -1}), WHOLE] | None = None
    max_completion_tokens: Int | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None

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

    def to_spec(self, tenant: str) -> TextSpec:
        _check(self)
        # The engine generates at least one token. If none was requested, it is not shown.
        changed = {"prompt_logprobs": self.logprobs} if self.echoes_logprobs else {}
        changed |= {"max_tokens": 1} if self.only_prompt else {}
        params, constraint_field = self.model_copy(update=changed).sampling_params(DEFAULT_MAX_TOKENS)
        prompt = self.prompt
        return TextSpec(
            params=params,
            given=self.given_parameters,
            options=read_options(self, **self.draft_options()),
            constraint_field=constraint_field,
            tenant=tenant,
            breakpoints=openai_breakpoints(self.prompt_cache_options, self.prompt_cache_retention),
            is_followed=self.is_followed,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            prompts=[prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt,
        )


def _check(body: CompletionRequest) -> None:
    if body.truncation_side == "turns":
        raise UsageError("truncation_side 'turns' is for conversations; a prompt has none", param="truncation_side")
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
