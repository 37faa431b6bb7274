"""The sampling parameters of a request: `SamplingParams` and `BeamSearchParams`, validated on construction.

Names and defaults are those of vLLM, so that a script for vLLM runs unchanged.

These two classes and `PoolingParams` share members, so that callers need not test the class:
is_answered: tokens follow the prompt. num_choices: number of answers to a request. num_seats: sequences that run in
lockstep from the first step on. output_kind: content of the items of a stream. sampling: the rules that sample each
sequence. with_output_kind(kind): the same parameters for another kind of stream. Also max_tokens, ignore_eos,
skip_special_tokens, structured_outputs and prompt_logprobs, which are None where they do not apply.
"""

from __future__ import annotations

import enum
import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, TypeVar

from octavo.errors import UsageError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STRING_CHARS = 1024
MAX_LIST_ITEMS = 1024
MAX_SCHEMA_CHARS = 2**19  # sixty tools with their parameters take a fifth of it
MAX_GRAMMAR_CHARS = 2**18
MAX_REGEX_CHARS = 2**15
MAX_CACHE_SALT_CHARS = 1024
# Below this, dividing the logits overflows float32 for some models; the limit of the softmax is greedy anyway.
GREEDY_TEMPERATURE = 1e-5

_INT32_MAX = 2**31 - 1

T = TypeVar("T")


def _bounded(default: T, **bounds: float) -> T:
    """A number's default, and its bounds in the words of JSON Schema: for its check, and for requests that have it."""
    bounded: T = field(default=default, metadata=bounds)
    return bounded


class RequestOutputKind(enum.Enum):
    """The content of each item of a stream: the whole answer so far, only the new part, or one item at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer; exactly one of these, with vLLM's names.

    json: a JSON schema, as text or as a dict; stored as text. regex: a regular expression that matches the whole
    answer. choice: the answer is one of these. grammar: a Lark grammar in llguidance's dialect. json_object: any
    JSON object. A constraint that cannot be enforced is refused when the request is submitted; see
    `engine.constrained`.
    """

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        _boolean("structured_outputs.json_object", self.json_object)
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise _refusal("structured_outputs", f"takes exactly one constraint, not {named}", "invalid_value")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            choices = _strings("structured_outputs.choice", self.choice, MAX_LIST_ITEMS)
            if not choices:
                raise _refusal("structured_outputs.choice", "is empty, so no answer could be given", "empty_array")
            object.__setattr__(self, "choice", choices)
        for name, limit in (("regex", MAX_REGEX_CHARS), ("grammar", MAX_GRAMMAR_CHARS)):
            source = getattr(self, name)
            if source is not None and not _string(f"structured_outputs.{name}", source, limit):
                raise _refusal(f"structured_outputs.{name}", "is empty", "invalid_grammar")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling of one request. Every field is checked; an invalid one raises `UsageError`.

    n: number of choices for one prompt, which is computed only once.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p, typical_p: 1 is off. min_p: 0 is off.
    repetition_penalty: over prompt and output, 1 is off (Keskar et al. 2019).
    presence_penalty, frequency_penalty: over the output only, 0 is off (OpenAI).
    logit_bias: token id -> value added to its logit, -100 to 100.
    allowed_token_ids: the only tokens that can be chosen. bad_words: strings that are not generated.
    seed: determines all randomness, together with the index of the choice and of the token; None: a random seed.
    stop: strings that end the text. They are removed from it, unless include_stop_str_in_output.
    stop_token_ids: ids that end the sequence, in addition to the model's own unless ignore_eos.
    min_tokens: number of tokens before which neither end-of-text nor a stop token is chosen.
    max_tokens: None is the end of the context. If the context ends first, the answer ends there with finish_reason
        "length"; that is not an error.
    logprobs, prompt_logprobs: number of most likely tokens reported beside the chosen one; 0 is only the chosen one.
    detokenize: False leaves `text` empty. skip_special_tokens: special tokens do not appear in `text`.
    """

    n: int = _bounded(1, minimum=1, maximum=MAX_CHOICES)
    temperature: float = _bounded(1.0, minimum=0, maximum=2)
    top_p: float = _bounded(1.0, exclusiveMinimum=0, maximum=1)
    top_k: int = _bounded(0, minimum=-1)
    min_p: float = _bounded(0.0, minimum=0, maximum=1)
    typical_p: float = _bounded(1.0, exclusiveMinimum=0, maximum=1)
    repetition_penalty: float = _bounded(1.0, exclusiveMinimum=0, maximum=10)
    presence_penalty: float = _bounded(0.0, minimum=-2, maximum=2)
    frequency_penalty: float = _bounded(0.0, minimum=-2, maximum=2)
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = _bounded(None, minimum=-(2**63), maximum=2**64 - 1)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = _bounded(0, minimum=0, maximum=_INT32_MAX)
    max_tokens: int | None = _bounded(16, minimum=1, maximum=_INT32_MAX)
    logprobs: int | None = _bounded(None, minimum=0, maximum=MAX_LOGPROBS)
    prompt_logprobs: int | None = _bounded(None, minimum=0, maximum=MAX_LOGPROBS)
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    is_answered: ClassVar[bool] = True
    num_seats: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_fields(self)
        self._check_tokens()
        self._check_strings()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal(
                "min_tokens",
                f"is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it",
                "integer_above_max_value",
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _refusal("output_kind", f"must be a RequestOutputKind, not {self.output_kind!r}", "invalid_type")
        outputs = self.structured_outputs
        if outputs is not None and not isinstance(outputs, StructuredOutputsParams):
            raise _refusal(
                "structured_outputs", f"must be a StructuredOutputsParams, not {outputs!r:.80}", "invalid_type"
            )

    def _check_tokens(self) -> None:
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids, limit=None)
            if not ids:
                raise _refusal(
                    "allowed_token_ids",
                    "is empty, so no token could be chosen; leave it out to allow all",
                    "empty_array",
                )
            self._set("allowed_token_ids", ids)
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_LIST_ITEMS))

    def _check_strings(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _strings("stop", () if stop is None else stop, MAX_STOP_STRINGS))
        if isinstance(self.bad_words, str):
            raise _refusal("bad_words", f"must be a list of strings, not the string {self.bad_words!r}", "invalid_type")
        self._set("bad_words", _strings("bad_words", self.bad_words or (), MAX_LIST_ITEMS))
        if self.stop and not self.detokenize:
            raise _refusal(
                "stop", "needs text to look at: leave detokenize=True, or use stop_token_ids", "invalid_value"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def sampling(self) -> SamplingParams:
        return self

    def with_output_kind(self, kind: RequestOutputKind) -> SamplingParams:
        return replace(self, output_kind=kind)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def forbids_tokens(self) -> bool:
        """True if some token may be excluded, whatever its logit."""
        named = self.logit_bias or self.bad_words or self.min_tokens or self.structured_outputs
        return bool(named) or self.allowed_token_ids is not None

    @cached_property
    def is_plain(self) -> bool:
        """Nothing but the logits and the number of the token decides how it is drawn."""
        return not (self.has_penalties or self.forbids_tokens)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: the `beam_width` best sequences by log-probability / length ** length_penalty.

    early_stopping, as in transformers: True ends the search when beam_width sequences are finished, False when no
    running beam is likely to win any more, "never" when none can win even at full length.
    n: number of finished sequences to return; None: all beam_width.
    """

    beam_width: int = field(metadata={"minimum": 1, "maximum": MAX_CHOICES})
    max_tokens: int = _bounded(16, minimum=1, maximum=_INT32_MAX)
    length_penalty: float = _bounded(1.0, minimum=-10, maximum=10)
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    n: int | None = None
    skip_special_tokens: bool = True

    is_answered: ClassVar[bool] = True
    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    structured_outputs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.early_stopping != "never":
            _boolean("early_stopping", self.early_stopping)
        if self.n is not None:
            object.__setattr__(self, "n", _integer("n", self.n, 1, self.beam_width))

    @property
    def num_choices(self) -> int:
        return self.beam_width if self.n is None else self.n

    @property
    def num_seats(self) -> int:
        return self.beam_width

    @cached_property
    def sampling(self) -> SamplingParams:
        """Beams are ranked by the log-probabilities that come beside a greedy token."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            output_kind=self.output_kind,
        )

    def with_output_kind(self, kind: RequestOutputKind) -> BeamSearchParams:  # noqa: ARG002
        """The same parameters: a search has nothing to show before its end."""
        return self


def _schema_text(schema: object) -> str:
    name = "structured_outputs.json"
    if isinstance(schema, Mapping):
        try:
            schema = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(name, f"is not a JSON schema: {error}", "invalid_json_schema") from None
    if not isinstance(schema, str):
        raise _refusal(name, f"must be a JSON schema, as text or dict, not {schema!r:.80}", "invalid_type")
    if len(schema) > MAX_SCHEMA_CHARS:
        limit = f"has {len(schema)} characters; at most {MAX_SCHEMA_CHARS} are allowed"
        raise _refusal(name, limit, "invalid_json_schema")
    return _string(name, schema, MAX_SCHEMA_CHARS)


def _refusal(name: str, problem: str, code: str) -> UsageError:
    """The error about a field, or about one of its items such as `stop[3]`; `param` names only the field."""
    return UsageError(f"{name} {problem}", param=name.partition("[")[0], code=code)


def _check_fields(params: SamplingParams | BeamSearchParams) -> None:
    """Checks the flags and the numbers that have bounds, and stores integers as int and all other numbers as float."""
    for item in fields(params):
        name, value, bounds, kind = item.name, getattr(params, item.name), item.metadata, str(item.type)
        if kind == "bool":
            _boolean(name, value)
        elif bounds and not (value is None and "None" in kind):
            above = "exclusiveMinimum" in bounds
            low, high = bounds["exclusiveMinimum" if above else "minimum"], bounds.get("maximum", math.inf)
            number = _number(name, value, low, high, above) if kind == "float" else _integer(name, value, low, high)
            object.__setattr__(params, name, number)


def _integer(name: str, value: object, low: int, high: float) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refusal(name, f"must be an integer, not {value!r:.80}", "invalid_type")
    number = int(value)
    if number < low:
        raise _refusal(name, f"is {_shown(number)}; the smallest value is {low}", "integer_below_min_value")
    if number > high:
        raise _refusal(name, f"is {_shown(number)}; the largest value is {high}", "integer_above_max_value")
    return number


def _shown(number: int) -> str:
    """The number in digits, or its length in bits: Python refuses to print thousands of digits."""
    bits = number.bit_length()
    return str(number) if bits <= 256 else f"a number of {bits} bits"


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> float:
    """The value as a float within [low, high], or within (low, high] if `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refusal(name, f"must be a number, not {value!r:.80}", "invalid_type")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the floats
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(name, f"is {number}; it must be a finite number", "invalid_value")
    if number < low or number > high or (above and number == low):
        interval = f"above {low:g}" if above else f"at least {low:g}"
        code = "decimal_above_max_value" if number > high else "decimal_below_min_value"
        raise _refusal(name, f"is {number:g}; it must be {interval} and at most {high:g}", code)
    return number


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refusal(name, f"must be True or False, not {value!r:.80}", "invalid_type")


def _items(name: str, values: object, limit: int | None) -> list[object]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise _refusal(name, f"must be a list, not {values!r:.80}", "invalid_type")
    items = list(values)
    if limit is not None and len(items) > limit:
        raise _refusal(name, f"has {len(items)} items; at most {limit} are allowed", "array_above_max_length")
    return items


def _token_ids(name: str, values: object, limit: int | None) -> tuple[int, ...]:
    return tuple(_token_id(f"{name}[{i}]", item) for i, item in enumerate(_items(name, values, limit)))


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refusal(name, f"must be an integer, not {value!r:.80}", "invalid_type")
    number = int(value)
    if not 0 <= number <= _INT32_MAX:
        raise _refusal(name, f"is {_shown(number)}, which is not a token id of any model", "token_out_of_range")
    return number


def _string(name: str, value: object, limit: int) -> str:
    if not isinstance(value, str):
        raise _refusal(name, f"must be a string, not {value!r:.80}", "invalid_type")
    if len(value) > limit:
        raise _refusal(name, f"has {len(value)} characters; at most {limit} are allowed", "string_above_max_length")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise _refusal(
            name, f"holds half of a surrogate pair, which is not a character: {value!r:.80}", "invalid_encoding"
        )
    return value


def _strings(name: str, values: object, limit: int) -> tuple[str, ...]:
    strings = []
    for i, item in enumerate(_items(name, values, limit)):
        text = _string(f"{name}[{i}]", item, MAX_STRING_CHARS)
        if not text:
            raise _refusal(f"{name}[{i}]", "is empty, which would match everywhere; leave it out", "invalid_value")
        strings.append(text)
    return tuple(strings)


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _refusal("logit_bias", f"must map token ids to numbers, not {bias!r:.80}", "invalid_type")
    if len(bias) > MAX_LOGIT_BIAS:
        raise _refusal(
            "logit_bias", f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", "array_above_max_length"
        )
    wrong = [key for key in bias if isinstance(key, bool) or not isinstance(key, numbers.Integral)]
    if wrong:
        names = ", ".join(f"{key!r:.80}" for key in wrong)
        raise _refusal("logit_bias", f"keys must be token ids, not {names}", "invalid_type")
    beyond = [int(key) for key in bias if not 0 <= key <= _INT32_MAX]
    if beyond:
        names = ", ".join(_shown(key) for key in beyond)
        raise _refusal("logit_bias", f"keys must be token ids, not {names}", "token_out_of_range")
    return {int(key): _number(f"logit_bias[{key}]", value, -100.0, 100.0) for key, value in bias.items()}
