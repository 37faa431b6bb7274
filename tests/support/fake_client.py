"""An engine client that gives scripted answers, to test the HTTP side without a model.

client = FakeClient(tokenizer, Script(["Hel", "lo"]))
model = fake_model(tokenizer, client)
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.client import EngineState, EngineStatus, ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.engine.slots import SlotAction, SlotReport
from octavo.engine.texts.prompt_encoder import PromptEncoder
from octavo.engine.texts.text_model import TextModel
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.generation_request import GenerationRequest, PoolingParams
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.generation_config import SamplingDefaults
from octavo.outputs import CompletionOutput, Logprob, OutputDelta, PoolingOutput, RequestMetrics
from octavo.server.models.served_model import ServedModel
from octavo.server.tool_parsers.tool_format import ToolFormat
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

MAX_MODEL_LEN = 256


@dataclass(frozen=True)
class Script:
    """The answer to one request: every choice outputs `pieces` one by one, and ends.

    pieces: a text stands for the tokens it is made of; a tuple (text, token ids) gives both.
    delay_s: delay before each output.
    refusal: raised by `generate`.
    error: raised instead of ending.
    never_ends: nothing follows the pieces.
    num_cached_tokens, num_loaded_tokens: values for each prompt.
    num_drafts: the last four fields of `RequestMetrics`.
    prompt_steps: number of prompt tokens computed after each step; only followed requests receive them.
    """

    pieces: Sequence[str | tuple[str, Sequence[int]]] = ("Hello", " world")
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    delay_s: float = 0.0
    refusal: OctavoError | None = None
    error: OctavoError | None = None
    never_ends: bool = False
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_drafts: tuple[int, int, int, int] = (0, 0, 0, 0)
    prompt_steps: Sequence[int] = ()


@dataclass
class FakeClient:
    """A fake `octavo.engine.client.EngineClient`.

    script: the answer to every request, or a function from the request to its answer.
    requests, streams: all requests and streams so far.
    """

    tokenizer: Tokenizer
    script: Script | Callable[[GenerationRequest], Script] = Script()
    max_model_len: int = MAX_MODEL_LEN
    state: EngineState = EngineState.READY
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    texts: TextModel = field(default_factory=TextModel)
    figures: EngineMetrics = field(default_factory=EngineMetrics)
    slot_actions: list[SlotAction] = field(default_factory=list)
    draft_info: dict[str, Any] = field(default_factory=dict)  # fields of `ModelInfo`
    is_closed: bool = False
    has_device: bool = False  # whose memory it gives back
    is_asleep: bool = False

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            model="fake",
            path="/nowhere/fake.gguf",
            architecture="llama",
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_id=min(self.tokenizer.eos_token_ids, default=None),
            hidden_size=8,
            max_num_seqs=16,
            block_size=16,
            num_blocks=64,
            kv_dtype="float16",
            kv_bytes_per_token=64,
            kv_cache_bytes=64 * 16 * 64,
            weight_bytes=1024,
            workspace_bytes=0,
            num_threads=1,
            sampling_defaults=self.sampling_defaults,
            texts=self.texts,
            **self.draft_info,
        )

    @property
    def replicas(self) -> list[FakeClient]:
        return [self]

    async def sleep(self) -> None:
        if not self.has_device:
            raise UsageError("it has no device", code="cannot_sleep")
        await asyncio.sleep(0)
        self.is_asleep = True

    async def wake_up(self) -> None:
        await asyncio.sleep(0)
        self.is_asleep = False

    async def act_on_slot(self, action: SlotAction) -> SlotReport:
        await asyncio.sleep(0)
        self.slot_actions.append(action)
        return SlotReport(48, 1000, 0.25)

    async def restart(self) -> None:
        raise UsageError("it is a fake")

    def status(self) -> EngineStatus:
        return EngineStatus(self.state, pid=1, metrics=self._figures())

    async def wait_ready(self) -> None:
        await asyncio.sleep(0)

    async def generate(self, request: GenerationRequest) -> FakeStream:
        await asyncio.sleep(0)
        if self.is_closed:
            raise EngineDeadError("the engine is closed")
        script = self.script(request) if callable(self.script) else self.script
        if script.refusal is not None:
            raise script.refusal
        self.requests.append(request)
        stream = FakeStream(f"fake-{len(self.requests)}", request, script, self.tokenizer)
        stream.figures = self.figures
        self.streams.append(stream)
        return stream

    async def metrics(self) -> EngineMetrics:
        await asyncio.sleep(0)
        return self._figures()

    def _figures(self) -> EngineMetrics:
        self.figures.num_running = sum(not stream.is_closed for stream in self.streams)
        return self.figures

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True
        for stream in self.streams:
            await stream.aclose()


class FakeStream:
    """A fake `octavo.engine.client.AnswerStream`.

    was_aborted: it was closed before its end.
    figures: the figures that its client updates.
    """

    figures: EngineMetrics
    engine = 0

    def __init__(self, request_id: str, request: GenerationRequest, script: Script, tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self.is_closed = False
        self.was_aborted = False
        self._has_output = False
        self._request = request
        self._tokenizer = tokenizer
        self._num_drafts = script.num_drafts
        self._outputs = self._play(script)

    def __aiter__(self) -> AsyncIterator[OutputDelta | PoolingOutput]:
        return self

    async def __anext__(self) -> OutputDelta | PoolingOutput:
        try:
            return await self._outputs.__anext__()
        except (StopAsyncIteration, OctavoError):
            self.is_closed = True
            raise

    async def aclose(self) -> None:
        self.was_aborted = self.was_aborted or not self.is_closed
        self.is_closed = True
        await self._outputs.aclose()

    async def _play(self, script: Script) -> AsyncIterator[OutputDelta | PoolingOutput]:
        params = self._request.params
        if isinstance(params, PoolingParams):
            yield self._vector(params)
            self.is_closed = True
            return
        for num_processed in script.prompt_steps if self._request.is_followed else ():
            yield self._prompt_step(num_processed, script)
        num_choices = params.num_choices
        steps, finish_reason = self._steps(script)
        num_generated = 0
        for step, (text, token_ids) in enumerate(steps):
            await asyncio.sleep(script.delay_s)  # timed: scripted by the test
            times = self.figures.inter_token_s if step else self.figures.time_to_first_token_s
            times.observe(script.delay_s)
            num_generated += len(token_ids) * num_choices
            is_last = step == len(steps) - 1 and script.error is None and not script.never_ends
            choices = [
                self._choice(i, text, list(token_ids), finish_reason if is_last else None, script.stop_reason)
                for i in range(num_choices or 1)
            ]
            yield self._output(choices, is_last, script, num_generated)
            if is_last:
                self.is_closed = True
        if script.error is not None:
            raise script.error
        if script.never_ends:
            await asyncio.Event().wait()

    def _prompt_step(self, num_processed: int, script: Script) -> OutputDelta:
        metrics = RequestMetrics(
            num_prompt_tokens=len(self._request.prompt.token_ids),
            num_cached_tokens=script.num_cached_tokens,
            num_processed_tokens=num_processed,
        )
        return OutputDelta(self.request_id, [], False, None, metrics)

    def _vector(self, params: PoolingParams) -> PoolingOutput:
        """Return a vector [8] that depends on the tokens and the pooling, or one vector per token, concatenated."""
        token_ids = self._request.prompt.token_ids
        size = 8 * (len(token_ids) if params.task == "token_embed" else 1)
        vector = np.random.default_rng([*token_ids, params.pooling == "last"]).normal(size=size).astype(np.float32)
        return PoolingOutput(self.request_id, vector, len(token_ids))

    def _steps(self, script: Script) -> tuple[list[tuple[str, Sequence[int]]], str]:
        """Return the outputs up to max_tokens. A piece is output completely or not at all."""
        steps = [self._step(piece) for piece in script.pieces] or [("", ())]
        limit = self._request.params.max_tokens
        lengths = itertools.accumulate(len(token_ids) for _, token_ids in steps)
        kept = [step for step, length in zip(steps, lengths, strict=True) if limit is None or length <= limit]
        if len(kept) < len(steps):
            return kept or [("", steps[0][1][:limit])], "length"
        return steps, script.finish_reason

    def _step(self, piece: str | tuple[str, Sequence[int]]) -> tuple[str, Sequence[int]]:
        if isinstance(piece, str):
            return piece, self._tokenizer.encode(piece, add_special_tokens=False, parse_special=True)
        return piece

    def _choice(
        self, index: int, text: str, token_ids: list[int], finish_reason: str | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        params = self._request.params
        num_top = params.sampling.logprobs
        output = CompletionOutput(index, text, token_ids, finish_reason=finish_reason)
        if num_top is not None:
            logprobs = [self._logprobs(token_id, num_top) for token_id in token_ids]
            output = dataclasses.replace(output, logprobs=logprobs, cumulative_logprob=-0.5)
        return dataclasses.replace(output, stop_reason=stop_reason) if finish_reason else output

    def _logprobs(self, token_id: int, num_top: int) -> dict[int, Logprob]:
        others = [other for other in range(100, 101 + num_top) if other != token_id]
        ids = [token_id, *others[: max(num_top - 1, 0)]]
        return {
            item: Logprob(-0.5 - rank, rank + 1, self._tokenizer.token_bytes(item).decode("utf-8", "replace"))
            for rank, item in enumerate(ids)
        }

    def _output(
        self, choices: list[CompletionOutput], finished: bool, script: Script, num_generated: int
    ) -> OutputDelta:
        request = self._request
        prompt_logprobs = None
        num_top = request.params.prompt_logprobs
        if num_top is not None and not self._has_output:
            prompt_logprobs = [None, *(self._logprobs(item, num_top) for item in request.prompt.token_ids[1:])]
        metrics = RequestMetrics(
            queue_s=0.001,
            prefill_s=0.002,
            decode_s=0.003 if finished else 0.0,
            time_to_first_token_s=0.003,
            num_prompt_tokens=len(request.prompt.token_ids),
            num_cached_tokens=script.num_cached_tokens,
            num_loaded_tokens=script.num_loaded_tokens,
            num_generated_tokens=num_generated,
            num_draft_tokens=self._num_drafts[0],
            num_accepted_draft_tokens=self._num_drafts[1],
            num_prediction_tokens=self._num_drafts[2],
            num_accepted_prediction_tokens=self._num_drafts[3],
        )
        is_told = finished or not self._has_output
        self._has_output = True
        return OutputDelta(self.request_id, choices, finished, prompt_logprobs, metrics if is_told else None)


def fake_model(
    tokenizer: Tokenizer, client: FakeClient | None = None, *, name: str = "fake", tool_format: ToolFormat | None = None
) -> ServedModel:
    """Return a served model without an engine, using a real tokenizer and its chat template."""
    prompts = PromptEncoder(tokenizer, min(tokenizer.eos_token_ids, default=None))
    return ServedModel(name, client or FakeClient(tokenizer), prompts, tool_format)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a model file, such as that of the fixture `smollm2_path`."""
    return load_tokenizer(open_checkpoint(path))
