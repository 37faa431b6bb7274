"""Advice on unknown arguments: the closest known name, or the equivalent of another library's argument."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from octavo.errors import UsageError

# Arguments of vLLM's, llama-cpp-python's and transformers' classes, and our equivalents.
_RENAMED = {
    "LLM": {
        "n_ctx": "max_model_len",
        "n_batch": "max_num_batched_tokens",
        "n_threads": "num_threads",
        "n_gpu_layers": "gpu_layers",
    },
    "SamplingParams": {
        "best_of": "n",
        "guided_decoding": "structured_outputs",
        "repeat_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    },
}
# Accepted vLLM arguments: our name, and values that differ here; None means ignored.
_SAME: dict[str, tuple[str, dict[Any, Any]]] = {
    "gpu_memory_utilization": ("gpu_memory", {}),
    "kv_cache_dtype": ("kv_dtype", {"auto": None, "fp8_e4m3": "fp8"}),
}
_ADVICE = {
    "swap_space": "host_cache_memory keeps evicted blocks in main memory",
    "cpu_offload_gb": "gpu_layers sets how many layers the GPU computes",
    "trust_remote_code": "leave it out; Octavo runs no code from models",
    "load_format": "leave it out; Octavo recognizes the format",
    "tokenizer_mode": "leave it out",
    "enforce_eager": "leave it out",
    "model_path": "pass the model as the first argument",
    "logits_all": "leave it out; SamplingParams(prompt_logprobs=0) returns them",
    "embedding": "leave it out",
    "verbose": "leave it out",
    "use_beam_search": "use LLM.beam_search",
    "truncate_prompt_tokens": "shorten the prompt yourself",
    "do_sample": "use temperature, which is greedy at 0",
}

_Class = TypeVar("_Class", bound=type[Any])


def advice_on(name: str, known: Sequence[str]) -> str:
    """Return advice on an unknown argument, to append to an error message."""
    for owner, names in _RENAMED.items():
        if (ours := names.get(name)) is not None:
            return f"use {ours}" if ours in known else f"use {ours} of {owner}"
    if name in _ADVICE:
        return _ADVICE[name]
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"


def in_our_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename vLLM's options to ours. Raises UsageError if an option is given under both names."""
    ours = {name: value for name, value in options.items() if name not in _SAME}
    for name in _SAME.keys() & options.keys():
        own, values = _SAME[name]
        if own in ours:
            raise UsageError(f"{name} and {own} are the same option; give one of them")
        value = options[name]
        if (value := values.get(value, value)) is not None:
            ours[own] = value
    return ours


def advises(cls: _Class) -> _Class:
    """Class decorator: the constructor's TypeError includes advice on unknown arguments."""
    construct = cls.__init__

    @functools.wraps(construct)
    def constructor(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except TypeError:
            known = [field.name for field in fields(cls)]
            for name in values:
                if name not in known:
                    raise TypeError(f"{cls.__name__} has no option {name!r}; {advice_on(name, known)}") from None
            raise

    cls.__init__ = constructor
    return cls
