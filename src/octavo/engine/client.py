"""The interface of an engine, in this process (`LocalClient`) or in another one (`ProcessClient`)."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.config import PdfAs
from octavo.engine.metrics import EngineMetrics
from octavo.engine.slots import SlotAction, SlotReport
from octavo.engine.speculation.draft_source import DRAFTERS
from octavo.engine.texts.text_model import TextModel
from octavo.errors import EngineDeadError, OctavoError, OverloadedError
from octavo.generation_request import GenerationRequest
from octavo.loader.generation_config import SamplingDefaults
from octavo.media.settings import ImageSettings
from octavo.outputs import OutputDelta, PoolingOutput


class EngineState(enum.Enum):
    """The state of an engine, as its supervisor sees it."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"  # work is waiting, and no step has run for too long
    RESTARTING = "restarting"  # died; another one is being started
    DEAD = "dead"  # died too often, or closed


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of a loaded engine, sent once. Sizes are in bytes."""

    model: str  # as requested: path, hub id or short name
    path: str  # the file or directory it was loaded from
    architecture: str
    max_model_len: int  # prompt and answer of one request, in tokens
    vocab_size: int  # columns of the logits
    eos_token_id: int | None  # the token written by a chat template
    hidden_size: int  # width of an embedding
    max_num_seqs: int
    block_size: int
    num_blocks: int
    kv_dtype: str  # `CacheSizes.format`
    kv_bytes_per_token: int
    kv_cache_bytes: int
    weight_bytes: int
    workspace_bytes: int
    num_threads: int
    load_seconds: dict[str, float] = field(default_factory=dict)  # by phase, in order
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    texts: TextModel = field(default_factory=TextModel)  # its abilities with texts besides answering
    draft_sources: tuple[str, ...] = ()  # in the order in which they are asked
    max_drafts: int = 0  # per sequence and step
    images: ImageSettings | None = None  # its image processor's; None if it only reads text
    pdf_as: PdfAs = "auto"  # how to read PDF documents whose message part does not specify it
    no_images: str = ""  # why a vision model reads only text; empty if it reads images or is not a vision model
    no_drafts: str = ""  # why there are no sources; empty if there are some
    has_sources: bool = False  # an encoder reads the prompt, and the decoder begins with a token of its own

    @property
    def max_prompt_len(self) -> int:
        """Length in tokens of the longest prompt that leaves room for one answer token."""
        return self.max_model_len - 1 - self.has_sources

    @property
    def num_cache_tokens(self) -> int:
        """Number of tokens that fit in the cache, assuming that no token has left the window of a layer."""
        return self.kv_cache_bytes // max(self.kv_bytes_per_token, 1)

    def drafts_in_use(self, metrics: EngineMetrics) -> dict[str, bool]:
        """Return the draft sources by name. False marks a model or head that has failed.

        metrics: the engine's latest metrics.
        """
        return {name: name not in DRAFTERS or not metrics.num_lost_draft_models for name in self.draft_sources}


class AnswerStream(Protocol):
    """The answer to one request: a series of `OutputDelta`, with `finished` set on the last one.

    For PoolingParams it is one `PoolingOutput`.

    If the request fails, the stream raises the OctavoError that ended it: UsageError or NumericalError if the request
    is the cause, EngineDeadError if the engine died. Outputs that have not been fetched yet are merged into one.
    """

    @property
    def request_id(self) -> str:
        """The request's id, unique within the engine that assigned it. A replacement engine counts from zero again."""

    @property
    def engine(self) -> int:
        """The number of the replica that answers."""

    def __aiter__(self) -> AsyncIterator[OutputDelta | PoolingOutput]:
        """Return the stream itself."""

    async def __anext__(self) -> OutputDelta | PoolingOutput:
        """Wait for the part of the answer that is new since the last call, and return it."""

    async def aclose(self) -> None:
        """End the request within a step and free its blocks. Does nothing after the end; may be called twice."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The latest known state of an engine. Reading it is free and never waits."""

    state: EngineState
    reason: str | None = None  # one line for users if STALLED, RESTARTING or DEAD
    pid: int | None = None
    last_step_age_s: float | None = None  # None before the first step
    num_restarts: int = 0
    load_progress: float = 0.0  # 0 to 1 while LOADING
    metrics: EngineMetrics = field(default_factory=EngineMetrics)  # from the current engine process, at most 0.25 s old


class EngineReplica(Protocol):
    """The description, status and metrics of one of a model's engines."""

    @property
    def info(self) -> ModelInfo:
        """See `EngineClient`."""

    def status(self) -> EngineStatus:
        """See `EngineClient`."""

    async def metrics(self) -> EngineMetrics:
        """See `EngineClient`."""


class EngineClient(Protocol):
    """Client of one loaded model. All methods belong to one event loop; none of them blocks it."""

    @property
    def replicas(self) -> Sequence[EngineReplica]:
        """The model's engines by number. The objects stay the same when engines are replaced."""

    @property
    def info(self) -> ModelInfo:
        """The description of the engine. Raises EngineDeadError before it is ready for the first time."""

    def status(self) -> EngineStatus:
        """Return the latest known state."""

    async def wait_ready(self) -> None:
        """Wait until the engine is READY. Raises the error that prevented loading."""

    async def generate(self, request: GenerationRequest) -> AnswerStream:
        """Submit a request of any kind. Return when the engine has checked and accepted it.

        There is one output per step. With the output kind FINAL_ONLY, and for beam search, there is a single one at the
        end.

        Raises UsageError (with param and code) if the request is invalid or could never fit, OverloadedError if the
        engine is loading, restarting or stalled, and EngineDeadError if the engine has ended for good.
        """

    async def metrics(self) -> EngineMetrics:
        """Return the engine's current metrics. Raises OverloadedError if the engine is not READY."""

    async def restart(self) -> None:
        """Replace the engines one by one while the remaining ones serve. Each engine finishes its requests first.

        Raises UsageError if there is only one engine, and the error that prevented a new one from loading.
        """

    async def sleep(self) -> None:
        """Release the device's memory and keep the weights in main memory. No request may be running.

        Raises UsageError (code cannot_sleep) if there is no device, and OverloadedError (code engine_stalled) if the
        engine does not answer within a minute.
        """

    async def wake_up(self) -> None:
        """End a sleep; a new request does this too.

        Raises InsufficientMemoryError, and OverloadedError like `sleep`.
        """

    async def act_on_slot(self, action: SlotAction) -> SlotReport:
        """Save, restore or erase the content of a slot, as in llama.cpp.

        Raises UsageError if there are several replicas, or if a file cannot be read or written or belongs to another
        model.
        """

    async def add_adapter(self, name: str, path: str, scale: float) -> None:
        """Load an adapter into all engines, replacing one of the same name. Return when it has been read.

        Raises ModelLoadError naming what does not fit, and UsageError (code no_adapters) if the engine does not support
        adapters.
        """

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter if it is known. Requests that already run with it are not affected."""

    async def close(self) -> None:
        """End running requests with EngineDeadError, then stop the engine and its process. May be called twice."""


_CODES = {
    EngineState.LOADING: ("model_loading", "the model is being loaded"),
    EngineState.RESTARTING: ("engine_restarting", "the engine is being restarted"),
    EngineState.STALLED: ("engine_stalled", "the engine makes no progress"),
}


def refusal(state: EngineState, reason: str | None, retry_after_s: float = 1.0) -> OctavoError:
    """Return the error that `generate` raises in a state other than READY.

    reason: as in `EngineStatus`.
    """
    if state is EngineState.DEAD:
        return EngineDeadError(f"the engine has ended: {reason or 'it was closed'}")
    code, text = _CODES[state]
    detail = f" ({reason})" if reason else ""
    return OverloadedError(
        f"{text}{detail}; try again in {max(retry_after_s, 1.0):.0f} s", code=code, retry_after_s=retry_after_s
    )
