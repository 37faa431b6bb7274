"""A loaded model in use, shared by `LLM` and `AsyncLLM`."""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.backends import Executor
from octavo.backends.work_done import work_done
from octavo.config import EngineConfig, LoadProgress
from octavo.engine.client import ModelInfo
from octavo.engine.engine_thread import EngineThread, Sink
from octavo.engine.load import LoadedModel, load_engine
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import Request
from octavo.engine.slots import SlotAction, SlotReport
from octavo.engine.texts.image_inputs import ImageInputs, has_images, split_images
from octavo.engine.texts.prompt_encoder import PromptEncoder, plain_prompt
from octavo.engine.texts.scoring import ScorePlan, pairs_of, plan_scores, score_options
from octavo.engine.weight_keeping import WeightKeeping
from octavo.errors import OctavoError, UsageError
from octavo.generation_request import GenerationRequest, Params, PoolingParams, PromptInput, RequestOptions
from octavo.lora_request import LoRARequest
from octavo.platform.processors import kept_affinity
from octavo.prompt import Prompt
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import Message, TemplateProcess
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.adapters.registry import AdapterRegistry


class Session:
    """A model, its engine's thread, its tokenizer and its chat template. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        progress: LoadProgress | None = None,
        on_round_end: Callable[[], None] | None = None,
        *,
        will_chat: bool = False,
        is_replica: bool = False,
    ) -> None:
        """Load a model and start its engine's thread.

        progress, is_replica: see `load_engine`.
        on_round_end: see `EngineThread`.
        will_chat: start the chat template's process while the model loads instead of with the first conversation.
        Raises what `load_engine` raises.
        """
        self.config = config
        self._pid = os.getpid()
        process = TemplateProcess() if will_chat else None
        with kept_affinity():  # this is the caller's thread; the engine's threads may be bound to a NUMA node
            self._loaded: LoadedModel | None = load_engine(config, progress, is_replica=is_replica)
            self._engine = EngineThread(self._loaded.engine, on_round_end)
        self.tokenizer: Tokenizer = self._loaded.engine.tokenizer
        self.metrics: EngineMetrics = self._loaded.engine.metrics
        self.max_model_len = self._loaded.engine.limits.max_model_len
        self.sampling_defaults = self._loaded.sampling_defaults
        draft = self._loaded.draft_executor
        executors = [self._loaded.executor, *([] if draft is None else [draft])]
        self._keeping = WeightKeeping(self._loaded.keep_jobs)
        self._loaded.keep_jobs = ()  # they hold the weights
        # Also runs at exit: a thread in native code must not outlive the interpreter.
        self._shut_down = weakref.finalize(self, _shut_down, self._keeping, self._engine, executors, self._pid)
        self._prompts = PromptEncoder(
            self.tokenizer,
            self._loaded.eos_token_id,
            process,
            template=config.template_text,
            system=config.system_prompt,
        )
        encodings = self._loaded.engine.encodings
        processor = None if encodings is None else encodings.encoder.processor
        self.images = ImageInputs(self.tokenizer, processor, config.model, config.pdf_as)
        self._ids = itertools.count()
        self._slot_files = ThreadPoolExecutor(1, "octavo-slots")
        self._work, self._worked_at = 0, 0.0  # see `measure_stall`

    def submit(self, request: Request, sink: Sink) -> None:
        """See `EngineThread.submit`."""
        self._engine.submit(request, self._keeping.after(request, sink))

    def abort(self, request_id: str) -> None:
        """See `EngineThread.abort`."""
        self._engine.abort(request_id)

    def encode(self, prompt: PromptInput) -> list[int]:
        """See `PromptEncoder.encode`."""
        return self._prompts.encode(prompt)

    def wait_until_kept(self) -> None:
        """See `LoadedLLM.wait_until_kept`."""
        self._keeping.wait()

    def render_chat(self, messages: Sequence[Message], **template_arguments: Any) -> str:
        """See `PromptEncoder.render_chat`."""
        return self._prompts.render_chat(messages, **template_arguments)

    def plan_scores(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        truncate_prompt_tokens: int | None,
        instruction: str | None,
    ) -> ScorePlan:
        """See `LLM.score`. Raises UsageError."""
        model = self.model()
        options = score_options(truncate_prompt_tokens, instruction)
        return plan_scores(model.engine.texts, self.tokenizer, pairs_of(data_1, data_2), self.max_model_len, options)

    def encode_chat(
        self, messages: Sequence[Message] | str, chat_template: str | None = None, **template_arguments: Any
    ) -> list[int]:
        """See `PromptEncoder.encode_chat`. Also raises UsageError once the model is closed."""
        self.model()
        return self._prompts.encode_chat(messages, chat_template, **template_arguments)

    def chat_prompt(
        self, messages: Sequence[Message] | str, chat_template: str | None = None, **template_arguments: Any
    ) -> Prompt:
        """Return the prompt of a conversation, including the images in its messages.

        Raises the errors of `encode_chat`, and UsageError for images that cannot be read.
        """
        if isinstance(messages, str) or not has_images(messages):
            return Prompt(self.encode_chat(messages, chat_template, **template_arguments))
        from octavo.engine.texts.chat_images import ChatImages, with_texts

        messages = with_texts(messages, self.images)
        if not has_images(messages):
            return Prompt(self.encode_chat(messages, chat_template, **template_arguments))
        images = ChatImages(messages, self.images)
        marks = images.marks
        ids = self.encode_chat(images.messages, chat_template, image_marks=marks, **template_arguments)
        return self.images.place(ids, images.items)

    def to_prompt(self, prompt: PromptInput) -> Prompt:
        """See `PromptEncoder.to_prompt`. Reads images given by vLLM's keys."""
        plain, given = split_images(prompt)
        if not given:
            return self._prompts.to_prompt(plain)
        if self.images.gives_vectors:
            return self.images.alone(plain, given)
        return self.images.prompt(self._prompts.encode(plain), given)

    def create_request(
        self,
        prompt: PromptInput,
        params: Params,
        *,
        output_kind: RequestOutputKind | None = None,
        options: RequestOptions,
    ) -> Request:
        """Return a checked request, not yet submitted.

        output_kind: replaces the one in the parameters.
        Raises UsageError with the numbers if prompt or parameters are wrong or the request could never fit.
        """
        generation = self.describe(prompt, params, output_kind=output_kind, options=options)
        return self.check(generation)

    def describe(
        self,
        prompt: PromptInput,
        params: Params,
        *,
        output_kind: RequestOutputKind | None = None,
        options: RequestOptions,
    ) -> GenerationRequest:
        """Return the request of a program that calls the Python API, with its prompt tokenized. Raises UsageError."""
        if not isinstance(params, (SamplingParams, BeamSearchParams, PoolingParams)):
            raise UsageError(
                f"sampling_params must be a SamplingParams, not {params!r:.80}",
                param="sampling_params",
                code="invalid_type",
            )
        self.model()
        return GenerationRequest(
            prompt=self.to_prompt(prompt),
            params=params if output_kind is None else params.with_output_kind(output_kind),
            text=text if isinstance(text := plain_prompt(split_images(prompt)[0]), str) else None,
            options=options,
        )

    def check(self, request: GenerationRequest, request_id: str | None = None) -> Request:
        """Check a request and complete it for the engine, without submitting it. Raises what `create_request` raises.

        request_id: unique while it runs; None to generate one.
        """
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        return self.model().engine.create_request(name, request)

    @property
    def info(self) -> ModelInfo:
        """The description of the model and its engine. Raises UsageError once the model is closed."""
        loaded = self.model()
        executor, limits, speculation = loaded.executor, loaded.engine.limits, loaded.engine.speculation
        encodings = loaded.engine.encodings
        processor = None if encodings is None else encodings.encoder.processor
        return ModelInfo(
            model=loaded.name,
            path=str(loaded.path),
            architecture=loaded.architecture,
            max_model_len=limits.max_model_len,
            has_sources=bool(limits.sources.width),
            vocab_size=limits.vocab_size,
            eos_token_id=loaded.eos_token_id,
            hidden_size=loaded.hidden_size,
            max_num_seqs=limits.max_num_seqs,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            kv_dtype=executor.cache_sizes.format,
            kv_bytes_per_token=executor.cache_sizes.token_bytes,
            kv_cache_bytes=limits.num_blocks * executor.cache_sizes.block_bytes(limits.block_size)
            + limits.num_states * executor.cache_sizes.state_bytes,
            weight_bytes=executor.weight_bytes,
            workspace_bytes=executor.workspace_bytes,
            num_threads=executor.num_threads,
            sampling_defaults=loaded.sampling_defaults,
            texts=loaded.engine.texts,
            images=None if processor is None else processor.settings,
            pdf_as=self.config.pdf_as,
            draft_sources=() if speculation is None else speculation.source_names,
            max_drafts=0 if speculation is None else speculation.max_drafts,
            no_images=loaded.no_images,
            no_drafts=loaded.no_drafts,
        )

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._loaded is None

    @property
    def failure(self) -> OctavoError | None:
        """See `EngineThread.failure`."""
        return self._engine.failure

    def measure_stall(self) -> float:
        """Return how many seconds requests have waited without a sign of progress, or 0.0 while none waits.

        Call it from one thread only, a few times a second: each call looks for progress since the previous one.
        """
        now, work = time.monotonic(), work_done(self._loaded.executor) if self._loaded is not None else 0
        if work != self._work:
            self._work, self._worked_at = work, now
        return now - max(self._engine.last_round_at, self._worked_at) if self._engine.engine.has_work else 0.0

    @property
    def last_round_age_s(self) -> float:
        """Seconds since the engine's thread last looked for work, which it does before every step."""
        return time.monotonic() - self._engine.last_round_at

    def add_adapter(self, name: str, path: str | Path, scale: float = 1.0) -> None:
        """Read an adapter that requests may name from then on, while steps continue. See `AdapterRegistry.add`."""
        self.adapters.add(name, path, scale)

    @property
    def adapters(self) -> AdapterRegistry:
        """The adapters that requests may name. Raises UsageError if the engine does not support adapters."""
        adapters = self.model().engine.adapters
        if adapters is None:
            raise UsageError("this engine takes no adapters: load the model with enable_lora", code="no_adapters")
        return adapters

    def with_adapter(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the adapter of a program's `lora_request`, if any.

        Return the other options, with the adapter's name in `adapter`.

        Raises UsageError, or ModelLoadError for an adapter that does not fit.
        """
        wanted = options.get("lora_request")
        rest = {name: value for name, value in options.items() if name != "lora_request"}
        if wanted is None:
            return rest
        if not isinstance(wanted, LoRARequest):
            raise UsageError(f"lora_request must be a LoRARequest, not {wanted!r:.80}", param="lora_request")
        self.add_adapter(wanted.lora_name, wanted.lora_path, wanted.scale)
        return {**rest, "adapter": wanted.lora_name}

    def prepare_structured_outputs(self) -> None:
        """See `Engine.prepare_structured_outputs`."""
        self.model().engine.prepare_structured_outputs()

    def sleep(self) -> Future[None]:
        """Release the device's memory like `Engine.sleep`. A new request ends the sleep."""
        return self._engine.call(self.model().engine.sleep)

    def wake_up(self) -> Future[None]:
        """See `Engine.wake_up`."""
        return self._engine.call(self.model().engine.wake_up)

    def act_on_slot(self, action: SlotAction) -> Future[SlotReport]:
        """Save, restore or erase a slot.

        Actions run one after another. The future raises UsageError naming the file.
        """
        from octavo.engine.slot_files import run_action

        self.model()
        return self._slot_files.submit(run_action, self._engine, action)

    def close(self) -> None:
        """End running requests with an error and free all memory. May be called twice."""
        if os.getpid() != self._pid:  # everything belongs to the process that loaded it
            return
        self._shut_down()
        self._slot_files.shutdown()
        self._loaded = None
        self._prompts.close()
        self.images.close()
        gc.collect()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a loaded model cannot be pickled or deep-copied: its memory and threads belong to this process. Load it "
            "where it is used, or share one through `octavo serve`"
        )

    def model(self) -> LoadedModel:
        """Return the loaded model.

        Raises UsageError once the model is closed, and in a forked process, because the engine's threads do not exist
        there.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked after the model was loaded, so the engine's threads are missing in it: load "
                "the model after the fork, or use multiprocessing's spawn method"
            )
        if self._loaded is None:
            raise UsageError("this model is closed; load it again")
        return self._loaded


def _shut_down(keeping: WeightKeeping, engine: EngineThread, executors: list[Executor], pid: int) -> None:
    if os.getpid() != pid:  # forked: the threads to wait for do not exist here
        return
    keeping.close()
    engine.close()
    for executor in executors:
        executor.close()
