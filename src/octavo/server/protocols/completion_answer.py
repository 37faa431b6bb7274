"""The answer to a text completion in OpenAI's older shapes with vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.outputs import Logprob
from octavo.server.generation.events import Choice, ChoiceEnd, ChoiceEvent, Event, TextDelta, TokenLogprobs, Usage
from octavo.server.generation.running import Generation
from octavo.server.generation.spec import TextSpec
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import NamedEvent
from octavo.server.protocols.completion_request import CompletionRequest
from octavo.server.protocols.openai_answer import (
    MIN_LOGPROB,
    OpenAIWriter,
    end_of,
    most_likely,
    prompt_logprobs,
    token_text,
)
from octavo.tokenizer.tokenizer import Tokenizer


class CompletionWriter(OpenAIWriter[CompletionRequest, TextSpec]):
    """Writes text completions, echoed prompts and scores."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, spec: TextSpec, model: ServedModel, generation: Generation) -> None:
        super().__init__(body, spec, model, generation)
        self._legacy_logprobs: dict[int, LegacyLogprobs] = {}  # by choice

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if self.request.only_prompt:  # the engine generates a token all the same
            if isinstance(event, TextDelta):
                return iter(())
            if isinstance(event, Usage):
                event = replace(event, num_completion_tokens=0)
            elif isinstance(event, ChoiceEnd):
                event = replace(event, finish_reason="length", stop_reason=None)
        return super().push(event)

    def first_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        """The prompt, if it is echoed or its tokens are reported."""
        request, prompt = self.request, self._prompt_of(index)
        extra: dict[str, Any] = {}
        if request.echo and request.logprobs is not None:
            extra["logprobs"] = self.logprobs(index, ())
        if request.return_token_ids:
            extra["prompt_token_ids"] = self.generation.prompt_token_ids[prompt]
        if request.echo or extra:
            yield self.chunk(index, {"text": self._echoed(prompt) if request.echo else ""}, **extra)

    def content(self, event: ChoiceEvent) -> dict[str, Any]:
        return {"text": event.text if isinstance(event, TextDelta) else ""}

    def logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        found: list[tuple[int, Mapping[int, Logprob] | None]] = [(token.token_id, token.entries) for token in tokens]
        legacy = self._legacy_logprobs.get(index)
        if legacy is None:
            legacy = self._legacy_logprobs[index] = LegacyLogprobs(self.model.tokenizer, self.request.logprobs or 0)
            if self.request.echo:
                prompt = self._prompt_of(index)
                token_ids = self.generation.prompt_token_ids[prompt]
                entries = self.generation.prompt_logprobs[prompt] or [None] * len(token_ids)
                found = [*zip(token_ids, entries, strict=True), *found]
        return legacy.take(found)

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        request, prompt = self.request, self._prompt_of(index)
        body: dict[str, Any] = {
            "index": index,
            "text": (self._echoed(prompt) if request.echo else "") + (choice.text or ""),
            "logprobs": None if request.logprobs is None else self.logprobs(index, choice.logprobs),
            **end_of(choice),
        }
        if request.return_token_ids:
            body["prompt_token_ids"] = self.generation.prompt_token_ids[prompt]
            body["token_ids"] = choice.token_ids
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.generation.prompt_logprobs[prompt])
        return body

    def _prompt_of(self, index: int) -> int:
        return index // self.spec.params.num_choices

    def _echoed(self, prompt: int) -> str:
        """The prompt as text: as it was sent, or the text of its tokens."""
        sent = self.spec.prompts[prompt]
        if isinstance(sent, str) and not self.generation.num_truncated_tokens:
            return sent
        # A client that sent ids gets all of them back. A text does not show the control tokens that were added to it.
        skips = isinstance(sent, str)
        return self.model.tokenizer.decode(self.generation.prompt_token_ids[prompt], skip_special_tokens=skips)


class LegacyLogprobs:
    """The `logprobs` of one choice: parallel lists with one entry a token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._position = 0  # where the next token's text begins, in characters

    def take(self, tokens: Iterable[tuple[int, Mapping[int, Logprob] | None]]) -> dict[str, list[Any]]:
        """The lists of the next tokens. The first token of a prompt has no probability: nothing comes before it."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entries in tokens:
            text, _ = token_text(self._tokenizer, token_id)
            logprob, top = None, None
            if entries is not None:
                logprob = max(entries[token_id].logprob, MIN_LOGPROB)
                # As with OpenAI, the token itself is included even if it is not among the most likely ones.
                shown = dict(most_likely(entries, self._num_top)) | {token_id: entries[token_id]}
                top = {token_text(self._tokenizer, item)[0]: max(e.logprob, MIN_LOGPROB) for item, e in shown.items()}
            for values, value in zip(lists.values(), (text, logprob, top, self._position), strict=True):
                values.append(value)
            self._position += len(text)
        return lists
