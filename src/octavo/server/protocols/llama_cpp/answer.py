"""Answers of llama.cpp's `/completion` and `/infill`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from octavo.engine.client import ModelInfo
from octavo.generation_request import RequestOptions
from octavo.outputs import Logprob
from octavo.sampling_params import SamplingParams
from octavo.server.generation.events import ChoiceEnd, Event, PromptProgress, TextDelta, TokenLogprobs, Usage
from octavo.server.generation.spec import TextSpec
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.llama_cpp.request import LlamaRequest
from octavo.server.protocols.shown_tokens import finite, most_likely, progress, timings, token_text
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Result:
    """The answer to one prompt so far."""

    prompt_token_ids: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: ChoiceEnd | None = None


class LlamaWriter(AnswerWriter[LlamaRequest, TextSpec]):
    """Writes an event for each piece of text. The last event of each choice also contains the figures of the
    request.
    """

    def __post_init__(self) -> None:
        n = self.spec.params.num_choices
        self._results = [_Result(ids) for ids in self.generation.prompt_token_ids for _ in range(n)]
        self._usage: Usage | None = None
        self._shows_text = self.request.num_predicted != 0

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, Usage):
            self._usage = event
            for index, result in enumerate(self._results):
                yield None, self._selected(self._whole(index, result, with_text=False))
        elif isinstance(event, PromptProgress):
            if self.request.return_progress:
                empty = self._piece(self._results[event.index], TextDelta(event.index, ""))
                yield None, {**empty, "prompt_progress": progress(event)}
        elif isinstance(event, ChoiceEnd):
            self._results[event.index].end = event
        elif isinstance(event, TextDelta) and self._shows_text:
            result = self._results[event.index]
            result.text += event.text
            result.token_ids += event.token_ids
            result.logprobs += event.logprobs
            if event.text or event.logprobs:
                yield None, self._piece(result, event)

    def body(self) -> Any:
        whole = [
            self._selected(self._whole(index, result, with_text=True)) for index, result in enumerate(self._results)
        ]
        return whole[0] if len(whole) == 1 else whole

    def _piece(self, result: _Result, event: TextDelta) -> dict[str, Any]:
        return {
            "index": event.index,
            "content": event.text,
            "tokens": event.token_ids,
            "stop": False,
            "id_slot": self.spec.options.id_slot,
            "tokens_predicted": len(result.token_ids),
            "tokens_evaluated": len(result.prompt_token_ids),
            **self._probabilities(event.logprobs),
            **({"timings": timings(self.generation.usage)} if self.request.timings_per_token else {}),
        }

    def _whole(self, index: int, result: _Result, *, with_text: bool) -> dict[str, Any]:
        assert self._usage is not None
        assert result.end is not None
        usage, end, num_tokens = self._usage, result.end, len(result.token_ids)
        length = len(result.prompt_token_ids) + num_tokens
        is_word = isinstance(end.stop_reason, str)
        is_cut = end.finish_reason == "length" or not self._shows_text
        return {
            "index": index,
            "content": result.text if with_text else "",
            "tokens": result.token_ids if with_text and self.request.return_tokens else [],
            "id_slot": self.spec.options.id_slot,
            "stop": True,
            "model": self.model.name,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(result.prompt_token_ids),
            "generation_settings": generation_settings(self.spec.params.sampling, self.spec.options, self.model.info),
            "prompt": self.model.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False),
            "has_new_line": "\n" in result.text,
            "truncated": is_cut and self._shows_text and length >= self.model.info.max_model_len,
            "stop_type": "limit" if is_cut else "word" if is_word else "eos",
            "stopping_word": end.stop_reason if is_word else "",
            "tokens_cached": usage.num_cached_tokens,
            "timings": timings(usage),
            **(self._probabilities(result.logprobs) if with_text else {}),
        }

    def _probabilities(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        num_top = self.request.n_probs
        if not num_top:
            return {}
        are_probs = bool(self.request.post_sampling_probs)
        shown = partial(_shown, self.model.tokenizer, is_prob=are_probs)
        top = "top_probs" if are_probs else "top_logprobs"
        return {
            "completion_probabilities": [
                {
                    **shown(token.token_id, token.entries[token.token_id]),
                    top: [shown(*item) for item in most_likely(token.entries, num_top)],
                }
                for token in tokens
            ]
        }

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return only the fields listed in `response_fields`, if it is given, with their paths as names."""
        if not self.request.response_fields:
            return answer
        found: dict[str, Any] = {}
        for path in self.request.response_fields:
            value: Any = answer
            for name in path.split("/"):
                if not isinstance(value, dict) or name not in value:
                    break
                value = value[name]
            else:
                found[path] = value
        return found


def _shown(tokenizer: Tokenizer, token_id: int, entry: Logprob, *, is_prob: bool) -> dict[str, Any]:
    text, raw = token_text(tokenizer, token_id)
    value = {"prob": math.exp(entry.logprob)} if is_prob else {"logprob": finite(entry.logprob)}
    return {"id": token_id, "token": text, "bytes": list(raw), **value}


def generation_settings(params: SamplingParams, options: RequestOptions, info: ModelInfo) -> dict[str, Any]:
    """Return the parameters and options of a request under llama.cpp's names."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    constraint = params.structured_outputs
    most = options.num_speculative_tokens
    return {
        "n_ctx": info.max_model_len,
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "speculative.n_max": info.max_drafts if most is None else min(most, info.max_drafts),
        "speculative.n_min": options.min_speculative_tokens,
        "speculative.p_min": options.speculative_p_min,
        "grammar": "" if constraint is None else constraint.grammar or "",
        "json_schema": None if constraint is None or constraint.json is None else json.loads(str(constraint.json)),
    }
