"""Runs batches of prompts through Ray Data: a class for `map_batches`, with a model in each of its actors.

data.map_batches(Generate, fn_constructor_kwargs={"model": "smollm2"}, batch_size=256, num_cpus=4, concurrency=2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.errors import OctavoError, UsageError
from octavo.llm import LLM
from octavo.outputs import RejectedPromptsError, RequestOutput
from octavo.sampling_params import SamplingParams


class Generate:
    """Answers the prompts of a batch and adds the columns `generated_text`, `finish_reason`, `num_tokens` and `error`.

    The rows keep their order and their other columns. If a row cannot be answered, `error` holds the reason and the
    text is empty; other rows of the batch are not affected. `error` is empty for answered rows.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prompt_column: str = "prompt",
        sampling_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load a model. Raises the errors of `LLM`.

        prompt_column: column of texts or, for chats, of lists of messages with `role` and `content`.
        sampling_params: fields of `SamplingParams`; fields that are not given have the model's defaults.
        options: options of `LLM`. num_threads should equal the num_cpus that Ray reserves for the actor.
        """
        self._column = prompt_column
        given = dict(sampling_params or {})
        SamplingParams(**given)  # an error comes before the model is loaded
        self._llm = LLM(model, **options)
        self._params = replace(self._llm.get_default_sampling_params(), **given)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with its new columns.

        Raises UsageError if the prompt column is missing, and EngineDeadError.
        """
        if self._column not in batch:
            raise UsageError(f"the batch has no column {self._column!r}; it has {', '.join(batch)}")
        values = list(batch[self._column])
        errors = [""] * len(values)
        prompts: dict[int, list[int]] = {}
        for i, value in enumerate(values):
            encoded = self._encode(value)
            if isinstance(encoded, OctavoError):
                errors[i] = str(encoded)
            else:
                prompts[i] = encoded
        outputs = self._answers(prompts, errors)
        choices = [output.outputs[0] if output is not None else None for output in outputs]
        return {
            **batch,
            "generated_text": np.array([choice.text if choice else "" for choice in choices], dtype=object),
            "finish_reason": np.array([choice.finish_reason if choice else "" for choice in choices], dtype=object),
            "num_tokens": np.array([len(choice.token_ids) if choice else 0 for choice in choices], dtype=np.int64),
            "error": np.array(errors, dtype=object),
        }

    def _encode(self, value: Any) -> list[int] | OctavoError:
        try:
            if isinstance(value, str):
                return self._llm.encode(value)
            if isinstance(value, (list, np.ndarray)) and len(value) and all(isinstance(one, Mapping) for one in value):
                return self._llm.encode_chat([dict(message) for message in value])
        except OctavoError as error:
            return error
        return UsageError(f"the prompt must be a string or a list of messages, not {value!r:.80}")

    def _answers(self, prompts: dict[int, list[int]], errors: list[str]) -> list[RequestOutput | None]:
        """Return the output of each row. For refused rows, write the reason to `errors`."""
        found: list[RequestOutput | None] = [None] * len(errors)
        rows = list(prompts)
        try:
            outputs: Any = self._llm.generate(list(prompts.values()), self._params, use_tqdm=False) if rows else []
        except RejectedPromptsError as refused:
            outputs = refused.outputs
            for i, error in refused.errors.items():
                errors[rows[i]] = str(error)
        for row, output in zip(rows, outputs, strict=True):
            found[row] = output
        return found
