"""Creates checked requests from `GenerationRequest`s."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from typing import TYPE_CHECKING

from octavo.engine.beam_search import BeamSearch
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import Request, RequestTimes, RowConsumer, Sequence, SequenceGroup, derive_seed
from octavo.engine.request_checks import check_fits, check_params, check_prompt, find_bad_words
from octavo.engine.row_consumers import BeamSampler, Pooler, PromptLogprobs, TokenSampler
from octavo.engine.text_stream import TextStream
from octavo.generation_request import GenerationRequest, PoolingParams
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.constrained import GrammarCompiler
    from octavo.engine.engine import EngineLimits


class RequestFactory:
    """Creates the requests of one engine. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, limits: EngineLimits, kv_cache: KVCacheManager, metrics: EngineMetrics
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._kv_cache = kv_cache
        self._metrics = metrics
        self._arrivals = itertools.count()
        self._grammar_lock = threading.Lock()
        self._grammar_compiler: GrammarCompiler | None = None

    def create(self, request_id: str, generation: GenerationRequest) -> Request:
        """See `Engine.create_request`."""
        limits, params, options = self._limits, generation.params, generation.options
        num_tokens = min(limits.vocab_size, self._tokenizer.vocab_size)  # either may be padded
        longest = limits.max_model_len
        if not params.is_answered:
            longest = min(longest, limits.num_blocks * limits.block_size)
        token_ids = check_prompt(
            generation.prompt_token_ids,
            num_tokens,
            longest,
            is_text=generation.prompt is not None,
            is_answered=params.is_answered,
        )
        room = limits.max_model_len - len(token_ids)
        check_params(params, num_tokens, room)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        eos_token_ids = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival=next(self._arrivals),
            max_total_tokens=len(token_ids) + max_tokens,
            eos_token_ids=eos_token_ids,
            end_token_ids=eos_token_ids.union(params.sampling.stop_token_ids),
            prompt=generation.prompt,
            options=options,
            is_measured=generation.is_measured and params.is_answered,
            bad_words_ids=find_bad_words(params.sampling, self._tokenizer, num_tokens),
            times=RequestTimes(arrival=time.perf_counter()),
        )
        check_fits(request, self._kv_cache, limits.max_num_seqs)
        self._create_groups(request, max_tokens)
        if params.structured_outputs is not None:
            grammar = self._grammars().compile(params.structured_outputs)
            self._metrics.grammar_cache_bytes = self._grammars().cached_bytes
            for sequence in request.sequences:
                sequence.grammar = grammar.start()
        return request

    def prepare_structured_outputs(self) -> None:
        """See `Engine.prepare_structured_outputs`."""
        self._grammars().prepare()

    def _grammars(self) -> GrammarCompiler:
        """The grammar compiler; created on first use, because it imports a library."""
        with self._grammar_lock:
            if self._grammar_compiler is None:
                from octavo.engine.constrained import GrammarCompiler

                self._grammar_compiler = GrammarCompiler(self._tokenizer, self._limits.vocab_size)
            return self._grammar_compiler

    def _create_groups(self, request: Request, max_tokens: int) -> None:
        params = request.params
        if isinstance(params, BeamSearchParams):
            search = BeamSearch(params, max_tokens, request.eos_token_ids)
            request.groups = [self._group(request, BeamSampler(search))]
            # Nothing is shown of its beams.
            request.sequences = [Sequence(request, i, request.prompt_token_ids) for i in range(params.num_choices)]
            return
        if isinstance(params, PoolingParams):
            request.groups = [self._group(request, Pooler(params.pooling))]
        else:
            request.groups = self._choices(request, params)
        request.sequences = [group.members[0] for group in request.groups]

    def _choices(self, request: Request, params: SamplingParams) -> list[SequenceGroup]:
        seed = secrets.randbits(64) if params.seed is None else params.seed
        groups = []
        for index in range(params.num_choices):
            # The first computes the prompt for all.
            notes_prompt = params.prompt_logprobs is not None and index == 0
            consumers = (PromptLogprobs(), TokenSampler()) if notes_prompt else (TokenSampler(),)
            group = self._group(request, *consumers, index=index, seed=derive_seed(seed, index))
            if params.logprobs is not None:
                group.members[0].cumulative_logprob = 0.0
            if params.detokenize:
                group.members[0].text_stream = TextStream(self._tokenizer, params)
            groups.append(group)
        return groups

    @staticmethod
    def _group(request: Request, *consumers: RowConsumer, index: int = 0, seed: int = 0) -> SequenceGroup:
        return SequenceGroup(request, [Sequence(request, index, list(request.prompt_token_ids), seed)], consumers)
