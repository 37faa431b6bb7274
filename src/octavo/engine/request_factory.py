"""Creates checked requests from `GenerationRequest`s."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.engine.consumers.beam_search import BeamSearch
from octavo.engine.consumers.pooling import Pooler
from octavo.engine.consumers.prompt_logprobs import PromptLogprobs
from octavo.engine.consumers.row_consumer import RowConsumer
from octavo.engine.consumers.row_taker import RowTaker
from octavo.engine.consumers.token_sampler import TokenSampler
from octavo.engine.consumers.token_vectors import TokenVectors
from octavo.engine.kv.kv_cache import KVCacheManager
from octavo.engine.metrics import EngineMetrics
from octavo.engine.publisher import TextStream
from octavo.engine.request import Request, RequestTimes, Sequence, SequenceGroup, derive_seed
from octavo.engine.texts.text_heads import NO_HEADS, TextHeads
from octavo.engine.texts.text_model import ANSWERS_ONLY, TextModel
from octavo.errors import UsageError
from octavo.generation_request import GenerationRequest, Params, PoolingParams
from octavo.prompt import MediaItem, Prompt, SourceText, Span
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.adapters.registry import AdapterRegistry, HeldAdapter
    from octavo.engine.encoding.rotary import RotaryPositions
    from octavo.engine.limits import EngineLimits
    from octavo.engine.texts.constrained import GrammarCompiler


class RequestFactory:
    """Creates one engine's requests, with the checks that need its model or cache. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        kv_cache: KVCacheManager,
        metrics: EngineMetrics,
        texts: TextModel = ANSWERS_ONLY,
        heads: TextHeads = NO_HEADS,
    ) -> None:
        """texts: the text tasks that the model supports.
        heads: the steps that follow pooling.
        """
        self._tokenizer = tokenizer
        self._limits = limits
        self._num_tokens = min(limits.vocab_size, tokenizer.vocab_size)  # either may be padded
        self._kv_cache = kv_cache
        self._metrics = metrics
        self._texts = texts
        self._heads = heads
        self._arrivals = itertools.count()
        self.adapters: AdapterRegistry | None = None
        self._grammar_lock = threading.Lock()
        self._grammar_compiler: GrammarCompiler | None = None

    def create(self, request_id: str, generation: GenerationRequest) -> Request:
        """See `Engine.create_request`."""
        params = generation.params
        prompt = generation.prompt
        self._check_prompt(generation)
        self._texts.check(params, len(prompt))
        room = self._limits.max_model_len - len(prompt)
        if self._limits.sources.width:
            prompt = self._after_source(generation)
            room -= len(prompt)
        self._check_params(params, room)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        prediction = generation.options.prediction
        adapter = self._adapter(generation.options.adapter)
        start = None if adapter is None else adapter.adapter.start_in(prompt.token_ids)
        adapter = None if start is None else adapter
        eos_token_ids = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            arrival=next(self._arrivals),
            max_total_tokens=len(prompt) + max_tokens,
            eos_token_ids=eos_token_ids,
            end_token_ids=eos_token_ids.union(params.sampling.stop_token_ids),
            text=generation.text,
            options=generation.options,
            pins=generation.pins,
            is_measured=generation.is_measured and params.is_answered,
            is_followed=generation.is_followed,
            rotary=self._rotary(prompt),
            bad_words_ids=self._find_bad_words(params.sampling),
            adapter=adapter,
            adapter_start=start or 0,
            predicted_ids=self._tokenizer.encode(prediction, add_special_tokens=False) if prediction else [],
            times=RequestTimes(arrival=time.perf_counter()),
        )
        self._check_fits(request)
        self._create_groups(request, max_tokens)
        if params.structured_outputs is not None:
            is_closed = bool(generation.options.closed_objects)
            grammar = self.grammars().compile(params.structured_outputs, closed_objects=is_closed)
            self._metrics.grammar_cache_bytes = self.grammars().cache.num_bytes
            for sequence in request.sequences:
                sequence.grammar = grammar.copy()
        return request

    def _adapter(self, name: str) -> HeldAdapter | None:
        """Return the adapter with this name, loaded on demand, or None for the base model.

        Raises UsageError or ModelLoadError.
        """
        if not name and self.adapters is not None:
            name = self.adapters.default
        if not name:
            return None
        if self.adapters is None:
            raise UsageError(
                "this engine takes no adapters: load the model with enable_lora", param="adapter", code="no_adapters"
            )
        held = self.adapters.get(name)
        return held if held.adapter.parts else None

    def grammars(self) -> GrammarCompiler:
        """Return the grammar compiler, created on first use because it imports a library."""
        with self._grammar_lock:
            if self._grammar_compiler is None:
                # Imports llguidance, which a start without grammars does not need.
                from octavo.engine.texts.constrained import GrammarCompiler

                self._grammar_compiler = GrammarCompiler(self._tokenizer, self._limits.vocab_size)
            return self._grammar_compiler

    # --- checks ---

    def _check_prompt(self, generation: GenerationRequest) -> None:
        """Raise UsageError if the prompt is empty or too long, or if the model lacks one of its tokens."""
        prompt, limits, is_answered = generation.prompt, self._limits, generation.params.is_answered
        if not prompt:
            code = "empty_array" if generation.text is None else "invalid_value"
            raise UsageError("the prompt is empty; give at least one token", param="prompt", code=code)
        if (slot := generation.options.id_slot) >= limits.max_num_seqs:
            raise UsageError(
                f"id_slot is {slot}; it must be from 0 to {limits.max_num_seqs - 1} (max_num_seqs is "
                f"{limits.max_num_seqs})",
                param="id_slot",
                code="invalid_value",
            )
        # No token follows a text that is embedded, but all of it must be in the cache.
        context = limits.max_model_len
        if not is_answered:
            context = min(context, limits.num_blocks * limits.block_size)
        longest = context - is_answered - bool(limits.sources.width)  # an answer starts with its own first token
        if len(prompt) > longest:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens; the context of {context} allows at most "
                f"{longest}{', to leave room for one new token' if is_answered else ''}. Shorten "
                f"it{limits.longer_context}",
                param="prompt",
                code="context_length_exceeded",
            )
        self._check_range("prompt", (min(prompt.token_ids), max(prompt.token_ids)))
        for span in prompt.spans:
            self._check_span(span)

    def _after_source(self, generation: GenerationRequest) -> Prompt:
        """Return the prompt with which the answer begins after the encoder has read the request's text.

        Raises UsageError for options that only apply to plain prompts.
        """
        params = generation.params
        if not params.is_answered:
            message = (
                "this model has an encoder and a decoder: it generates text and cannot make embeddings; use an "
                "embedding model"
            )
            raise UsageError(message, param="model", code="unsupported_model")
        if params.prompt_logprobs is not None:
            message = (
                "this model reads the prompt with its encoder, so prompt tokens have no log-probabilities; "
                "leave prompt_logprobs out"
            )
            raise UsageError(message, param="prompt_logprobs", code="unsupported_parameter")
        return Prompt([self._limits.sources.start_token_id], source=SourceText(generation.prompt.token_ids))

    def _check_span(self, span: Span) -> None:
        """Raise UsageError if the model does not take the span's values, or if none are given."""
        width, place = self._limits.span_width, f"the span at positions {span.start} to {span.end - 1}"
        if not width:
            problem = f"this model takes no images or embeddings: {place} cannot be used; give only tokens"
        elif span.item is not None and self._limits.images.max_patches:
            self._check_item(span.item)
            return
        elif span.values is None:
            problem = (
                f"{place} has no values, and the model has no encoder to compute them; give float32 [{span.length}, "
                f"{width}]"
            )
        elif span.values.shape[1] != width:
            problem = f"the values of {place} have {span.values.shape[1]} columns; this model takes {width}"
        else:
            return
        raise UsageError(problem, param="prompt", code="unsupported_content")

    def _check_item(self, item: MediaItem) -> None:
        """Raise UsageError if an item is too large for the encoder or its pixels do not match its grid."""
        limits = self._limits.images
        if item.num_patches > limits.max_patches:
            raise UsageError(
                f"an image has {item.num_patches} patches; this engine takes at most {limits.max_patches}. Send a "
                "smaller one, or raise image_max_tokens",
                param="prompt",
                code="image_too_large",
            )
        for tile, pixels in zip(item.layout.tiles, item.tiles, strict=True):
            sides = tile.num_frames * tile.grid_rows * limits.patch_size, tile.grid_cols * limits.patch_size
            if pixels.shape[:2] != sides:
                raise UsageError(
                    f"a tile has {pixels.shape[0]} x {pixels.shape[1]} pixels, but its layout {sides[0]} x "
                    f"{sides[1]}: make both with the model's processor",
                    param="prompt",
                    code="invalid_image",
                )

    def _rotary(self, prompt: Prompt) -> RotaryPositions | None:
        """Return the multi-component positions of a prompt, or None if one component is enough."""
        images = self._limits.images
        if not prompt.spans or (images.position_components == 1 and not images.longest_span):
            return None
        from octavo.engine.encoding.rotary import rotary_positions, span_positions

        return span_positions(prompt) if images.longest_span else rotary_positions(prompt, images.merge_size)

    def _check_params(self, params: Params, room: int) -> None:
        """Raise UsageError if the parameters name a token that the model lacks, or exceed its limits.

        room: tokens left in the context for an answer.
        """
        most = min(self._limits.max_num_seqs, self._num_tokens)
        if params.num_seqs > most:
            raise UsageError(
                f"beam_width is {params.num_seqs}, but only {most} sequences run at once; lower it or raise "
                "max_num_seqs",
                param="beam_width",
                code="integer_above_max_value",
            )
        sampling = params.sampling
        if sampling.min_tokens > room:
            raise UsageError(
                f"min_tokens is {sampling.min_tokens}, but the context has room for only {room} after this prompt; "
                "lower it",
                param="min_tokens",
                code="integer_above_max_value",
            )
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            self._check_range(name, getattr(sampling, name) or ())

    def _check_fits(self, request: Request) -> None:
        """Raise UsageError with the arithmetic if the request could not run even alone."""
        cache, num_seqs = self._kv_cache, request.params.num_seqs
        # An answer's last token is never computed, and beams share the full blocks of their prompt.
        shared = cache.num_shared_blocks(request.num_prompt_tokens) if num_seqs > 1 else 0
        needed = shared + num_seqs * (cache.max_blocks(request.max_total_tokens - request.params.is_answered) - shared)
        needed += cache.num_source_blocks(request.num_source_tokens)
        if needed > cache.pool.num_blocks:
            raise UsageError(
                f"a request of {request.num_given_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} new ones in {num_seqs} sequence(s) needs "
                f"{needed} cache blocks of {cache.block_size} tokens; the cache has {cache.pool.num_blocks}. "
                f"Lower max_tokens{' or beam_width' if num_seqs > 1 else ''}, or give the cache more memory",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _find_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of the bad words, each with and without a leading space."""
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = [tuple(self._tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings]
        for token_ids in encoded:
            self._check_range("bad_words", token_ids)
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    def _check_range(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._num_tokens:
                shown = token_id if abs(token_id) < 2**256 else "with thousands of digits"
                raise UsageError(
                    f"{name} contains token id {shown}; this model has ids 0 to {self._num_tokens - 1}",
                    param=name,
                    code="token_out_of_range",
                )

    # --- sequences ---

    def _create_groups(self, request: Request, max_tokens: int) -> None:
        params = request.params
        if isinstance(params, BeamSearchParams):
            request.groups = [self._group(request, BeamSearch(params, max_tokens, request.eos_token_ids))]
            # Its beams are not shown.
            request.sequences = [
                Sequence(request, i, list(request.prompt.token_ids)) for i in range(params.num_choices)
            ]
            return
        if isinstance(params, PoolingParams):
            request.groups = [self._group(request, self._pooler(params))]
        else:
            request.groups = self._choices(request, params)
        request.sequences = [group.members[0] for group in request.groups]

    def _pooler(self, params: PoolingParams) -> RowConsumer:
        texts = self._texts
        finish = self._heads.finish(params, texts)
        if params.task == "token_embed":
            return TokenVectors(finish)
        pooling = params.pooling or texts.pooling
        return RowTaker(pooling, finish) if texts.takes_whole_texts else Pooler(pooling, finish)

    def _choices(self, request: Request, params: SamplingParams) -> list[SequenceGroup]:
        seed = secrets.randbits(64) if params.seed is None else params.seed
        groups = []
        for index in range(params.num_choices):
            # The first choice computes the prompt for all.
            notes_prompt = params.prompt_logprobs is not None and index == 0
            noted = (PromptLogprobs(request.options.prompt_logprobs_start),) if notes_prompt else ()
            consumers = (*noted, TokenSampler())
            group = self._group(request, *consumers, index=index, seed=derive_seed(seed, index))
            if params.logprobs is not None:
                group.members[0].cumulative_logprob = 0.0
            if params.detokenize:
                group.members[0].text_stream = TextStream(self._tokenizer, params)
            groups.append(group)
        return groups

    @staticmethod
    def _group(request: Request, *consumers: RowConsumer, index: int = 0, seed: int = 0) -> SequenceGroup:
        return SequenceGroup(request, [Sequence(request, index, list(request.prompt.token_ids), seed)], consumers)
