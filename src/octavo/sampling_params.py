"""Sampling parameters of a request: `SamplingParams` and `BeamSearchParams`, validated on construction.

Names and defaults match vLLM's, so that scripts for vLLM run unchanged.

These two classes and `PoolingParams` share members, so that callers need not check the class:
is_answered: tokens follow the prompt.
num_choices: number of answers to a request.
num_seqs: sequences that run in lockstep from the first step on.
output_kind: content of the items of a stream.
sampling: rules that sample each sequence.
with_output_kind(kind): the same parameters for another kind of stream.

They also share max_tokens, ignore_eos, skip_special_tokens, structured_outputs and prompt_logprobs, None where they do
not apply. `SamplingParams` and `BeamSearchParams` share with_defaults(values): the parameters with a model's sampling
defaults.
"""

from __future__ import annotations

import enum
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, TypeVar, get_origin

from octavo.errors import UsageError
from octavo.unknown_options import advises

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STRING_CHARS = 1024
MAX_LIST_ITEMS = 1024
MAX_SCHEMA_CHARS = 2**19  # sixty tools with their parameters take a fifth of this
MAX_GRAMMAR_CHARS = 2**18
MAX_REGEX_CHARS = 2**15
# Below this, dividing logits overflows float32 for some models, and sampling is greedy in the limit anyway.
GREEDY_TEMPERATURE = 1e-5

_INT32_MAX = 2**31 - 1


class DefaultLength(int):
    """Default length of an answer to a plain prompt; conversations have no such limit."""


_DEFAULT_LENGTH = DefaultLength(16)

_Checked = TypeVar("_Checked")


def limited(default: Any, **limits: float) -> Any:
    """Declare a field that `check_fields` checks.

    limits: pydantic's names: ge, gt, le, min_length and max_length.
    """
    return field(default=default, metadata=limits)


def check_fields(params: Any, prefix: str = "") -> None:
    """Check the booleans and limited fields of a dataclass. Convert numbers to Python's types and lists to tuples.

    Raises UsageError with the field's name, after prefix, and a code for what is wrong.
    """
    kind: type = type(params)
    for name, check, may_be_none, limits in _checked_fields(kind):
        value = getattr(params, name)
        if value is not None or not may_be_none:
            object.__setattr__(params, name, check(prefix + name, value, **limits))


@cache
def _checked_fields(kind: type) -> Sequence[tuple[str, Callable[..., Any], bool, Mapping[str, Any]]]:
    """Return the fields of a dataclass to check: name, check, whether None is allowed, and limits."""
    found = []
    for item in fields(kind):
        name = str(item.type)
        is_checked = item.metadata or name.removesuffix(" | None") == "bool"
        if is_checked and (check := _CHECKS.get(name.removesuffix(" | None"))) is not None:
            found.append((item.name, check, name.endswith(" | None"), item.metadata))
    return found


def changed(params: _Checked, **values: Any) -> _Checked:
    """Copy checked parameters with changed values without checking again, for values that Octavo makes itself.

    The values must have the types of their fields, with tuples for lists. Use `dataclasses.replace` for values from
    elsewhere.
    """
    copy = object.__new__(type(params))
    for item in fields(params):  # type: ignore[arg-type]  # a dataclass from here or from generation_request
        value = values.pop(item.name) if item.name in values else getattr(params, item.name)
        object.__setattr__(copy, item.name, value)
    if values:
        raise TypeError(f"{type(params).__name__} has no fields {sorted(values)}")
    return copy


def shown_fields(params: Any) -> str:
    """Format the fields of a dataclass that differ from their defaults, as in a call."""
    given = ((item.name, getattr(params, item.name)) for item in fields(params) if item.repr)
    defaults = {item.name: item.default for item in fields(params)}
    return ", ".join(f"{name}={value!r}" for name, value in given if value != defaults[name])


class RequestOutputKind(enum.Enum):
    """Content of each item of a stream: the whole answer so far, only the new part, or one item at the end.

    It applies to `AsyncLLM.generate` and `AsyncLLM.chat`. Otherwise the method decides: `LLM.generate` and `LLM.chat`
    return whole answers, `stream` always returns new parts, and a beam search yields one item when it ends.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@advises
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer; give exactly one field. The names are vLLM's.

    json: a JSON schema, given as text, as a dict, or as a class that pydantic has a schema for (a model, a dataclass, a
        TypedDict, `list[Model]`, ...); stored as text.
    regex: a regular expression that must match the whole answer.
    choice: the allowed answers.
    grammar: a grammar in llguidance's Lark dialect or llama.cpp's GBNF.
    json_object: allow any JSON object.

    A constraint that cannot be enforced is refused when the request is submitted; see
    `octavo.engine.texts.constrained`.
    """

    json: Any = None  # text on the wire, which cannot carry classes
    regex: str | None = limited(None, max_length=MAX_REGEX_CHARS)
    choice: Sequence[str] | None = limited(None, min_length=1, max_length=MAX_LIST_ITEMS)
    grammar: str | None = limited(None, max_length=MAX_GRAMMAR_CHARS)
    json_object: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "structured_outputs.")
        given = [item.name for item in fields(self) if getattr(self, item.name) not in (None, False)]
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise _refusal("structured_outputs", f"takes exactly one constraint, not {named}", "invalid_value")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if "" in (self.regex, self.grammar):
            raise _refusal(f"structured_outputs.{given[0]}", "is empty", "invalid_grammar")


@advises
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Every field is checked; an invalid one raises `UsageError`.

    n: number of choices for one prompt, which is computed only once.
    temperature: 0 is greedy.
    top_k: 0 or -1 is off.
    top_p, typical_p: 1 is off.
    min_p: 0 is off.
    repetition_penalty: applies to prompt and output; 1 is off (Keskar et al. 2019).
    presence_penalty, frequency_penalty: apply to the output only; 0 is off (OpenAI).
    logit_bias: token id -> value added to its logit, -100 to 100.
    allowed_token_ids: the only tokens that can be chosen.
    bad_words: strings that are never generated.
    seed: determines all randomness, together with the index of the choice and the token. None for a random seed.
    stop: strings that end the text; removed from it unless include_stop_str_in_output is set.
    stop_token_ids: ids that end the sequence, in addition to the model's own unless ignore_eos is set.
    min_tokens: do not choose end-of-text or a stop token before this many tokens.
    max_tokens: None for no limit, the default in `LLM.chat`. An answer that reaches the end of the context ends with
        finish_reason "length", which is not an error.
    logprobs, prompt_logprobs: number of most likely tokens to report besides the chosen one; 0 for only the chosen one.
    processed_logprobs: report `logprobs` of the distribution that the token was drawn from, after bias, penalties,
        temperature and filters, instead of the model's own. Tokens that could not be drawn have none.
    detokenize: False leaves `text` empty.
    skip_special_tokens: leave special tokens out of `text`.
    """

    n: int = limited(1, ge=1, le=MAX_CHOICES)
    temperature: float = limited(1.0, ge=0, le=2)
    top_p: float = limited(1.0, gt=0, le=1)
    top_k: int = limited(0, ge=-1)
    min_p: float = limited(0.0, ge=0, le=1)
    typical_p: float = limited(1.0, gt=0, le=1)
    repetition_penalty: float = limited(1.0, gt=0, le=10)
    presence_penalty: float = limited(0.0, ge=-2, le=2)
    frequency_penalty: float = limited(0.0, ge=-2, le=2)
    logit_bias: Mapping[int, float] | None = limited(None, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: Sequence[int] | None = limited(None, min_length=1)
    bad_words: Sequence[str] = limited((), max_length=MAX_LIST_ITEMS)
    seed: int | None = limited(None, ge=-(2**63), le=2**64 - 1)
    stop: str | Sequence[str] = limited((), max_length=MAX_STOP_STRINGS)
    stop_token_ids: Sequence[int] = limited((), max_length=MAX_LIST_ITEMS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = limited(0, ge=0, le=_INT32_MAX)
    max_tokens: int | None = limited(_DEFAULT_LENGTH, ge=1, le=_INT32_MAX)
    logprobs: int | None = limited(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = limited(None, ge=0, le=MAX_LOGPROBS)
    processed_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    is_answered: ClassVar[bool] = True
    num_seqs: ClassVar[int] = 1
    second_start: ClassVar[int] = 0  # see PoolingParams

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop or ())
        object.__setattr__(self, "bad_words", self.bad_words or ())
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it"
            raise _refusal("min_tokens", problem, "integer_above_max_value")
        if self.stop and not self.detokenize:
            problem = "needs the text: leave detokenize=True, or use stop_token_ids"
            raise _refusal("stop", problem, "invalid_value")
        for name, kind in (("output_kind", RequestOutputKind), ("structured_outputs", StructuredOutputsParams)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "output_kind"):
                raise _refusal(name, f"must be a {kind.__name__}, not {value!r:.80}", "invalid_type")

    def __repr__(self) -> str:
        return f"SamplingParams({shown_fields(self)})"

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def sampling(self) -> SamplingParams:
        return self

    def with_output_kind(self, kind: RequestOutputKind) -> SamplingParams:
        return self if kind is self.output_kind else changed(self, output_kind=kind)

    def in_conversation(self) -> SamplingParams:
        """Return parameters for a conversation: unless `max_tokens` was given, the answer may fill the context."""
        return changed(self, max_tokens=None) if isinstance(self.max_tokens, DefaultLength) else self

    def with_defaults(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters with a model's defaults.

        values: values of `SamplingDefaults`, checked when the model was loaded.
        """
        return changed(self, **values) if values else self

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def forbids_tokens(self) -> bool:
        """True if a token can be excluded regardless of its logit."""
        named = self.logit_bias or self.bad_words or self.min_tokens or self.structured_outputs
        return bool(named) or self.allowed_token_ids is not None

    @cached_property
    def is_plain(self) -> bool:
        """True if drawing a token needs only the logits and its index, and no processed log-probability is reported."""
        return not (self.has_penalties or self.forbids_tokens or self.processed_logprobs)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@advises
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: the `beam_width` best sequences by log-probability / length ** length_penalty.

    early_stopping: as in transformers: True ends the search when beam_width sequences are finished, False when no
        running beam is likely to win any more, "never" when none can win even at full length.
    n: number of finished sequences to return, by default beam_width.
    """

    beam_width: int = field(metadata={"ge": 1, "le": MAX_CHOICES})
    max_tokens: int = limited(16, ge=1, le=_INT32_MAX)
    length_penalty: float = limited(1.0, ge=-10, le=10)
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    n: int | None = None
    skip_special_tokens: bool = True

    is_answered: ClassVar[bool] = True
    second_start: ClassVar[int] = 0
    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    structured_outputs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.early_stopping != "never":
            _boolean("early_stopping", self.early_stopping)
        if self.n is not None:
            object.__setattr__(self, "n", _integer("n", self.n, ge=1, le=self.beam_width))

    @property
    def num_choices(self) -> int:
        return self.beam_width if self.n is None else self.n

    @property
    def num_seqs(self) -> int:
        return self.beam_width

    @cached_property
    def sampling(self) -> SamplingParams:
        """Greedy sampling; its log-probabilities rank the beams."""
        return changed(
            _PLAIN,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            output_kind=self.output_kind,
        )

    def with_output_kind(self, kind: RequestOutputKind) -> BeamSearchParams:  # noqa: ARG002
        """Return the same parameters, because a search has output only at its end."""
        return self

    def with_defaults(self, values: Mapping[str, Any]) -> BeamSearchParams:  # noqa: ARG002
        """Return the same parameters, because a search does not sample."""
        return self


def _schema_text(schema: object) -> str:
    name = "structured_outputs.json"
    if isinstance(schema, type) or get_origin(schema) is not None:
        schema = _schema_of_type(name, schema)
    if isinstance(schema, Mapping):
        try:
            schema = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(name, f"is not a JSON schema: {error}", "invalid_json_schema") from None
    if not isinstance(schema, str):
        raise _refusal(name, f"must be a JSON schema, as text, dict or class, not {schema!r:.80}", "invalid_type")
    if len(schema) > MAX_SCHEMA_CHARS:
        limit = f"has {len(schema)} characters; at most {MAX_SCHEMA_CHARS} are allowed"
        raise _refusal(name, limit, "invalid_json_schema")
    return _string(name, schema, max_length=MAX_SCHEMA_CHARS)


def _schema_of_type(name: str, kind: Any) -> Mapping[str, object]:
    """Return pydantic's JSON schema for a class or another type."""
    from pydantic import TypeAdapter  # imported here because it takes longer than all other imports of this module

    try:
        return TypeAdapter(kind).json_schema()
    except Exception as error:  # pydantic has several errors, and classes may raise their own
        reason = str(error).partition("\n")[0]
        problem = f"is {kind!r:.80}, for which pydantic has no JSON schema: {reason:.200}"
        raise _refusal(name, problem, "invalid_json_schema") from None


def _refusal(name: str, problem: str, code: str) -> UsageError:
    """Make the error for a field, or for one of its items such as `stop[3]`; `param` names only the field."""
    return UsageError(f"{name} {problem}", param=name.partition("[")[0], code=code)


def _integral(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refusal(name, f"must be an integer, not {value!r:.80}", "invalid_type")
    return value if isinstance(value, DefaultLength) else int(value)


def _integer(name: str, value: object, *, ge: int, le: int | None = None) -> int:
    number = _integral(name, value)
    if number < ge:
        raise _refusal(name, f"is {_shown(number)}; the smallest value is {ge}", "integer_below_min_value")
    if le is not None and number > le:
        raise _refusal(name, f"is {_shown(number)}; the largest value is {le}", "integer_above_max_value")
    return number


def _shown(number: int) -> str:
    """Format a number, or give its bit length if Python refuses to print its digits."""
    bits = number.bit_length()
    return str(number) if bits <= 256 else f"a number of {bits} bits"


def _number(name: str, value: object, *, le: float, ge: float = -math.inf, gt: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refusal(name, f"must be a number, not {value!r:.80}", "invalid_type")
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(name, f"is {number}; it must be a finite number", "invalid_value")
    if number > le or number < ge or number <= gt:
        interval = f"at least {ge:g}" if gt == -math.inf else f"above {gt:g}"
        code = "decimal_above_max_value" if number > le else "decimal_below_min_value"
        raise _refusal(name, f"is {number:g}; it must be {interval} and at most {le:g}", code)
    return number


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, f"must be True or False, not {value!r:.80}", "invalid_type")
    return value


def _items(name: str, values: object, min_length: int = 0, max_length: int | None = None) -> list[object]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise _refusal(name, f"must be a list, not {values!r:.80}", "invalid_type")
    items = list(values)
    if len(items) < min_length:
        raise _refusal(name, "is empty, which allows no token; leave it out to allow all", "empty_array")
    if max_length is not None and len(items) > max_length:
        raise _refusal(name, f"has {len(items)} items; at most {max_length} are allowed", "array_above_max_length")
    return items


def _token_ids(name: str, values: object, **lengths: int) -> tuple[int, ...]:
    return tuple(_token_id(f"{name}[{i}]", item) for i, item in enumerate(_items(name, values, **lengths)))


def _token_id(name: str, value: object) -> int:
    number = _integral(name, value)
    if not 0 <= number <= _INT32_MAX:
        raise _refusal(name, f"is {_shown(number)}, which is not a token id of any model", "token_out_of_range")
    return number


def _string(name: str, value: object, *, max_length: int, min_length: int = 0) -> str:  # noqa: ARG001
    """Check a string. An empty string means that the value is not set."""
    if not isinstance(value, str):
        raise _refusal(name, f"must be a string, not {value!r:.80}", "invalid_type")
    if len(value) > max_length:
        problem = f"has {len(value)} characters; at most {max_length} are allowed"
        raise _refusal(name, problem, "string_above_max_length")
    if any("\ud800" <= char <= "\udfff" for char in value):
        problem = f"holds half of a surrogate pair, which is not a character: {value!r:.80}"
        raise _refusal(name, problem, "invalid_encoding")
    return value


def _strings(name: str, values: object, **lengths: int) -> tuple[str, ...]:
    strings = []
    for i, item in enumerate(_items(name, values, **lengths)):
        strings.append(_string(f"{name}[{i}]", item, max_length=MAX_STRING_CHARS))
        if not item:
            raise _refusal(f"{name}[{i}]", "is empty, which matches everywhere; leave it out", "invalid_value")
    return tuple(strings)


def _logit_bias(name: str, bias: object, *, max_length: int) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _refusal(name, f"must map token ids to numbers, not {bias!r:.80}", "invalid_type")
    if len(bias) > max_length:
        raise _refusal(name, f"has {len(bias)} entries; at most {max_length} are allowed", "array_above_max_length")
    wrong = [f"{key!r:.80}" for key in bias if isinstance(key, bool) or not isinstance(key, numbers.Integral)]
    beyond = [] if wrong else [_shown(int(key)) for key in bias if not 0 <= key <= _INT32_MAX]
    if wrong or beyond:
        code = "invalid_type" if wrong else "token_out_of_range"
        raise _refusal(name, f"keys must be token ids, not {', '.join(wrong or beyond)}", code)
    return {int(key): _number(f"{name}[{key}]", value, ge=-100, le=100) for key, value in bias.items()}


# By type of the field, without None.
_CHECKS: dict[str, Callable[..., object]] = {
    "bool": _boolean,
    "int": _integer,
    "float": _number,
    "str": _string,
    "Sequence[int]": _token_ids,
    "Sequence[str]": _strings,
    "str | Sequence[str]": _strings,
    "Mapping[int, float]": _logit_bias,
}
_PLAIN = SamplingParams()
