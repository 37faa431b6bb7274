"""Octavo runs and serves large language models. Names load when they are first used: importing stays light."""

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
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RejectedPromptsError, RequestMetrics, RequestOutput
    from octavo.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

_MODULES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "BeamSearchParams": "octavo.sampling_params",
    "RequestOutputKind": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputsParams": "octavo.sampling_params",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "RejectedPromptsError": "octavo.outputs",
    "RequestMetrics": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "EngineDeadError": "octavo.errors",
    "GraphError": "octavo.errors",
    "InsufficientMemoryError": "octavo.errors",
    "ModelLoadError": "octavo.errors",
    "NumericalError": "octavo.errors",
    "OctavoError": "octavo.errors",
    "UsageError": "octavo.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineDeadError",
    "GraphError",
    "InsufficientMemoryError",
    "Logprob",
    "ModelLoadError",
    "NumericalError",
    "OctavoError",
    "RejectedPromptsError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UsageError",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
