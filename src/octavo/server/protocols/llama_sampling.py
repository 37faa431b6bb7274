"""The sampling fields that llama.cpp's server and Ollama's `options` share, with the same names.

Samplers that Octavo lacks are accepted if they are switched off, and refused by name if they are on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from octavo.server.errors import refuse
from octavo.server.generation.spec import given
from octavo.server.http.json_body import FINITE, WHOLE, Int, Number, Text
from octavo.server.protocols.protocol_fields import NullIsAbsent, with_parameters

_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty")
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_RANDOM_SEEDS = (-1, 2**32 - 1)
# Samplers that Octavo lacks, and the values that switch them off.
_OFF: Mapping[str, tuple[float, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "min_keep": (0, 1),
    "n_indent": (0,),
    "t_max_predict_ms": (0,),
}


class OtherSamplers(NullIsAbsent):
    """Fields of samplers that Octavo lacks. They are accepted only with the values that switch the sampler off."""

    dry_allowed_length: Int | None = None
    dry_base: Number | None = None
    dry_multiplier: Number | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: list[Text] | None = None
    dynatemp_exponent: Number | None = None
    dynatemp_range: Number | None = None
    min_keep: Int | None = None
    mirostat: Int | None = None
    mirostat_eta: Number | None = None
    mirostat_tau: Number | None = None
    n_indent: Int | None = None
    t_max_predict_ms: Number | None = None
    tfs_z: Number | None = None
    top_n_sigma: Number | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None

    def refuse_samplers(self, where: str = "") -> None:
        """Raise UsageError for a sampler that is switched on.

        where: prefix for the names of fields in errors
        """
        for name, values in _OFF.items():
            if (value := getattr(self, name)) is not None and value not in values:
                reason = f"is {value}; Octavo has no such sampler: leave it out, or send {values[0]} for off"
                raise refuse(where + name, reason)


class LlamaDrafts(NullIsAbsent):
    """The limits on drafts under llama.cpp's names."""

    draft_n_max: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(None, alias="speculative.n_max")
    draft_n_min: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(None, alias="speculative.n_min")
    draft_p_min: Annotated[float, Field(ge=0, le=1), FINITE] | None = Field(None, alias="speculative.p_min")

    def draft_options(self) -> dict[str, Any]:
        """Return the arguments for `read_options`."""
        return {
            "num_speculative_tokens": self.draft_n_max,
            "min_speculative_tokens": self.draft_n_min,
            "speculative_p_min": self.draft_p_min,
        }


class LlamaSampling(with_parameters(OtherSamplers, *_SAME, "seed")):  # type: ignore[misc]
    """The fields of llama.cpp and Ollama that change how tokens are chosen."""

    stop: Text | list[Text] | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Int | None = None
    penalize_newline: bool | None = None
    penalize_nl: bool | None = None

    def given_names(self, arguments: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of the parameters that the request sets, so that the model's defaults do not replace them.
        `seed` is one of them even if the request asks for a random seed.
        """
        return frozenset(arguments) | ({"seed"} if self.seed is not None else set())

    def read_sampling(self, where: str = "") -> dict[str, Any]:
        """Return the given arguments for SamplingParams.

        where: prefix for the names of fields in errors

        Raises UsageError for a sampler that Octavo lacks.
        """
        self.refuse_samplers(where)
        arguments: dict[str, Any] = given(self, *_SAME)
        if self.repeat_penalty is not None:
            arguments["repetition_penalty"] = self.repeat_penalty
        if self.seed is not None and self.seed not in _RANDOM_SEEDS:
            arguments["seed"] = self.seed
        if self.stop:
            arguments["stop"] = self.stop
        if self.repeat_last_n == 0:  # the penalties do not apply to any token
            arguments |= _PENALTIES
        if any(arguments.get(name, off) != off for name, off in _PENALTIES.items()):
            self._check_penalties(where)
        return arguments

    def _check_penalties(self, where: str) -> None:
        if self.repeat_last_n not in (None, -1):
            reason = f"is {self.repeat_last_n}, but penalties count the whole context here; send -1, or leave it out"
            raise refuse(f"{where}repeat_last_n", reason)
        for name in ("penalize_newline", "penalize_nl"):
            if getattr(self, name) is False:
                raise refuse(where + name, "is false, but penalties count every token here; leave it out")
