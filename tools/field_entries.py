"""Descriptions of request fields: an entry for each field, a route for each kind of request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from octavo.generation_request import MAX_CACHE_SALT_CHARS
from octavo.sampling_params import MAX_LIST_ITEMS, MAX_STRING_CHARS


@dataclass(frozen=True)
class Entry:
    """The description of a field.

    right: a value that is accepted with status 200.
    wrong: a value that is rejected with status 400 and an error that names the field.
    bounds: a description for readers.
    needs: other fields that the right value requires.
    without_effect: the reason why an accepted field changes nothing.
    """

    right: Any
    wrong: Any
    bounds: str
    needs: Mapping[str, Any] = field(default_factory=dict)
    without_effect: str = ""


@dataclass(frozen=True)
class Route:
    """One kind of request.

    body: the smallest valid body.
    refused: known fields that are refused, with an example value.
    nest: the field of the body that contains all of `model`'s fields.
    """

    path: str
    model: type[BaseModel]
    body: Mapping[str, Any]
    entries: Mapping[str, Entry]
    refused: Mapping[str, Any]
    nest: str = ""

    def request(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body with these fields added."""
        return {**self.body, **({self.nest: dict(fields)} if self.nest else fields)}

    def described(self) -> dict[str, Entry]:
        """Return the entries by field name, in the model's order. Raises LookupError if one is missing."""
        names = {info.alias or name for name, info in self.model.model_fields.items()}
        if names != self.entries.keys():
            raise LookupError(f"{self.path}: described and existing fields differ in {names ^ self.entries.keys()}")
        return {name: entry for name, entry in self.entries.items() if name in names}


FLAG = Entry(True, "yes", "true, false")
OWN_MODEL = Entry("fake", "nobody", "the name of a model in `/v1/models`; the default is the first")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
OWN_TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS}
ANTHROPIC_TOOL = {"name": "add", "input_schema": PARAMETERS}
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3}
SPEAKS_ONLY = "describes the caller, not the answer"
STRINGS = f"at most {MAX_LIST_ITEMS} strings of {MAX_STRING_CHARS} characters"

TEMPERATURE = Entry(0.5, 2.5, "0 to 2, where 0 is greedy")
TOP_P = Entry(0.5, 0, "above 0, at most 1")
TOP_K = Entry(5, -2, "at least 1; 0 or -1 for off")
USER = Entry("me", 1, "text", without_effect=SPEAKS_ONLY)
OPTIONS = {
    "priority": Entry(1, "high", "an integer; lower values run first"),
    "cache_salt": Entry("s", "", f"1 to {MAX_CACHE_SALT_CHARS} characters"),
    "prompt_cache_key": Entry("k", 1, "text; requests with the same key go to the same replica, unless it is busy"),
    "id_slot": Entry(1, -2, "the number of the slot in `/slots/{id}`, or -1 for a free slot"),
    "closed_objects": Entry(True, "yes", "true, false: see docs/structured_outputs.md"),
    "prompt_logprobs_start": Entry(2, -1, "at least 0: the first position of `prompt_logprobs`"),
    "adapter": Entry("sql", 1, "the name of an adapter of this server; see docs/adapters.md"),
    "prediction": Entry("Yes", 1, "text that the answer is expected to repeat for the most part, to make it faster"),
}
MOST_DRAFTS = Entry(4, -1, "the maximum number of guessed tokens per step, 0 for none")
LEAST_DRAFTS = Entry(2, -1, "at least 0; with fewer guesses than this, none are computed")
LIKELY_DRAFTS = Entry(0.5, 1.5, "0 to 1; guesses that are less likely than this to be right are skipped")
OPTIONS |= {
    "num_speculative_tokens": MOST_DRAFTS,
    "min_speculative_tokens": LEAST_DRAFTS,
    "speculative_p_min": LIKELY_DRAFTS,
}
LLAMA_DRAFTS = {
    "speculative.n_max": MOST_DRAFTS,
    "speculative.n_min": LEAST_DRAFTS,
    "speculative.p_min": LIKELY_DRAFTS,
}
NAMED = "named in `x-octavo-ignored-fields`"
WITHOUT_THINKING = f"{NAMED} if the model does not think"
AN_IGNORED_FLAG = Entry(True, "yes", "true, false", without_effect=NAMED)
AN_IGNORED_NUMBER = Entry(1, "x", "an integer", without_effect=NAMED)
AN_IGNORED_TEXT = Entry("r", 1, "text", without_effect=NAMED)
