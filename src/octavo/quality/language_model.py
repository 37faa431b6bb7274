"""A model as language-model benchmarks use it: the likelihood of continuations, and answers up to a stop text."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.engine_thread import Sink
from octavo.engine.session import Session
from octavo.errors import OctavoError, UsageError
from octavo.generation_request import RequestOptions
from octavo.outputs import OutputDelta, PoolingOutput, RequestMetrics
from octavo.sampling_params import RequestOutputKind, SamplingParams

Counted: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The likelihood of a continuation.

    logprob: sum over the continuation's tokens.
    is_greedy: every token is the most likely one at its position.
    """

    logprob: float
    is_greedy: bool


Pair: TypeAlias = tuple[list[int], list[int]]  # token ids of a context and of what follows it


class LanguageModel:
    """A loaded model. All requests of a call share the engine's steps, and contexts share its prefix cache."""

    def __init__(self, config: EngineConfig, progress: LoadProgress | None = None) -> None:
        """Load a model. Raises the errors of `load_engine`, and UsageError for a model that generates no text."""
        self.session = Session(config, progress)
        self.tokenizer = self.session.tokenizer
        self.max_length = self.session.max_model_len - 1  # one token is always generated
        self.num_truncated = 0
        self.parse_special = False  # the text of a control token is that token: in prompts that a chat template made
        if not self.session.model().engine.texts.generates:
            self.close()
            raise UsageError(
                f"{config.model} produces no logits: it is an encoder or a reranker; use a model that generates text"
            )

    @property
    def prefix_token_id(self) -> int:
        """The token before a continuation without context: the start-of-text token, or else the end-of-text token."""
        tokenizer = self.tokenizer
        if tokenizer.prefix_ids:
            return tokenizer.prefix_ids[0]
        known = [tokenizer.bos_token_id, *sorted(tokenizer.eos_token_ids), 0]
        return next(token_id for token_id in known if token_id is not None)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the model's texts begin with."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=self.parse_special)
        prefix = list(self.tokenizer.prefix_ids)
        return ids if prefix and ids[: len(prefix)] == prefix else [*prefix, *ids]

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Return the tokens of the joined text, split where the context ends.

        Spaces at the end of the context go to the continuation. Without a context, the continuation follows
        `prefix_token_id`.
        """
        if not context:
            ids = self.tokenizer.encode(continuation, add_special_tokens=False, parse_special=self.parse_special)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)
        whole = self.encode(context + continuation)
        num_context = len(self.encode(context.rstrip()))
        return whole[:num_context], whole[num_context:]

    def likelihoods(self, pairs: Sequence[Pair], counted: Counted | None = None) -> list[Likelihood]:
        """Return the likelihood of each continuation after its context.

        Contexts too long for the model lose their beginning.

        counted: called with (done, total).

        Raises UsageError for a continuation that is empty or too long.
        """
        wanted: dict[tuple[tuple[int, ...], int], list[int]] = {}  # tokens and length of the context -> places
        for place, (context, continuation) in enumerate(pairs):
            if not continuation:
                raise UsageError(f"continuation {place + 1} has no tokens: nothing of it is left after its context")
            if len(continuation) > self.max_length - 1:
                raise UsageError(
                    f"continuation {place + 1} has {len(continuation)} tokens; at most {self.max_length - 1} fit"
                )
            kept = min(len(context), self.max_length - len(continuation))
            self.num_truncated += kept < len(context)
            tokens = (*context[len(context) - kept :], *continuation)
            wanted.setdefault((tokens, kept), []).append(place)
        # The first of each context computes it, and the others find it in the prefix cache.
        families: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for tokens, kept in wanted:
            families.setdefault(tokens[:kept], []).append((tokens, kept))
        waves = [[(key[0], SCORED, {"prompt_logprobs_start": key[1]}) for key in keys] for keys in families.values()]
        order = [key for keys in families.values() for key in keys]
        outputs = self._run(waves, counted)
        found: dict[int, Likelihood] = {}
        for key, output in zip(order, outputs, strict=True):
            found |= dict.fromkeys(wanted[key], _likelihood(*key, output))
        return [found[place] for place in range(len(pairs))]

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], counted: Counted | None = None
    ) -> list[str]:
        """Return the answer to each prompt. Prompts too long for the model lose their beginning."""
        waves: list[list[_Ask]] = []
        for prompt, each in zip(prompts, params, strict=True):
            room = max(self.max_length - (each.max_tokens or 0), 1)
            self.num_truncated += len(prompt) > room
            waves.append([(tuple(prompt[-room:]), each, {})])
        return [output.outputs[0].text for output in self._run(waves, counted)]

    def timed(self, prompt: list[int], count: int) -> RequestMetrics:
        """Measure one greedy answer of `count` tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        [output] = self._run([[(tuple(prompt), params, {})]], None)
        assert output.metrics is not None
        return output.metrics

    def _run(self, families: list[list[_Ask]], counted: Counted | None) -> list[OutputDelta]:
        """Run all requests, and raise their errors.

        A family shares a prefix, so its first request goes ahead of the rest.
        """
        results: queue.SimpleQueue[tuple[int, int, OutputDelta | PoolingOutput | OctavoError]] = queue.SimpleQueue()
        outputs: dict[tuple[int, int], OutputDelta] = {}
        total = sum(map(len, families))
        running: dict[tuple[int, int], str] = {}

        def submit(family: int, member: int) -> None:
            tokens, params, options = families[family][member]
            request = self.session.create_request(
                list(tokens), params, output_kind=RequestOutputKind.FINAL_ONLY, options=RequestOptions(**options)
            )
            running[family, member] = request.request_id
            self.session.submit(request, _sink(results, family, member))

        try:
            for family in range(len(families)):
                submit(family, 0)
            while running:
                family, member, item = results.get()
                del running[family, member]
                if not isinstance(item, OutputDelta):
                    raise item if isinstance(item, OctavoError) else UsageError("the model returned a vector, not text")
                outputs[family, member] = item
                for other in range(1, len(families[family])) if member == 0 else ():
                    submit(family, other)
                if counted is not None:
                    counted(len(outputs), total)
        finally:
            for request_id in running.values():
                self.session.abort(request_id)
        return [outputs[family, member] for family, asks in enumerate(families) for member in range(len(asks))]

    def close(self) -> None:
        """Free the model."""
        self.session.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


_Ask: TypeAlias = tuple[tuple[int, ...], SamplingParams, dict[str, Any]]  # tokens, parameters, options
SCORED = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


def _likelihood(tokens: tuple[int, ...], num_context: int, output: OutputDelta) -> Likelihood:
    """Return the likelihood of the tokens after the context."""
    assert output.prompt_logprobs is not None
    entries = [
        entry[token]
        for token, entry in zip(tokens[num_context:], output.prompt_logprobs[num_context:], strict=True)
        if entry is not None
    ]
    return Likelihood(sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries))


def _sink(results: queue.SimpleQueue[Any], family: int, member: int) -> Sink:
    return lambda item: results.put((family, member, item))
