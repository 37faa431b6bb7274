"""`LLM`: a model in this process, for scripts and batches."""

from __future__ import annotations

import gc
import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.load import load_engine
from octavo.engine.request import Request
from octavo.errors import OctavoError, UsageError
from octavo.outputs import RejectedPromptsError, RequestOutput
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int]"
Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"
Params: TypeAlias = "SamplingParams | BeamSearchParams"


class LLM:
    """A loaded model. Safe to use from several threads: they share one engine, one cache and each step."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """options: the other fields of `EngineConfig`."""
        self._loaded = load_engine(EngineConfig.resolve(model, options))
        self._engine = AsyncEngine(self._loaded.engine)
        self._ids = itertools.count()

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[RequestOutput]:
        items = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        results: queue.SimpleQueue[RequestOutput | OctavoError] = queue.SimpleQueue()
        order = {}
        for i, prompt in enumerate(items):
            ids = self._loaded.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            params = replace(sampling_params or SamplingParams(), output_kind=RequestOutputKind.FINAL_ONLY)
            request = self._loaded.engine.create_request(
                str(next(self._ids)), ids, params, prompt=prompt if isinstance(prompt, str) else None
            )
            order[request.request_id] = i
            self._engine.submit(request, results.put)
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(items):
            item = results.get()
            if isinstance(item, OctavoError):
                raise item
            outputs[order[item.request_id]] = item
        return [outputs[i] for i in range(len(items))]

    def close(self) -> None:
        self._engine.close()
        self._loaded.executor.close()
