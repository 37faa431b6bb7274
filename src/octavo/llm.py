"""`LLM`: a model in this process, for scripts and batches."""

from __future__ import annotations

import dataclasses
import logging
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

_REFRESH_S = 0.5  # of the bar

_Item: TypeAlias = OutputDelta | PoolingOutput | OctavoError


class OutputStream:
    """The answer to one request while it comes: an iterator of deltas. Closing it early ends the request.

    Each item is a `RequestOutput` whose outputs hold only what is new, so that joined texts are the whole text.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._request = request
        self._request_id = request.request_id
        self._items: queue.SimpleQueue[OutputDelta | OctavoError] = queue.SimpleQueue()
        self._builder = OutputBuilder(request.params, request.given_prompt, request.text)
        self._is_finished = False
        session.submit(request, self._items.put)
        # A stream that is dropped before its end must not go on computing.
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
        """Tokens of the prompt."""
        return self._request.num_given_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that are computed already. They grow by steps until the first item comes.

        While the next step is planned, those of the step in flight count for a moment, too.
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
    """The part that `LLM` and `AsyncLLM` share."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session.config.model!r}, max_model_len={self.max_model_len})"

    @property
    def tokenizer(self) -> Tokenizer:
        return self._session.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer of one request."""
        return self._session.max_model_len

    @property
    def block_size(self) -> int:
        """Tokens of a block of the cache: prefixes are shared and kept in whole blocks."""
        return self._session.config.block_size

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's counters since the model was loaded."""
        return self._session.metrics

    def check_generates(self) -> None:
        """Raise UsageError with the remedy if the model makes vectors or scores instead of answers."""
        self._session.model().engine.texts.check(SamplingParams(), 0)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request without any: those that the model's makers recommend, with vLLM's `max_tokens`.

        `dataclasses.replace` makes others of them. `LLM(generation_config="none")` gives the neutral ones.
        """
        return SamplingParams().with_defaults(self.sampling_defaults.values)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The values behind `get_default_sampling_params`, and where they come from."""
        return self._session.sampling_defaults

    def save_prompt(self, path: str, *, slot: int = 0, max_tokens: int | None = None) -> SlotReport:
        """Write keys and values of the last prompt and answer of a slot to a file, for `restore_prompt`.

        slot: `id_slot` of its request; without one, the first free slot was taken. max_tokens: of the beginning; None:
        all that the cache has. Only full blocks count: `SlotReport.num_tokens` says how many tokens they hold. Raises
        UsageError.
        """
        return self._session.act_on_slot(SlotAction("save", slot, path, max_tokens=max_tokens)).result()

    def restore_prompt(self, path: str, *, slot: int = 0) -> SlotReport:
        """Put what `save_prompt` has written into the cache, for all prompts that begin with it.

        Raises UsageError for a file that is none, or of another model or setting. Damaged blocks are left out.
        """
        return self._session.act_on_slot(SlotAction("restore", slot, path)).result()

    def get_tokenizer(self) -> Tokenizer:
        """vLLM's name of `tokenizer`."""
        return self.tokenizer

    def encode(self, prompt: PromptInput) -> list[int]:
        """The token ids that `generate` and `embed` make of a text."""
        return self._session.encode(prompt)

    def encode_chat(
        self, messages: Sequence[Message] | str, chat_template: str | None = None, **template_arguments: Any
    ) -> list[int]:
        """The token ids that `chat` makes of a conversation; `stream` takes them too."""
        return self._session.encode_chat(messages, chat_template, **template_arguments)

    def chat_prompt(
        self, messages: Sequence[Message] | str, chat_template: str | None = None, **template_arguments: Any
    ) -> Prompt:
        """The prompt that `chat` makes of a conversation, with its images; `stream` takes it too."""
        return self._session.chat_prompt(messages, chat_template, **template_arguments)

    @property
    def image_mark(self) -> str:
        """The text that stands for an image in a prompt of `generate`. Raises UsageError for a model of text."""
        return self._session.images.mark

    def read_image(self, image: Any) -> MediaItem | ItemSeries:
        """An image as the model sees it, for a part `{"type": "image", "image": ...}` of a message.

        image: Pillow's, a numpy array of uint8, a path or the bytes of a file, which may also be a PDF document or a
        video. Raises UsageError.
        """
        return self._session.images.item(image)

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Read an adapter as its files are now; requests name it by `adapter`. Raises UsageError or ModelLoadError."""
        self._session.add_adapter(lora_request.lora_name, lora_request.lora_path, lora_request.scale)

    def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter; requests that run with it go on. Raises UsageError for an unknown name."""
        self._session.adapters.remove(lora_name)

    def list_loras(self) -> set[str]:
        """The names of the known adapters."""
        return set(self._session.adapters.sources)

    def wait_until_kept(self) -> None:
        """Wait until the packed weights are on disk for the next start, once an answer has been given.

        They are written in the background (`pack_cache`); `close` gives that three seconds.
        """
        self._session.wait_until_kept()

    def close(self) -> None:
        """End running requests with an error and give the memory back. May be called twice."""
        self._session.close()


def open_session(
    model: str, options: Mapping[str, Any], load_progress: LoadProgress | None, *, will_chat: bool
) -> Session:
    """The session of a model, whose download and loading a notebook shows. The parameters and errors of `LLM`."""
    config = EngineConfig.resolve(*expanded(model, options))
    if load_progress is not None or not in_notebook():
        return Session(config, load_progress, will_chat=will_chat)
    with ProgressBar(in_bytes=True, transient=True) as bar:
        return Session(config, bar.update, will_chat=will_chat)


class LLM(LoadedLLM):
    """A loaded model. Safe to use from several threads: they share one engine, one cache and each step."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        load_progress: LoadProgress | None = None,
        will_chat: bool = False,
        **options: Any,
    ) -> None:
        """model: path, hub id or short name. options: the other fields of `octavo.config.EngineConfig`.

        load_progress: called with (phase, bytes done, bytes in all) while the model is downloaded and prepared.
        Without it a notebook shows a bar.
        will_chat: prepare for conversations while the model loads; without it the first one takes a tenth of a
        second longer.
        Raises UsageError, ModelLoadError or InsufficientMemoryError, each with one clear line.
        """
        super().__init__(open_session(model, options, load_progress, will_chat=will_chat))

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer prompts (texts, token ids or `Prompt`s, one or many), all at once, in their order.

        A column of a data frame or a numpy array is a list of prompts.

        sampling_params: one for all, or one a prompt; None: `get_default_sampling_params`.
        options: fields of `RequestOptions`, such as priority, likewise; and lora_request, a `LoRARequest`.
        use_tqdm: vLLM's name; False: no progress bar. There is one on a terminal and in a notebook, after a second.
        Raises UsageError for a single wrong prompt, and RejectedPromptsError, which has the answers to all
        others, if some of many are wrong.
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
        """Answer conversations, one or many, each a text or a list of messages with `role` and `content`.

        A list of texts is a list of conversations of one message each, and so is a column of a data frame. An answer
        ends with its text, or at `max_tokens` if that is given. A content is a text or a list of parts:
        `{"type": "text", "text": ...}` and, for models that see, `{"type": "image", "image": ...}` with a Pillow image,
        a numpy array, a path or the bytes of a file; also `image_pil`, and `image_url` with a data: URL. A
        `document` is a PDF file, a `video` a file or its frames.

        chat_template: Jinja instead of the model's own, or the name of one of the model's.
        template_arguments: tools, documents, add_generation_prompt, and what the template knows besides; options may
        stand beside them. As `generate`.
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
        """The most likely answers: each output's `sequences` are the finished beams, best first."""
        return [beams_of(output) for output in self.generate(prompts, check_beams(params), use_tqdm, **options)]

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **options: Any
    ) -> OutputStream:
        """Answer one prompt piece by piece: `for part in llm.stream("..."): part.outputs[0].text`.

        options: fields of `RequestOptions`. Raises UsageError before the first piece if the request is wrong.
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
        """The vectors of texts and of images with them, in their order. Any model has them: `output.outputs.embedding`.

        pooling: of the hidden states of a model that generates; None: as the checkpoint says, which for an encoder is
        the only one. The rest as `generate`.
        """
        items, is_single = _listed(prompts)
        given = [self._session.to_prompt(item) for item in items]
        outputs = self._run(given, PoolingParams(pooling=pooling), options, use_tqdm, single=is_single)
        return [embedding_output(list(each.token_ids), output) for each, output in zip(given, outputs, strict=True)]

    def token_embed(
        self, prompts: PromptInput | Sequence[PromptInput], use_tqdm: bool = True, **options: Any
    ) -> list[PoolingRequestOutput]:
        """A vector of each token of texts, in their order: `output.outputs.data`, [tokens, width].

        Models of late interaction (ColBERT) have them, and any that generates: its last hidden states. The rest as
        `generate`.
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
        """Score of pairs: of one text with each of data_2, or of each with the text at its place.

        A cross-encoder gives its label, a causal reranker the probability of yes, an embedding model the cosine.
        truncate_prompt_tokens: cut the second text of longer pairs; -1: to the model's limit; None: they are an error.
        instruction: what a causal reranker judges by. Raises UsageError.
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
        """Submit all, wait for all. single: a refused prompt raises its own error."""
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
                    logger.warning("prompt %d is refused: %s", i, request)
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
    """The speed of a call: the tokens that the engine has generated since."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics, self._before = metrics, metrics.num_generated_tokens_total
        self._began = time.monotonic()

    @property
    def text(self) -> str:
        """`412 tokens/s`; empty before the first token."""
        count = self._metrics.num_generated_tokens_total - self._before
        return f"{count / (time.monotonic() - self._began):,.0f} tokens/s" if count > 0 else ""


def check_beams(params: object) -> BeamSearchParams:
    """The parameters of a beam search. Raises UsageError for others."""
    if not isinstance(params, BeamSearchParams):
        raise UsageError(f"beam_search takes BeamSearchParams, not {params!r:.80}")
    return params


def beams_of(output: RequestOutput) -> BeamSearchOutput:
    """The answer to a beam search in vLLM's shape."""
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
    """Parameters, one or a list, with which an answer in a conversation has no limit of 16 tokens."""
    if isinstance(params, (list, tuple)):
        return [in_conversation(each) for each in params]
    return params.in_conversation() if hasattr(params, "in_conversation") else params


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of `RequestOptions` among keyword arguments, which are removed from them."""
    names = [*(field.name for field in dataclasses.fields(RequestOptions)), "lora_request"]
    return {name: arguments.pop(name) for name in names if name in arguments}


def embedding_output(prompt_token_ids: list[int], output: RequestOutput | PoolingOutput) -> EmbeddingRequestOutput:
    """The vector of a text in vLLM's shape."""
    assert isinstance(output, PoolingOutput)
    return EmbeddingRequestOutput(output.request_id, EmbeddingOutput(output.vector.tolist()), prompt_token_ids)


def token_vectors(prompt_token_ids: list[int], output: RequestOutput | PoolingOutput) -> PoolingRequestOutput:
    """The vectors of the tokens of a text in vLLM's shape."""
    assert isinstance(output, PoolingOutput)
    data = output.vector.reshape(len(prompt_token_ids), -1)
    return PoolingRequestOutput(output.request_id, TokenVectorsOutput(data), prompt_token_ids)


def _answers(outputs: list[RequestOutput | PoolingOutput]) -> list[RequestOutput]:
    return [output for output in outputs if isinstance(output, RequestOutput)]


def _sink(results: queue.SimpleQueue[tuple[int, _Item]], index: int) -> Sink:
    return lambda item: results.put((index, item))


def _listed(prompts: object) -> tuple[list[Any], bool]:
    """The prompts, and whether there is only one: a text, a list of token ids, a mapping or a `Prompt`."""
    if isinstance(prompts, (str, Mapping, Prompt)):
        return [prompts], True
    prompts = as_list(prompts)
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise UsageError(f"prompts must be a text, a list of token ids, or a list of these, not {prompts!r:.80}")
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)], True
    return [as_list(prompt) for prompt in prompts], False


def as_list(values: object) -> Any:
    """A column of a data frame or a numpy array as a list; anything else as it is."""
    to_list = getattr(values, "tolist", None) or getattr(values, "to_list", None)
    return to_list() if callable(to_list) else values


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return [values] * count
    items = list(values)
    if len(items) != count:
        raise UsageError(f"{name} has {len(items)} items for {count} prompts; give one for all, or one for each")
    return items
