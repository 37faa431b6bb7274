"""Requests to the engine, in the form shared by the Python API, the server, the wire format and the engine."""

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
"""Requests with at least this priority never delay streams: they use rows that hardly slow streams down."""
MAX_PREDICTION_CHARS = 2**20
MAX_ADAPTER_CHARS = 256


class PromptImages(TypedDict, total=False):
    """Images for the placeholders in a prompt, as in vLLM: {"image": an image or a list of them}.

    An image is a Pillow image, a numpy array of uint8, a path or the bytes of a file.

    multi_modal_uuids: names for the contents, in the same form, used instead of digests.
    """

    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TextPrompt(PromptImages):
    """A text prompt, as in vLLM."""

    prompt: str


class TokensPrompt(PromptImages):
    """A prompt of token ids, as in vLLM."""

    prompt_token_ids: list[int]


PromptInput: TypeAlias = "str | Sequence[int] | TextPrompt | TokensPrompt | Prompt"


Pooling: TypeAlias = Literal["mean", "last", "cls", "max", "all"]
"""`max` and `all` apply only to checkpoints, see `EncoderPooling`."""


@advises
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a request for one embedding of the whole prompt, instead of an answer.

    pooling: take the mean of all tokens' last hidden states, or the last or first token's hidden state; None for the
        pooling that the checkpoint specifies.
    task: what to return: the embedding itself, embeddings of all tokens, or a classification head's labels (for a
        causal reranker, its score).
    second_start: index of the first token of a pair's second text, for models that distinguish the two; 0 for a single
        text.
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
        """Return the same parameters, because an embedding always arrives at the end."""
        return self


Params: TypeAlias = "SamplingParams | BeamSearchParams | PoolingParams"


@advises
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request besides its prompt and parameters. Raises UsageError for a wrong value.

    To add an option, add one field here: the Python API, every endpoint, the wire format and the engine read this
    class. The field's metadata contains its limits, as arguments of `pydantic.Field`; `check_fields` enforces them too.

    priority: lower runs first.
    cache_salt: only requests with the same salt share blocks of the prefix cache.
    prompt_cache_key: hint that requests with the same key have a common prefix; replicas route by it.
    id_slot: llama.cpp's slot number, under which `/slots/{id}` saves the prompt and answer; -1 for any free slot.
    prompt_logprobs_start: first prompt position with log-probabilities, if requested; earlier positions are None and
        may come from the prefix cache.
    prediction: text that much of the answer is expected to repeat, such as a file to edit; affects only the speed.
    num_speculative_tokens: maximum number of drafts per step; 0 for none, None for the engine's setting.
    min_speculative_tokens: do not compute fewer drafts than this.
    speculative_p_min: drop a draft whose observed acceptance rate is lower, and all drafts after it.
    adapter: name of the LoRA adapter to use, or empty for none.
    closed_objects: in answers that follow a JSON schema, and in required or strict tool calls, forbid properties that
        the schema does not name, unless it sets additionalProperties; None for the server's setting (default False).
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
    """Keep the first num_tokens tokens of a prompt in the cache longer than others, for some number of seconds."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with the parameters and options of its request.

    text: the text the prompt was made from, if any, for `RequestOutput.prompt`.
    pins: prefixes of the prompt to evict last; they have no other effect.
    is_measured: False excludes a warm-up request from `EngineMetrics`.
    is_followed: also send an output for every computed part of the prompt; all outputs then carry metrics.
    """

    prompt: Prompt
    params: Params
    text: str | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    pins: tuple[Pin, ...] = ()
    is_measured: bool = True
    is_followed: bool = False
