"""A loaded model in use: what `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from octavo.backends import Executor
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, Sink
from octavo.engine.load import LoadedModel, load_engine
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import Request
from octavo.errors import UsageError
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import ChatTemplate, check_messages
from octavo.tokenizer.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int]"
Message: TypeAlias = "Mapping[str, Any]"
Params: TypeAlias = "SamplingParams | BeamSearchParams"


class Session:
    """A model, its engine's thread, its tokenizer and its chat template. Safe to share between threads."""

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        self.config = config
        self._loaded: LoadedModel | None = load_engine(config, progress)
        self.tokenizer: Tokenizer = self._loaded.engine.tokenizer
        self.metrics: EngineMetrics = self._loaded.engine.metrics
        self.max_model_len = self._loaded.engine.limits.max_model_len
        self._engine = AsyncEngine(self._loaded.engine)
        # Runs at exit too: a thread in native code must not outlive the interpreter.
        self._shut_down = weakref.finalize(self, _shut_down, self._engine, self._loaded.executor)
        self._chat_template: ChatTemplate | None = None
        self._lock = threading.Lock()
        self._ids = itertools.count()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as `create_request` takes it: control tokens in it count, BOS comes once.

        Raises UsageError for what is neither a text nor a list.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=True)
        if not isinstance(prompt, (list, tuple)):
            raise UsageError(f"a prompt must be a text or a list of token ids, not {prompt!r:.80}")
        return list(prompt)

    def encode_chat(
        self, messages: Sequence[Message], chat_template: str | None = None, **template_arguments: Any
    ) -> list[int]:
        """Token ids of a conversation. chat_template: Jinja instead of the model's own.

        template_arguments: tools, documents, add_generation_prompt and what this template knows besides.
        Raises UsageError where the conversation is none, or does not suit the template.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise UsageError(f"a conversation is a list of one message or more, not {messages!r:.80}")
        if not isinstance(chat_template, str | None):
            raise UsageError(f"chat_template must be the text of a Jinja template, not {chat_template!r:.80}")
        check_messages(messages)  # before a missing template is blamed
        if chat_template is None:
            return self._own_template().encode(self.tokenizer, messages, **template_arguments)
        template = self._make_template(chat_template, from_caller=True)
        try:
            return template.encode(self.tokenizer, messages, **template_arguments)
        finally:
            template.close()

    def create_request(
        self,
        prompt: Prompt,
        params: Params,
        *,
        output_kind: RequestOutputKind | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """A checked request, not yet submitted. output_kind: instead of that of the parameters.

        Raises UsageError with the numbers if prompt or parameters are wrong or the request could never fit.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise UsageError(f"priority is {priority!r}; it must be an integer of 32 bits, lower goes first")
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise UsageError(f"sampling_params must be a SamplingParams, not {params!r}")
        if output_kind is not None and isinstance(params, SamplingParams):
            params = replace(params, output_kind=output_kind)
        return self.model().engine.create_request(
            request_id if request_id is not None else f"request-{next(self._ids)}",
            self.encode(prompt),
            params,
            prompt=prompt if isinstance(prompt, str) else None,
            priority=priority,
        )

    def submit(self, request: Request, sink: Sink) -> None:
        """See `AsyncEngine.submit`."""
        self._engine.submit(request, sink)

    def abort(self, request_id: str) -> None:
        """Ends a request within a step."""
        self._engine.abort(request_id)

    def close(self) -> None:
        """Ends running requests with an error and gives all memory back. May be called twice."""
        self._shut_down()
        with self._lock:
            self._loaded = None
            template, self._chat_template = self._chat_template, None
        if template is not None:
            template.close()
        gc.collect()

    def model(self) -> LoadedModel:
        """What was loaded. Raises UsageError once it is closed."""
        if self._loaded is None:
            raise UsageError("this model is closed; load it again")
        return self._loaded

    def _own_template(self) -> ChatTemplate:
        with self._lock:
            if self._chat_template is None:
                self._chat_template = self._make_template(self.tokenizer.chat_template)
            return self._chat_template

    def _make_template(self, source: str | None, *, from_caller: bool = False) -> ChatTemplate:
        model = self.model()
        return ChatTemplate(
            source,
            bos_token=self._text(self.tokenizer.bos_token_id),
            eos_token=self._text(model.eos_token_id),
            from_caller=from_caller,
        )

    def _text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _shut_down(engine: AsyncEngine, executor: Executor) -> None:
    engine.close()
    executor.close()
