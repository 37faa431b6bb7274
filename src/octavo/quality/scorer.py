"""Computes log-probabilities of token windows directly on an executor, with whole windows in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from octavo.backends.sampling import SamplingError
from octavo.batch import Batch, Float32, Int32, SamplingBatch, StepOutput, greedy_rows
from octavo.config import EngineConfig, LoadProgress
from octavo.engine.load import LoadedModel, load_engine
from octavo.errors import InsufficientMemoryError, NumericalError, UsageError
from octavo.loader.finite_weights import check_weights
from octavo.platform.processors import kept_affinity
from octavo.quality.windows import Window

# A step gives back at most so many rows of logits, 300 MB of them with a vocabulary of 150,000.
_STEP_TOKENS = 512
_SEQUENCES = 112


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of a window's counted tokens. R = `Window.num_counted`."""

    logprobs: Float32  # [R]
    ranks: Int32  # [R], 1: the most likely
    logits: Float32 | None = None  # [R, vocab], of the positions before them


@dataclass(frozen=True, slots=True)
class _Piece:
    """The tokens [begin, end) of a window in one step.

    place: index of its state.
    first_block: the first of its cache blocks.
    """

    window: int
    place: int
    first_block: int
    begin: int
    end: int


class Scorer:
    """A loaded model that scores windows. It has its own cache and keeps nothing in it between windows."""

    def __init__(self, config: EngineConfig, progress: LoadProgress | None = None) -> None:
        """Load a model. Raises the errors of `load_engine` and `check_weights`, and UsageError for an encoder.

        config: made by `scorer_config`.
        """
        check_weights(config.model, config.revision)
        with kept_affinity():  # this thread is the caller's; the first of several ranks may be bound to a NUMA node
            self._loaded: LoadedModel = load_engine(config, progress)
        engine = self._loaded.engine
        self.limits = engine.limits
        self.vocab_size = engine.limits.vocab_size
        self._num_groups = len(self._loaded.executor.cache_sizes.layout.groups)
        if not engine.texts.generates:
            self.close()
            raise UsageError(
                f"{config.model} produces no logits: it is an encoder or a reranker; use a model that generates text"
            )

    def score(self, windows: Sequence[Window], *, wants_logits: bool = False) -> Iterator[tuple[Window, TokenScores]]:
        """Yield the scores of each window, in order.

        Raises NumericalError naming the position if logits contain NaN or give a token zero probability, and
        InsufficientMemoryError if the cache cannot hold the longest window.
        """
        parts: dict[int, list[TokenScores]] = {}
        for pieces in self._steps(windows):
            for piece, scores in self._run(windows, pieces, wants_logits):
                parts.setdefault(piece.window, []).append(scores)
                window = windows[piece.window]
                if piece.end == len(window.token_ids):
                    yield window, _joined(parts.pop(piece.window))

    def _steps(self, windows: Sequence[Window]) -> Iterator[list[_Piece]]:
        """Pack windows into steps: as many whole ones as fit, or pieces of one window."""
        size = self.limits.block_size
        pieces: list[_Piece] = []
        num_tokens = 0
        blocks = max((-(-len(window.token_ids) // size) for window in windows), default=1)
        places = self.limits.num_blocks // (blocks * self._num_groups)
        if self.limits.num_states:
            places = min(places, self.limits.num_states)
        if places == 0:
            raise InsufficientMemoryError(
                f"the KV cache holds {self.limits.num_blocks * size // self._num_groups} tokens, fewer than a window: "
                "raise kv_cache_memory, or use smaller windows"
            )
        places = min(places, self.limits.max_num_seqs)
        most = self.limits.max_num_batched_tokens
        for index, window in enumerate(windows):
            begin, length = 0, len(window.token_ids)
            while begin < length:
                is_full = num_tokens == most or len(pieces) == places
                if pieces and (is_full or (begin == 0 and length > most - num_tokens)):
                    yield pieces
                    pieces, num_tokens = [], 0
                end = min(length, begin + most - num_tokens)
                place = index % places
                pieces.append(_Piece(index, place, place * blocks, begin, end))
                num_tokens += end - begin
                begin = end
        if pieces:
            yield pieces

    def _run(
        self, windows: Sequence[Window], pieces: list[_Piece], wants_logits: bool
    ) -> Iterator[tuple[_Piece, TokenScores]]:
        batch, counts = self._batch(windows, pieces)
        batch.return_logits = wants_logits
        try:
            output = self._loaded.executor.submit(batch).wait()
        except SamplingError as error:
            row = min(error.errors)
            raise _unscored(windows, pieces, counts, row, error.errors[row].reason) from None
        if (infinite := np.flatnonzero(~np.isfinite(output.logprobs))).size:
            reason = "its log-probability is infinite"
            raise _unscored(windows, pieces, counts, int(infinite[0]), reason)
        row = 0
        for piece, count in zip(pieces, counts, strict=True):
            yield piece, _scores(output, slice(row, row + count))
            row += count

    def _batch(self, windows: Sequence[Window], pieces: list[_Piece]) -> tuple[Batch, list[int]]:
        """Return the batch of a step, and the number of its output rows for each piece.

        The row of a token predicts the next token.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        counts: list[int] = []
        size, longest = self.limits.block_size, max(piece.end for piece in pieces)
        width = -(-longest // size)
        tables = np.zeros((len(pieces), width), np.int32)
        for index, piece in enumerate(pieces):
            window = windows[piece.window]
            span = range(piece.begin, piece.end)
            tables[index] = np.arange(width) + piece.first_block
            first = max(piece.begin, window.first - 1)
            last = min(piece.end, len(window.token_ids) - 1)
            rows += [len(tokens) + i - piece.begin for i in range(first, last)]
            targets += window.token_ids[first + 1 : last + 1]
            counts.append(max(last - first, 0))
            tokens += window.token_ids[piece.begin : piece.end]
            positions += span
            slots += [(piece.first_block + i // size) * size + i % size for i in span]
        groups = np.arange(self._num_groups, dtype=np.int32)[:, None]
        block, offset = np.divmod(np.array(slots, np.int32), np.int32(size))
        lengths = [piece.end - piece.begin for piece in pieces]
        sampling = greedy_rows(len(rows))
        sampling["target"], sampling["num_logprobs"] = targets, 0
        batch = Batch(
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
            seq_lens=np.array([piece.end for piece in pieces], np.int32),
            block_tables=tables * np.int32(self._num_groups) + groups[:, :, None],
            slot_mapping=(block * np.int32(self._num_groups) + groups) * np.int32(size) + offset,
            logits_indices=np.array(rows, np.int32),
            sampling=SamplingBatch.plain(sampling),
        )
        if self.limits.num_states:
            batch.state_slots = np.array([piece.place for piece in pieces], np.int32)
        return batch, counts

    def close(self) -> None:
        """Free the model."""
        self._loaded.executor.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def scorer_config(model: str, window: int, options: dict[str, object]) -> EngineConfig:
    """Return the configuration of a scorer for windows of this length.

    options: the user's options, which take precedence.
    """
    defaults = {"max_model_len": window, "max_num_batched_tokens": _STEP_TOKENS, "max_num_seqs": _SEQUENCES}
    config = EngineConfig.resolve(model, {**defaults, **options})
    if config.max_model_len is not None and config.max_model_len < window:
        raise UsageError(f"max_model_len is {config.max_model_len}, less than a window of {window} tokens")
    return config


def _unscored(
    windows: Sequence[Window], pieces: Sequence[_Piece], counts: Sequence[int], row: int, reason: str
) -> NumericalError:
    """Return the error for a row of logits, naming the token of the text."""
    starts = np.cumsum([0, *counts])
    index = int(np.searchsorted(starts, row, side="right")) - 1
    window = windows[pieces[index].window]
    place = window.start + max(pieces[index].begin - window.first + 1, 0) + row - int(starts[index])
    return NumericalError(f"token {place} of the text cannot be scored: {reason}")


def _scores(output: StepOutput, rows: slice) -> TokenScores:
    logits = None if output.logits is None else output.logits[rows]
    return TokenScores(output.logprobs[rows], output.ranks[rows], logits)


def _joined(parts: list[TokenScores]) -> TokenScores:
    if len(parts) == 1:
        return parts[0]
    logits = [part.logits for part in parts if part.logits is not None]
    return TokenScores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate(logits) if logits else None,
    )
