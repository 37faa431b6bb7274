"""Evaluates a model on a text: its perplexity and, given a reference model, its divergence from the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from octavo import __version__
from octavo.batch import Float32, Float64, Int32
from octavo.config import LoadProgress
from octavo.engine.loading.devices import backend_name
from octavo.errors import UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.quality.figures import Divergence, Perplexity
from octavo.quality.reference_scores import ReferenceScores, ReferenceStore, reference_key
from octavo.quality.scorer import Scorer, TokenScores, scorer_config
from octavo.quality.texts import JudgedText
from octavo.quality.windows import DESCRIPTIONS, Convention, Window, chunk_windows, strided_windows
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

Progress: TypeAlias = Callable[[str, int, int], None]
_READING = "reading the reference"


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Options for cutting a text into windows.

    convention, size, stride: see `octavo.quality.windows`.
    max_tokens: limit for all windows together; None for the whole text.
    """

    convention: Convention = "chunks"
    size: int = 512
    stride: int | None = None  # None: half a window
    max_tokens: int | None = None

    def windows(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[Window]:
        """Return the windows of a text's tokens. If they exceed max_tokens, take an evenly spread part.

        Raises UsageError.
        """
        if self.convention == "chunks":
            windows = chunk_windows(ids, self.size, tokenizer.prefix_ids[0] if tokenizer.prefix_ids else None)
        else:
            windows = strided_windows(ids, self.size, self.step)
        most = len(windows) if self.max_tokens is None else self.max_tokens // self.size
        if most < 1:
            raise UsageError(f"{self.max_tokens} tokens are fewer than one window of {self.size}; raise --tokens")
        if most >= len(windows):
            return windows
        return [windows[i * len(windows) // most] for i in range(most)]

    @property
    def step(self) -> int:
        return max(self.size // 2, 1) if self.stride is None else self.stride

    def describe(self, tokenizer: Tokenizer) -> str:
        """Describe the convention in words."""
        bos = ", the first token is the model's start of text" if tokenizer.prefix_ids else ""
        return DESCRIPTIONS[self.convention].format(size=self.size, stride=self.step, bos=bos)


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """The reference model.

    model: a path, hub id or short name.
    options: options of its engine.
    limit_bytes: limit for all references on disk.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    limit_bytes: int = 8 << 30
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class TextReport:
    """The figures of one model on one text.

    divergence: None without a reference.
    seconds: time to compute the log-probabilities, not including loading.
    tokens_per_s: counts all tokens in the windows.
    """

    model: str
    text: str
    text_sha256: str
    convention: str
    num_windows: int
    num_text_tokens: int
    perplexity: Perplexity
    top1_accuracy: float  # share of the tokens that the model found most likely
    seconds: float
    tokens_per_s: float
    reference: str | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Figures of the counted tokens, [N] each, in the order of the windows."""

    positions: Int32
    token_ids: Int32
    logprobs: Float32
    ranks: Int32
    kl: Float64 | None


def evaluate_text(
    model: str,
    text: JudgedText,
    wanted: WindowOptions = WindowOptions(),
    *,
    options: dict[str, Any] | None = None,
    reference: ReferenceOptions | None = None,
    progress: Progress | None = None,
) -> tuple[TextReport, TokenFigures]:
    """Load a model and evaluate it.

    options: fields of `EngineConfig`.

    Raises the errors of `Scorer`, and UsageError for a text that is too short or a reference with different tokens.
    """
    config = scorer_config(model, wanted.size, options or {})
    tokenizer = tokenizer_of(model, config.revision)
    ids = text.encode(tokenizer)
    windows = wanted.windows(ids, tokenizer)
    judged = None if reference is None else find_reference(reference, windows, text, wanted, progress)
    with Scorer(config, progress_of_load(progress)) as scorer:
        scored = judge(scorer, windows, judged, progress)
    perplexity = Perplexity.of(scored.tokens.logprobs)
    report = TextReport(
        model=model,
        text=text.name,
        text_sha256=text.digest,
        convention=wanted.describe(tokenizer),
        num_windows=len(windows),
        num_text_tokens=len(ids),
        perplexity=perplexity,
        top1_accuracy=float((scored.tokens.ranks == 1).mean()),
        seconds=scored.seconds,
        tokens_per_s=sum(len(window.token_ids) for window in windows) / scored.seconds,
        reference=None if reference is None else reference.model,
        divergence=scored.divergence,
    )
    return report, scored.tokens


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of scoring windows.

    seconds: time spent in the model.
    """

    tokens: TokenFigures
    divergence: Divergence | None
    seconds: float


def judge(
    scorer: Scorer,
    windows: Sequence[Window],
    reference: ReferenceScores | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """Score windows on a loaded model, and compare with a reference if given."""
    kept: list[TokenScores] = []
    seconds = 0.0

    def noted() -> Iterator[tuple[Window, TokenScores]]:
        nonlocal seconds
        start = time.perf_counter()
        for done, (window, scores) in enumerate(scorer.score(windows, wants_logits=reference is not None), 1):
            seconds += time.perf_counter() - start
            if progress is not None:
                progress("scoring windows", done, len(windows))
            kept.append(TokenScores(scores.logprobs, scores.ranks))
            yield window, scores
            start = time.perf_counter()

    divergence, kl = None, None
    if reference is None:
        for _ in noted():
            pass
    else:
        figures = reference.compare(noted())
        divergence, kl = figures.summary(), figures.kl
    positions = [np.arange(window.start, window.start + window.num_counted) for window in windows]
    tokens = TokenFigures(
        positions=np.concatenate(positions).astype(np.int32),
        token_ids=np.array([token for window in windows for token in window.token_ids[window.first :]], np.int32),
        logprobs=np.concatenate([scores.logprobs for scores in kept]),
        ranks=np.concatenate([scores.ranks for scores in kept]),
        kl=kl,
    )
    return Judgement(tokens, divergence, seconds)


def find_reference(
    reference: ReferenceOptions,
    windows: Sequence[Window],
    text: JudgedText,
    wanted: WindowOptions,
    progress: Progress | None = None,
) -> ReferenceScores:
    """Return the reference's log-probabilities of these windows, from disk or else computed and saved there.

    Raises UsageError if its tokenizer makes different windows from the text.
    """
    config = scorer_config(reference.model, wanted.size, reference.options)
    store = ReferenceStore(reference.limit_bytes, reference.folder)
    with closing(open_checkpoint(resolve_model(reference.model, revision=config.revision))) as checkpoint:
        files, tokenizer = checkpoint.file.paths, load_tokenizer(checkpoint)
    entries = [(window.token_ids, window.first) for window in windows]
    read = None if progress is None else (lambda done, total: progress(_READING, done, total))
    settings = (backend_name(config), config.kv_dtype, config.dtype, config.quantization)
    key = reference_key(files, __version__, entries, settings, progress=read)
    if (found := store.find(key)) is not None:
        return found
    if wanted.windows(text.encode(tokenizer), tokenizer) != [*windows]:
        raise UsageError(
            f"{reference.model} splits this text into other tokens than the model: a reference must have the same "
            "vocabulary, because only probabilities of the same tokens can be compared"
        )
    with Scorer(config, progress_of_load(progress)) as scorer:
        scored = scorer.score(windows, wants_logits=True)
        if progress is not None:
            scored = _reporting(scored, len(windows), progress)
        return store.make(key, windows, scorer.vocab_size, scored)


def _reporting(
    scored: Iterator[tuple[Window, TokenScores]], total: int, progress: Progress
) -> Iterator[tuple[Window, TokenScores]]:
    for done, item in enumerate(scored, 1):
        progress("scoring the reference", done, total)
        yield item


def tokenizer_of(model: str, revision: str | None = None) -> Tokenizer:
    """Load a model's tokenizer without its weights. Raises ModelLoadError."""
    with closing(open_checkpoint(resolve_model(model, revision=revision))) as checkpoint:
        return load_tokenizer(checkpoint)


def progress_of_load(progress: Progress | None) -> LoadProgress | None:
    """Return a callback that reports loading progress, in bytes."""
    return None if progress is None else lambda phase, done, total: progress(f"{phase}, MB", done >> 20, total >> 20)
