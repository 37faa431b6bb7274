"""Measures the speedup from drafts: prompts of eight kinds, alternately without and with drafts, on one model."""

from __future__ import annotations

import queue
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from octavo.bench.machine import Machine, describe_machine
from octavo.bench.requests import check_sizes
from octavo.bench.speculation_texts import EDITS, PROMPTS
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.engine.session import Session
from octavo.errors import OctavoError, UsageError
from octavo.generation_request import RequestOptions
from octavo.outputs import OutputDelta, RequestMetrics
from octavo.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, slots=True)
class KindReport:
    """The figures of one kind of text.

    num_tokens: tokens of the answer.
    accepted_share: fraction of the computed drafts that were accepted.
    tokens_per_step: mean tokens per step.
    tokens_per_s: speed after the first token; medians without drafts and with them.
    gain, first_token_ratio: speed with drafts divided by speed without, and the same for the time to the first token;
        medians over the turns. 1.0 for answers of one token.
    """

    kind: str
    num_tokens: int
    accepted_share: float | None
    tokens_per_step: float
    plain_tokens_per_s: float
    tokens_per_s: float
    gain: float
    first_token_ratio: float


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """The figures of all kinds.

    gain, edit_gain: geometric means over all kinds and over edits of files (None if there are none).
    worst_gain: the lowest gain of any kind.
    are_equal: answers and log-probabilities are bitwise equal with and without drafts.
    """

    machine: Machine
    users: int
    temperature: float
    turns: int
    kinds: list[KindReport]
    gain: float
    edit_gain: float | None
    worst_gain: float
    are_equal: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: list[int]
    logprob: float | None
    metrics: RequestMetrics

    @property
    def bits(self) -> tuple[list[int], float | None]:
        """The part that must be identical with and without drafts."""
        return self.token_ids, self.logprob

    @property
    def tokens_per_s(self) -> float:
        return (self.metrics.num_generated_tokens - 1) / max(self.metrics.decode_s, 1e-9)


def speculation(
    model: str,
    *,
    turns: int = 3,
    output_len: int = 300,
    temperature: float = 0.0,
    users: int = 1,
    kinds: Sequence[str] = (),
    show_progress: bool = False,
    **options: Any,
) -> SpeculationReport:
    """Answer each of `PROMPTS` without drafts and with them, `turns` times; the first turn is a warm-up and does not
    count.

    users: prompts running at the same time; with 8, all kinds at once.
    kinds: kinds of text, by name in `PROMPTS`; empty for all.
    options: additional fields of `EngineConfig`.

    Raises UsageError for an unknown kind or if the options turn drafts off, ModelLoadError or InsufficientMemoryError.
    """
    check_sizes(turns=turns, output_len=output_len, users=users)
    wanted = _wanted(kinds)
    with (
        closing(Session(EngineConfig.resolve(model, options))) as session,
        ProgressBar(enabled=show_progress) as bar,
    ):
        engine = session.model().engine
        drafting = engine.speculation
        if drafting is None:
            raise UsageError("drafts are off, so nothing can be compared; set speculation to ngram, or auto on the CPU")
        params = SamplingParams(
            temperature=temperature,
            seed=1,
            max_tokens=output_len,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        found: list[tuple[dict[str, _Answer], dict[str, _Answer]]] = []
        for turn in range(turns + 1):
            bar.update("turns", turn, turns + 1)
            engine.speculation = None
            plain = _answers(session, params, wanted, users, f"plain{turn}")
            engine.speculation = drafting
            found.append((plain, _answers(session, params, wanted, users, f"drafts{turn}")))
        bar.update("turns", turns + 1, turns + 1)
        are_equal = all(plain[kind].bits == drafted[kind].bits for plain, drafted in found for kind in wanted)
        reports = [_report(kind, found[1:]) for kind in wanted]
        edits = [each.gain for each in reports if each.kind in EDITS]
        return SpeculationReport(
            describe_machine(session),
            users,
            temperature,
            turns,
            reports,
            statistics.geometric_mean([each.gain for each in reports]),
            statistics.geometric_mean(edits) if edits else None,
            min(each.gain for each in reports),
            are_equal,
        )


def _wanted(kinds: Sequence[str]) -> list[str]:
    unknown = [kind for kind in kinds if kind not in PROMPTS]
    if unknown:
        raise UsageError(f"there is no kind of text {unknown[0]!r}; choose {', '.join(PROMPTS)}")
    return list(dict.fromkeys(kinds)) or list(PROMPTS)


def _answers(session: Session, params: SamplingParams, kinds: list[str], users: int, salt: str) -> dict[str, _Answer]:
    """Return the answers by kind.

    salt: keeps other turns' prompts out of the prefix cache, so that first tokens are comparable.
    """
    answers = {}
    for first in range(0, len(kinds), users):
        part = kinds[first : first + users]
        results: queue.SimpleQueue[OutputDelta | OctavoError] = queue.SimpleQueue()
        names = {}
        for kind in part:
            prompt = _prompt(session, PROMPTS[kind])
            request = session.create_request(prompt, params, options=RequestOptions(cache_salt=salt))
            names[request.request_id] = kind
            session.submit(request, results.put)
        for _ in part:
            item = results.get()
            if isinstance(item, OctavoError):
                raise item
            assert item.metrics is not None
            choice = item.outputs[0]
            answers[names[item.request_id]] = _Answer(choice.token_ids, choice.cumulative_logprob, item.metrics)
    return answers


def _prompt(session: Session, text: str) -> list[int]:
    if session.tokenizer.chat_template is None:
        return session.encode(text)
    return session.encode_chat([{"role": "user", "content": text}])


def _report(kind: str, turns: list[tuple[dict[str, _Answer], dict[str, _Answer]]]) -> KindReport:
    pairs = [(plain[kind], drafted[kind]) for plain, drafted in turns]
    last = pairs[-1][1].metrics
    drafted = sum(answer.metrics.num_draft_tokens for _, answer in pairs)
    accepted = sum(answer.metrics.num_accepted_draft_tokens for _, answer in pairs)
    tokens = sum(answer.metrics.num_generated_tokens - 1 for _, answer in pairs)
    return KindReport(
        kind,
        last.num_generated_tokens,
        accepted / drafted if drafted else None,
        tokens / max(tokens - accepted, 1),
        statistics.median(plain.tokens_per_s for plain, _ in pairs),
        statistics.median(answer.tokens_per_s for _, answer in pairs),
        statistics.median(_ratio(answer.tokens_per_s, plain.tokens_per_s) for plain, answer in pairs),
        statistics.median(
            _ratio(answer.metrics.time_to_first_token_s, plain.metrics.time_to_first_token_s) for plain, answer in pairs
        ),
    )


def _ratio(value: float | None, base: float | None) -> float:
    return value / base if value and base else 1.0
