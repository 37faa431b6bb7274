"""`LLM`: a model in this process, for scripts and batches."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.engine_thread import Sink
from octavo.engine.loading.progress_bar import ProgressBar, in_notebook
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import Request
from octavo.engine.session import Session
from octavo.engine.slots import SlotAction, SlotReport
from octavo.engine.texts.placing import ItemSeries
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.generation_request import Params, Pooling, PoolingParams, PromptInput, RequestOptions
from octavo.loader.generation_config import SamplingDefaults
from octavo.loader.named_models import expanded
from octavo.lora_request import LoRARequest
from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OutputBuilder,
    OutputDelta,
    PoolingOutput,
    PoolingRequestOutput,
    RejectedPromptsError,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TokenVectorsOutput,
)
from octavo.prompt import MediaItem, Prompt
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import Message
from octavo.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_REFRESH_S = 0.5  # between updates of the progress bar

_Item: TypeAlias = OutputDelta | PoolingOutput | OctavoError


class OutputStream:
    """The answer to one request as it arrives: an iterator of deltas. Closing it early ends the request.

    Each item is a `RequestOutput` whose outputs hold only the new part; joining their texts gives the whole text.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._request = request
        self._request_id = request.request_id
        self._items: queue.SimpleQueue[OutputDelta | OctavoError] = queue.SimpleQueue()
        self._builder = OutputBuilder(request.params, request.given_prompt, request.text)
        self._is_finished = False
        session.submit(request, self._items.put)
        # A stream that is dropped early must stop computing.
        weakref.finalize(self, session.abort, request.request_id).atexit = False

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> RequestOutput:
        if self._is_finished:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, OctavoError):
            self._is_finished = True
            raise item
        self._is_finished = item.finished
        return self._builder.add(item)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return self._request.num_given_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Number of prompt tokens computed so far. It grows with each step until the first item arrives.

        While the next step is being planned, it briefly includes the tokens of the step in flight.
        """
        computed = [sequence.num_computed_tokens for sequence in self._request.sequences]
        return min(computed[0], self.num_prompt_tokens) if computed else self.num_prompt_tokens

    def close(self) -> None:
        """End the request within a step. May be called twice."""
        if not self._is_finished:
            self._is_finished = True
            self._session.abort(self._request_id)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoadedLLM:
    """Methods shared by `LLM` and `AsyncLLM`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session.config.model!r}, max_model_len={self.max_model_len})"

    @property
    def tokenizer(self) -> Tokenizer:
        return self._session.tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum tokens per request, prompt plus answer."""
        return self._session.max_model_len

    @property
    def block_size(self) -> int:
        """Tokens per cache block. Prefixes are shared and kept in whole blocks."""
        return self._session.config.block_size

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's counters since the model was loaded."""
        return self._session.metrics

    def check_generates(self) -> None:
        """Check that the model generates text.

        Raises UsageError with the remedy if it makes vectors or scores instead.
        """
        self._session.model().engine.texts.check(SamplingParams(), 0)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend, with vLLM's default `max_tokens`.

        Use `dataclasses.replace` to change some of them. `LLM(generation_config="none")` gives neutral ones.
        """
        return SamplingParams().with_defaults(self.sampling_defaults.values)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The values behind `get_default_sampling_params`, and their source."""
        return self._session.sampling_defaults

    def save_prompt(self, path: str, *, slot: int = 0, max_tokens: int | None = None) -> SlotReport:
        """Save the KV cache of a slot's last prompt and answer to a file, for `restore_prompt`. Raises UsageError.

        Only full blocks are saved: `SlotReport.num_tokens` is the number of tokens in them.

        slot: `id_slot` of the request; a request without one was given the first free slot.
        max_tokens: save only this many tokens from the start; None saves all.
        """
        return self._session.act_on_slot(SlotAction("save", slot, path, max_tokens=max_tokens)).result()

    def restore_prompt(self, path: str, *, slot: int = 0) -> SlotReport:
        """Load a file written by `save_prompt` into the cache, for all prompts that begin with its tokens.

        Damaged blocks are skipped. Raises UsageError if the file is not from `save_prompt`, or is from another model or
        setting.
        """
        return self._session.act_on_slot(SlotAction("restore", slot, path)).result()

    def get_tokenizer(self) -> Tokenizer:
        """Alias of `tokenizer`, for vLLM compatibility."""
        return self.tokenizer

    def encode(self, prompt: PromptInput) -> list[int]:
        """Return the token ids that `generate` and `embed` make from a text."""
        return self._session.encode(prompt)

    def encode_chat(
        self, messages: Sequence[Message] | str, chat_template: str | None = None, **template_arguments: Any
    ) -> list[int]:
        """Return the token ids that `chat` makes from a conversation; `stream` accepts them."""
        return self._session.encode_chat(messages, chat_template, **template_arguments)

    def chat_prompt(
        self, messages: Sequence[Message] | str, chat_template: str | None = None, **template_arguments: Any
    ) -> Prompt:
        """Return the prompt that `chat` makes from a conversation, including its images; `stream` accepts it."""
        return self._session.chat_prompt(messages, chat_template, **template_arguments)

    @property
    def image_mark(self) -> str:
        """Text that represents an image in a prompt for `generate`. Raises UsageError for a text-only model."""
        return self._session.images.mark

    def read_image(self, image: Any) -> MediaItem | ItemSeries:
        """Prepare an image for the model, for a message part `{"type": "image", "image": ...}`. Raises UsageError.

        image: a Pillow image, a numpy array of uint8, a path, or the bytes of a file; also a PDF document or a video.
        """
        return self._session.images.item(image)

    def document_text(self, document: str | os.PathLike[str] | bytes) -> str | None:
        """Return the text of a PDF document, given as a path or bytes, if the model reads it as text
        (`EngineConfig.pdf_as`).

        Returns None if the model sees its pages as images, and for any other file. Raises UsageError for a document
        without text.
        """
        images = self._session.images
        return images.document_text(document) if images.reads_documents() else None

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter from its files; requests select it by `adapter`. Raises UsageError or ModelLoadError."""
        self._session.add_adapter(lora_request.lora_name, lora_request.lora_path, lora_request.scale)

    def remove_lora(self, lora_name: str) -> None:
        """Remove an adapter; running requests keep using it. Raises UsageError for an unknown name."""
        self._session.adapters.remove(lora_name)

    def list_loras(self) -> set[str]:
        """Return the names of the loaded adapters."""
        return set(self._session.adapters.sources)

    def wait_until_kept(self) -> None:
        """Wait until the packed weights are on disk for the next start. Call it after the first answer.

        They are written in the background (`pack_cache`); `close` waits at most three seconds for them.
        """
        self._session.wait_until_kept()

    def close(self) -> None:
        """End running requests with an error and free the memory. Calling it twice is allowed."""
        self._session.close()


def open_session(
    model: str, options: Mapping[str, Any], load_progress: LoadProgress | None, *, will_chat: bool
) -> Session:
    """Open a session for a model, showing progress in a notebook. Arguments and errors are as for `LLM`."""
    config = EngineConfig.resolve(*expanded(model, options))
    if load_progress is not None or not in_notebook():
        return Session(config, load_progress, will_chat=will_chat)
    with ProgressBar(in_bytes=True, transient=True) as bar:
        return Session(config, bar.update, will_chat=will_chat)


class LLM(LoadedLLM):
    """A loaded model. Thread-safe: requests from all threads share one engine and cache and are batched together."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        load_progress: LoadProgress | None = None,
        will_chat: bool = False,
        **options: Any,
    ) -> None:
        """Load a model. Raises UsageError, ModelLoadError or InsufficientMemoryError, each with one clear line.

        model: path, hub id or short name.
        load_progress: called with (phase, bytes done, total bytes) while the model is downloaded and prepared. Without
            it a notebook shows a progress bar.
        will_chat: prepare for conversations while the model loads, which saves 0.1 s in the first one.
        options: the other fields of `octavo.config.EngineConfig`.
        """
        super().__init__(open_session(model, options, load_progress, will_chat=will_chat))

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one or many prompts together, and return the answers in the same order.

        A prompt is a text, token ids or a `Prompt`. A column of a data frame or a numpy array is a list of prompts.

        sampling_params: one for all prompts, or one per prompt; by default `get_default_sampling_params`.
        use_tqdm: show a progress bar on a terminal or in a notebook, if the call takes more than a second.
        options: fields of `RequestOptions`, such as priority, and lora_request, a `LoRARequest`; one value for all
            prompts, or one per prompt.

        Raises UsageError if a single prompt is wrong. If some of many prompts are wrong, raises RejectedPromptsError,
        which holds the other answers.
        """
        items, is_single = _listed(prompts)
        return _answers(self._run(items, sampling_params, options, use_tqdm, single=is_single))

    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[str | Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one or many conversations, each a text or a list of messages with `role` and `content`.

        A list of texts, or a column of a data frame, is a list of conversations with one message each. An answer has
        no length limit unless `max_tokens` is given. The content of a message is a text or a list of parts:
        `{"type": "text", "text": ...}` and, for vision models, `{"type": "image", "image": ...}` with a Pillow image,
        a numpy array, a path or the bytes of a file; also `image_pil`, and `image_url` with a data: URL. A `document`
        part holds a PDF file, and a `video` part holds a video file or its frames. `pdf_as` in a part with a PDF file
        takes precedence over the option of that name.

        chat_template: Jinja text to use instead of the model's template, or the name of one of the model's templates.
        template_arguments: tools, documents, add_generation_prompt, and other variables of the template; options of
            `generate` are accepted here too.

        The other arguments and the errors are as in `generate`.
        """
        options = take_options(template_arguments)
        messages = as_list(messages)
        is_many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple, str))
        conversations: list[Any] = list(messages) if is_many else [messages]
        prompts = [self.chat_prompt(one, chat_template, **template_arguments) for one in conversations]
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return _answers(self._run(prompts, in_conversation(params), options, use_tqdm, single=not is_many))

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[BeamSearchOutput]:
        """Return the most likely answers: each output's `sequences` are the finished beams, best first."""
        return [beams_of(output) for output in self.generate(prompts, check_beams(params), use_tqdm, **options)]

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **options: Any
    ) -> OutputStream:
        """Stream the answer to one prompt: `for part in llm.stream("..."): part.outputs[0].text`.

        options: fields of `RequestOptions`.

        Raises UsageError before the first part if the request is wrong.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request = self._session.create_request(
            prompt,
            params,
            output_kind=RequestOutputKind.DELTA,
            options=RequestOptions(**self._session.with_adapter(options)),
        )
        return OutputStream(self._session, request)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        use_tqdm: bool = True,
        *,
        pooling: Pooling | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of texts, with or without images, in order: `output.outputs.embedding`.

        Works with any model.

        pooling: how to pool the hidden states of a generative model, by default as the checkpoint specifies; encoders
            accept no other.

        The other arguments are as in `generate`.
        """
        items, is_single = _listed(prompts)
        given = [self._session.to_prompt(item) for item in items]
        outputs = self._run(given, PoolingParams(pooling=pooling), options, use_tqdm, single=is_single)
        return [embedding_output(list(each.token_ids), output) for each, output in zip(given, outputs, strict=True)]

    def token_embed(
        self, prompts: PromptInput | Sequence[PromptInput], use_tqdm: bool = True, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Return an embedding for each token of each text, in order: `output.outputs.data`, [tokens, width].

        Works with late-interaction models (ColBERT) and with generative models, which return their last hidden states.
        The other arguments are as in `generate`.
        """
        items, is_single = _listed(prompts)
        given = [self._session.to_prompt(item) for item in items]
        outputs = self._run(given, PoolingParams(task="token_embed"), options, use_tqdm, single=is_single)
        return [token_vectors(list(each.token_ids), output) for each, output in zip(given, outputs, strict=True)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text against each of data_2, or element by element. Raises UsageError.

        A cross-encoder returns its label, a causal reranker the probability of yes, an embedding model the cosine.

        truncate_prompt_tokens: truncate the second text so that a pair has at most this many tokens; -1 means the
            model's limit. By default, a pair that is too long is an error.
        instruction: criterion for a causal reranker.
        """
        plan = self._session.plan_scores(data_1, data_2, truncate_prompt_tokens, instruction)
        prompts = [prompt for prompt, _ in plan.prompts]
        outputs = self._run(prompts, [params for _, params in plan.prompts], options, use_tqdm, single=True)
        scores = plan.scores([output.vector for output in outputs if isinstance(output, PoolingOutput)])
        return [ScoringRequestOutput(ScoringOutput(score)) for score in scores]

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Any],
        sampling_params: Params | Sequence[Params] | None,
        options: Mapping[str, Any],
        show_progress: bool,
        *,
        single: bool,
    ) -> list[RequestOutput | PoolingOutput]:
        """Submit all prompts and wait for all answers.

        single: there is one prompt, and if it is refused its own error is raised.
        """
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, len(prompts))
        values = {name: _one_each(name, value, len(prompts)) for name, value in options.items()}
        results: queue.SimpleQueue[tuple[int, _Item]] = queue.SimpleQueue()
        outputs: list[RequestOutput | PoolingOutput | None] = [None] * len(prompts)
        errors: dict[int, OctavoError] = {}
        pending: dict[int, Request] = {}  # by the index of the prompt
        try:
            for i, prompt in enumerate(prompts):
                request = self._create(prompt, params[i], {name: value[i] for name, value in values.items()})
                if isinstance(request, Request):
                    pending[i] = request
                    self._session.submit(request, _sink(results, i))
                elif single:
                    raise request
                else:
                    logger.warning("prompt %d was refused: %s", i, request)
                    errors[i] = request
            with ProgressBar(enabled=show_progress) as bar:
                rate = _Rate(self._session.metrics)
                while pending:
                    bar.update("requests", len(prompts) - len(pending), len(prompts), rate.text)
                    try:
                        i, item = results.get(timeout=_REFRESH_S)
                    except queue.Empty:
                        continue
                    request = pending.pop(i)
                    if isinstance(item, OutputDelta):
                        outputs[i] = OutputBuilder(request.params, request.given_prompt, request.text).add(item)
                    elif isinstance(item, PoolingOutput):
                        outputs[i] = item
                    elif single or isinstance(item, EngineDeadError):
                        raise item
                    else:
                        errors[i] = item
                bar.update("requests", len(prompts), len(prompts), rate.text)
        finally:
            for request in pending.values():
                self._session.abort(request.request_id)
        if errors:
            raise RejectedPromptsError(outputs, errors)
        return [output for output in outputs if output is not None]

    def _create(self, prompt: PromptInput, params: Params, options: Mapping[str, Any]) -> Request | UsageError:
        try:
            known = RequestOptions(**self._session.with_adapter(dict(options)))
            return self._session.create_request(prompt, params, output_kind=RequestOutputKind.FINAL_ONLY, options=known)
        except UsageError as error:
            return error


class _Rate:
    """Generation speed during a call: tokens the engine has generated since the call started."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics, self._before = metrics, metrics.num_generated_tokens_total
        self._began = time.monotonic()

    @property
    def text(self) -> str:
        """The speed formatted as `412 tokens/s`; empty before the first token."""
        count = self._metrics.num_generated_tokens_total - self._before
        return f"{count / (time.monotonic() - self._began):,.0f} tokens/s" if count > 0 else ""


def check_beams(params: object) -> BeamSearchParams:
    """Return the parameters if they are for beam search. Raises UsageError if they are not."""
    if not isinstance(params, BeamSearchParams):
        raise UsageError(f"beam_search takes BeamSearchParams, not {params!r:.80}")
    return params


def beams_of(output: RequestOutput) -> BeamSearchOutput:
    """Convert the answer of a beam search to vLLM's form."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *beam.token_ids],
                beam.text,
                beam.cumulative_logprob or 0.0,
                beam.logprobs,
                beam.finish_reason,
                beam.stop_reason,
            )
            for beam in output.outputs
        ]
    )


def in_conversation(params: Any) -> Any:
    """Remove the default limit of 16 tokens from one or several parameters, for use in a conversation."""
    if isinstance(params, (list, tuple)):
        return [in_conversation(each) for each in params]
    return params.in_conversation() if hasattr(params, "in_conversation") else params


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of `RequestOptions` from keyword arguments and return them."""
    names = [*(field.name for field in dataclasses.fields(RequestOptions)), "lora_request"]
    return {name: arguments.pop(name) for name in names if name in arguments}


def embedding_output(prompt_token_ids: list[int], output: RequestOutput | PoolingOutput) -> EmbeddingRequestOutput:
    """Convert a text's embedding to vLLM's form."""
    assert isinstance(output, PoolingOutput)
    return EmbeddingRequestOutput(output.request_id, EmbeddingOutput(output.vector.tolist()), prompt_token_ids)


def token_vectors(prompt_token_ids: list[int], output: RequestOutput | PoolingOutput) -> PoolingRequestOutput:
    """Convert the embeddings of a text's tokens to vLLM's form."""
    assert isinstance(output, PoolingOutput)
    data = output.vector.reshape(len(prompt_token_ids), -1)
    return PoolingRequestOutput(output.request_id, TokenVectorsOutput(data), prompt_token_ids)


def _answers(outputs: list[RequestOutput | PoolingOutput]) -> list[RequestOutput]:
    return [output for output in outputs if isinstance(output, RequestOutput)]


def _sink(results: queue.SimpleQueue[tuple[int, _Item]], index: int) -> Sink:
    return lambda item: results.put((index, item))


def _listed(prompts: object) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether there was a single one: a text, token ids, a mapping or a `Prompt`."""
    if isinstance(prompts, (str, Mapping, Prompt)):
        return [prompts], True
    prompts = as_list(prompts)
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise UsageError(f"prompts must be a string, a list of token ids, or a list of these, not {prompts!r:.80}")
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)], True
    return [as_list(prompt) for prompt in prompts], False


def as_list(values: object) -> Any:
    """Convert a column of a data frame or a numpy array to a list; return anything else unchanged."""
    to_list = getattr(values, "tolist", None) or getattr(values, "to_list", None)
    return to_list() if callable(to_list) else values


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return [values] * count
    items = list(values)
    if len(items) != count:
        raise UsageError(f"{name} has {len(items)} items for {count} prompts; give one for all, or one per prompt")
    return items
