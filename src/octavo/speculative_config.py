"""The options of speculation, from `--speculative-config` with vLLM's keys or from the short options."""

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

MAX_DRAFTS = 15  # of a sequence in one step; 16 rows fill the tiles of every kernel
# Sequences beyond which nobody guesses, not even to learn whether it would pay: a guess takes the host about 10 us, and
# rows beside so many cost their full time.
MAX_DRAFTING = 16
MAX_STATE_DRAFTS = 3  # the same of a model with states, which keeps a copy of them for each
MAX_MATCH = 16  # tokens of an n-gram
# One token alone says too little, and more than MAX_MATCH are not compared.
_INTEGERS = {"num_speculative_tokens": (0, 1024), "prompt_lookup_min": (1, MAX_MATCH), "prompt_lookup_max": (2, 1024)}
_STRINGS = ("method", "model", "revision")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The sources of drafts and their limits.

    method: auto is on the CPU n-grams and the head of a model that has one, else off; mtp is both wherever the model
    runs; draft_model uses n-grams, too, and so does eagle3. model, revision: the draft model, the EAGLE-3 head or the
    assistant. num_speculative_tokens: the most drafts of a sequence in a step; fewer are computed wherever fewer pay.
    prompt_lookup_min, prompt_lookup_max: the tokens that must match for an n-gram, at least two, and the most that are
    compared, at most MAX_MATCH.
    """

    method: DraftMethod = "auto"
    num_speculative_tokens: int = MAX_DRAFTS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = MAX_MATCH
    model: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> SpeculativeConfig:
        """The options of an engine. Raises UsageError if they are wrong or contradict each other."""
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
            raise UsageError(f"{other} and {names} both say how to speculate; give one of them")
        return cls(**_checked(given))


def _read(value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"speculative_config is no JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"speculative_config is {value!r}; it must be an object such as {{'method': 'ngram'}}")
    return dict(value)


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The keys with their values. Raises UsageError."""
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
    if method.endswith("_mtp"):  # vLLM's names give the architecture, which the model knows; Gemma 4's is a folder
        method = values["method"] = "draft_model" if method.startswith("gemma4") else "mtp"
    if method not in get_args(DraftMethod):
        raise UsageError(f"speculative_config: method is {method!r}; it must be {', '.join(get_args(DraftMethod))}")
    if (method in ("draft_model", "eagle3")) != ("model" in values):
        problem = "has no use for a model" if "model" in values else "needs model, the path or name of the draft model"
        raise UsageError(f"speculative_config: method {method} {problem}")
    longest = values.get("prompt_lookup_max", MAX_MATCH)
    if values.get("prompt_lookup_min", 1) > longest:
        raise UsageError(
            f"speculative_config: prompt_lookup_min is {values['prompt_lookup_min']}, more than prompt_lookup_max "
            f"{longest}; lower it"
        )
    return values
