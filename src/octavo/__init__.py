"""Octavo runs and serves large language models. Names load on first use, so that importing stays cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.errors import (
        EngineDeadError,
        GraphError,
        InsufficientMemoryError,
        ModelLoadError,
        NumericalError,
        OctavoError,
        UsageError,
    )
    from octavo.generation_request import PoolingParams, TextPrompt, TokensPrompt
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RejectedPromptsError,
        RequestMetrics,
        RequestOutput,
        ScoringRequestOutput,
    )
    from octavo.prompt import Prompt, Span
    from octavo.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

# Names are looked up in this order, cheap modules first.
_MODULES = ("errors", "sampling_params", "outputs", "prompt", "generation_request", "lora_request", "llm", "async_llm")

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "GraphError",
    "InsufficientMemoryError",
    "LoRARequest",
    "Logprob",
    "ModelLoadError",
    "NumericalError",
    "OctavoError",
    "PoolingParams",
    "PoolingRequestOutput",
    "Prompt",
    "RejectedPromptsError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "Span",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UsageError",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = importlib.import_module(f"octavo.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
