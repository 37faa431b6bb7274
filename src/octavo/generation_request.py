"""A request for the engine, in the one form that the Python API, the server, the wire and the engine share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict

from octavo.prompt import Prompt
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, check_fields
from octavo.unknown_options import advises

MAX_CACHE_SALT_CHARS = 1024
MAX_CACHE_KEY_CHARS = 1024
BATCH_PRIORITY = 1 << 30
"""From here on a request has no stream that waits for it: it runs in the rows that cost streams nearly nothing."""
MAX_PREDICTION_CHARS = 2**20
MAX_ADAPTER_CHARS = 256


class PromptImages(TypedDict, total=False):
    """Images for the marks in a prompt, as vLLM takes them: {"image": one or a list}.

    An image is Pillow's, a numpy array of uint8, a path or the bytes of a file. multi_modal_uuids: names of their
    contents in the same form, in place of digests.
    """

    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TextPrompt(PromptImages):
    """A text as vLLM takes it."""

    prompt: str


class TokensPrompt(PromptImages):
    """Token ids as vLLM takes them."""

    prompt_token_ids: list[int]


PromptInput: TypeAlias = "str | Sequence[int] | TextPrompt | TokensPrompt | Prompt"


Pooling: TypeAlias = Literal["mean", "last", "cls", "max", "all"]
"""max, all: of checkpoints alone, see `EncoderPooling`."""


@advises
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters for one vector of the whole prompt instead of an answer.

    pooling: the mean of the last hidden states of all tokens, or that of the last or the first token; None: as the
    checkpoint says. task: the vector itself, the vectors of all tokens one after the other, or the labels of a head and
    the one score of a causal reranker.
    second_start: the first token of the second text of a pair, for models that tell the two apart; 0: there is one.
    """

    pooling: Pooling | None = None
    task: Literal["embed", "token_embed", "score"] = "embed"
    second_start: int = 0

    is_answered: ClassVar[bool] = False
    num_choices: ClassVar[int] = 1
    num_seqs: ClassVar[int] = 1
    max_tokens: ClassVar[int] = 0
    ignore_eos: ClassVar[bool] = True
    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    structured_outputs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None
    sampling: ClassVar[SamplingParams] = SamplingParams(detokenize=False)

    def with_output_kind(self, kind: RequestOutputKind) -> PoolingParams:  # noqa: ARG002
        """The same parameters: the vector comes at the end."""
        return self


Params: TypeAlias = "SamplingParams | BeamSearchParams | PoolingParams"


@advises
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of a request, beside its prompt and its parameters.

    A new option is one field here: the Python API, every endpoint, the wire and the engine take it from this class. The
    metadata are the limits of the field, as arguments of `pydantic.Field`; `check_fields` checks them too.
    priority: lower runs first. cache_salt: only requests with the same salt share blocks of the prefix cache.
    prompt_cache_key: a hint that requests with the same one begin alike; several replicas try to give them to one.
    id_slot: llama.cpp's number for prompt and answer, by which `/slots/{id}` saves them; -1: of a slot that is free.
    prompt_logprobs_start: the first position of the prompt that has log-probabilities, if they are asked for; those
    before it are None and may come from the prefix cache.
    prediction: text that much of the answer is expected to repeat, such as a file to edit. It makes the answer faster
    where it is right, and changes nothing else.
    num_speculative_tokens: the most guesses at the next tokens that a step computes; 0: none; None: as the engine does.
    min_speculative_tokens: fewer guesses than these are not computed. speculative_p_min: nor is a guess, with those
    behind it, that is right with a lower probability, as far as the engine has seen.
    adapter: the name of the adapter (LoRA) that the answer is computed with; empty: none.
    closed_objects: in answers that follow a JSON schema, and in calls of tools that must come or are strict, objects
    have no properties but those that their schema names, unless it says something about additional ones; None: as the
    server says, which is False by default.
    Raises UsageError for a wrong value.
    """

    priority: int = field(default=0, metadata={"ge": -(2**31), "le": 2**31 - 1})
    cache_salt: str = field(default="", metadata={"min_length": 1, "max_length": MAX_CACHE_SALT_CHARS})
    prompt_cache_key: str = field(default="", metadata={"max_length": MAX_CACHE_KEY_CHARS})
    id_slot: int = field(default=-1, metadata={"ge": -1, "le": 4095})
    prompt_logprobs_start: int = field(default=0, metadata={"ge": 0, "le": 2**31 - 1})
    prediction: str = field(default="", metadata={"min_length": 1, "max_length": MAX_PREDICTION_CHARS})
    num_speculative_tokens: int | None = field(default=None, metadata={"ge": 0, "le": 2**31 - 1})
    min_speculative_tokens: int = field(default=0, metadata={"ge": 0, "le": 2**31 - 1})
    speculative_p_min: float = field(default=0.0, metadata={"ge": 0.0, "le": 1.0})
    adapter: str = field(default="", metadata={"min_length": 1, "max_length": MAX_ADAPTER_CHARS})
    closed_objects: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class Pin(NamedTuple):
    """The first num_tokens tokens of a prompt stay in the cache longer than others, for so many seconds."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with the parameters and options of its request.

    text: what the prompt was made of, if it was a text; for `RequestOutput.prompt`.
    pins: beginnings of the prompt to be evicted last; it changes nothing else.
    is_measured: False keeps the request out of the figures of `EngineMetrics`, for one that warms an engine up.
    is_followed: outputs come for every computed part of the prompt, too, and all of them have metrics.
    """

    prompt: Prompt
    params: Params
    text: str | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    pins: tuple[Pin, ...] = ()
    is_measured: bool = True
    is_followed: bool = False
