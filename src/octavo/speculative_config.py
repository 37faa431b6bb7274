"""Speculative decoding options, from `--speculative-config` with vLLM's keys or from the short options."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.config import EngineConfig

SpeculationMode = Literal["auto", "off", "ngram"]
DraftMethod = Literal["auto", "off", "ngram", "draft_model", "mtp", "eagle3"]

MAX_DRAFTS = 15  # per sequence and step; 16 rows fill the tiles of every kernel
# With more sequences nothing is drafted, not even to measure the gain: a draft takes about 10 us on the host, and extra
# rows in such large steps cost their full time.
MAX_DRAFTING = 16
MAX_STATE_DRAFTS = 3  # the same for a model with states, which keeps a copy of them per draft
MAX_MATCH = 16  # tokens per n-gram
# A single matching token predicts too little, and at most MAX_MATCH tokens are compared.
_INTEGERS = {"num_speculative_tokens": (0, 1024), "prompt_lookup_min": (1, MAX_MATCH), "prompt_lookup_max": (2, 1024)}
_STRINGS = ("method", "model", "revision")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Where drafts come from, and their limits.

    method: auto uses n-grams and the model's own head, if any, on the CPU, and nothing on other devices; mtp uses both
        on any device; draft_model and eagle3 use n-grams too.
    model, revision: the draft model, EAGLE-3 head or assistant.
    num_speculative_tokens: maximum number of drafts per sequence and step; fewer are computed where that is faster.
    prompt_lookup_min, prompt_lookup_max: how many tokens must match for an n-gram: minimum (at least two) and maximum
        (at most MAX_MATCH).
    """

    method: DraftMethod = "auto"
    num_speculative_tokens: int = MAX_DRAFTS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = MAX_MATCH
    model: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> SpeculativeConfig:
        """Return the speculation options of an engine. Raises UsageError if they are wrong or contradict each other."""
        given = _read(config.speculative_config)
        if config.speculation not in get_args(SpeculationMode):
            raise UsageError(f"speculation is {config.speculation!r}; it must be auto, off or ngram")
        if not given and config.draft_model is not None and config.speculation != "off":
            return cls(method="draft_model", model=config.draft_model)
        if not given and config.draft_model is None:
            return cls(method=config.speculation)
        if config.speculation != "auto" or config.draft_model is not None:
            names = "draft_model" if config.draft_model is not None else "speculation"
            other = "speculative_config" if given else "speculation off"
            raise UsageError(f"{other} and {names} both configure speculation; give one of them")
        return cls(**_checked(given))


def _read(value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"speculative_config is not valid JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"speculative_config is {value!r}; it must be an object such as {{'method': 'ngram'}}")
    return dict(value)


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Check the keys and their values, and return them. Raises UsageError."""
    known = [*_STRINGS, *_INTEGERS]
    for name, value in given.items():
        if name in _INTEGERS:
            low, high = _INTEGERS[name]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"speculative_config: {name} is {value!r}; it must be a number from {low} to {high}")
        elif name not in _STRINGS:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
            raise UsageError(f"speculative_config has no key {name!r}; {hint}")
        elif value is not None and not (isinstance(value, str) and value):
            raise UsageError(f"speculative_config: {name} is {value!r}; it must be a name")
    values = {name: value for name, value in given.items() if value is not None}
    method = values.setdefault("method", "auto" if values.get("model") is None else "draft_model")
    if method.endswith("_mtp"):  # vLLM's names include the architecture, which the model knows; Gemma 4's is a folder
        method = values["method"] = "draft_model" if method.startswith("gemma4") else "mtp"
    if method not in get_args(DraftMethod):
        raise UsageError(f"speculative_config: method is {method!r}; it must be {', '.join(get_args(DraftMethod))}")
    if (method in ("draft_model", "eagle3")) != ("model" in values):
        problem = "takes no model" if "model" in values else "needs model, the path or name of the draft model"
        raise UsageError(f"speculative_config: method {method} {problem}")
    longest = values.get("prompt_lookup_max", MAX_MATCH)
    if values.get("prompt_lookup_min", 1) > longest:
        raise UsageError(
            f"speculative_config: prompt_lookup_min is {values['prompt_lookup_min']}, more than prompt_lookup_max "
            f"{longest}; lower it"
        )
    return values
