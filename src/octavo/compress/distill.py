"""Distillation: trains a student to predict a teacher's next-token distributions.

The teacher's most likely tokens and their probabilities are cached on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantizers import compute_threads
from octavo.backends.whole_texts import TextRunner
from octavo.compress.prune import dense_source
from octavo.compress.to_gguf import tensors_in_gguf
from octavo.errors import NumericalError, UsageError
from octavo.loader.atomic_file import check_free_space, mapped_array
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.tensor_files import Source
from octavo.models import build_graph
from octavo.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from octavo.backends.torch.distillation import LossReport, TeacherTokens, TrainingOptions

_REMEDY = "training needs torch: pip install 'octavo[train]'"
_FORMAT = 2  # version of the cache
_AT_ONCE = 4  # texts of the teacher in a step
_ROWS_AT_ONCE = 16  # rows of logits, few enough to stay in a CPU cache
_GROUPS_PER_TOKEN = 16  # groups per row for each requested most likely token
_LEAST_LOSS = np.float32(-6e-8)  # the smallest number below 0 as a float16: 0 stands for "not yet computed"


@dataclass(frozen=True, slots=True)
class TeacherCache:
    """The folder that caches the teacher's most likely tokens, and how many of them are kept per position."""

    folder: Path
    top_k: int = 64

    def tokens(
        self,
        teacher: Checkpoint,
        texts: NDArray[np.int32],
        report: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> TeacherTokens:
        """Return the teacher's most likely next tokens at every position of texts [texts, tokens], mapped from disk.

        Texts that are not on disk yet are computed first. After a killed run, the next run continues after the last
        complete text.

        report: called with the number of finished texts and the number of all texts.
        """
        trained = _training()
        count, length = texts.shape
        graph = build_graph(teacher.architecture, teacher.config, teacher.weights.shapes)
        top_k = min(self.top_k, graph.output.cols)
        digest = hashlib.sha256(repr((_FORMAT, texts.tolist(), top_k)).encode())
        for name in sorted(teacher.weights):
            digest.update(teacher.weights.fingerprint(name))
        folder = self.folder / digest.hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        check_free_space(folder, 6 * texts.size * top_k)
        ids = _array(folder / "ids.npy", np.dtype(np.int32), (count, length, top_k))
        logprobs = _array(folder / "logprobs.npy", np.dtype(np.float16), (count, length, top_k))
        done = int(np.count_nonzero(logprobs[:, -1, -1]))  # the last number of a text: none is 0
        if done < count:
            rows = np.arange(length, dtype=np.int32)
            with TextRunner(graph, teacher.weights, texts[:_AT_ONCE], rows) as runner:
                for begin in range(done, count, _AT_ONCE):
                    report(begin, count)
                    part = texts[begin : begin + _AT_ONCE]
                    runner.take(part)
                    [logits] = runner.run()
                    found, values = likeliest(logits, top_k)
                    ids[begin : begin + len(part)] = found.reshape(len(part), length, top_k)
                    ids.flush()
                    logprobs[begin : begin + len(part)] = values.reshape(len(part), length, top_k)
                    logprobs.flush()
        made: TeacherTokens = trained.TeacherTokens(texts, ids, logprobs)
        return made


def _array(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Map an array from a file; it is all zeros if the file is new or does not fit."""
    if path.is_file():
        try:
            found: np.memmap[Any, Any] = np.load(path, mmap_mode="r+", allow_pickle=False)
            if found.shape == shape and found.dtype == dtype:
                return found
        except (OSError, ValueError):
            pass
    return mapped_array(path, dtype, shape)


def likeliest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the most likely tokens of each row [rows, vocabulary], in descending order, and their log-probabilities.

    Log-probabilities are below 0. Raises NumericalError for a logit that is not finite.
    """
    ids = np.empty((len(logits), count), np.int32)
    logprobs = np.empty((len(logits), count), np.float16)

    def take(begin: int) -> None:
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        ids[rows], logprobs[rows] = _likeliest(logits[rows], count)

    with ThreadPoolExecutor(compute_threads()) as pool:  # numpy lets go of the interpreter's lock
        list(pool.map(take, range(0, len(logits), _ROWS_AT_ONCE)))
    return ids, logprobs


def _likeliest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    rows, cols = logits.shape
    high = logits.max(axis=1, keepdims=True)
    if not np.isfinite(high).all() or not np.isfinite(logits.min()):
        raise NumericalError("the teacher's logits contain NaN or infinity")
    total = high + np.log(np.exp(logits - high).sum(axis=1, keepdims=True))
    # The largest numbers of many groups, of which the one in place `count` bounds those that are wanted from below.
    size = max(cols // (_GROUPS_PER_TOKEN * count), 1)
    largest = logits[:, : cols // size * size].reshape(rows, size, cols // size).max(axis=1)
    row_of, candidates = np.nonzero(logits >= np.partition(largest, -count, axis=1)[:, -count, None])
    values = logits[row_of, candidates] - total[row_of, 0]
    order = np.lexsort((-values, row_of))
    chosen = order[np.searchsorted(row_of, np.arange(rows))[:, None] + np.arange(count)]
    return candidates[chosen].astype(np.int32), np.minimum(values[chosen], _LEAST_LOSS)


def check_vocabularies(teacher: Checkpoint, student: Checkpoint) -> None:
    """Check that both models have the same tokens; one of them may have more at the end. Raises UsageError."""
    tokens, others = load_tokenizer(teacher).tokens, load_tokenizer(student).tokens
    for i, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            raise UsageError(
                f"token {i} is {token!r:.40} in the teacher and {other!r:.40} in the student; "
                "use models with the same vocabulary"
            )


def distilled(
    teacher: TeacherTokens, student: Checkpoint, architecture: str, options: TrainingOptions, report: LossReport
) -> dict[str, Source]:
    """Train the student and return its tensors by GGUF name.

    architecture: the architecture's name in GGUF files.

    Raises UsageError if torch is missing or if the student lacks a token, and NumericalError if a loss is not finite.
    """
    graph = build_graph(student.architecture, student.config, student.weights.shapes)
    if (largest := int(teacher.ids.max())) >= graph.output.cols:
        raise UsageError(
            f"the teacher has token {largest}, the student {graph.output.cols} tokens; they must be the same"
        )
    try:
        arrays = _training().train(graph, student.weights, teacher, options, report)
    except FloatingPointError as error:
        raise NumericalError(str(error)) from error
    weights = {name: _with(student.weights.info(name), name, arrays) for name in student.weights}
    return tensors_in_gguf(
        replace(student, weights=type(student.weights)(weights, student.file)), architecture, weights
    )


def _with(source: Source, name: str, arrays: Mapping[str, NDArray[np.float32]]) -> Source:
    return dense_source(source, lambda: arrays[name], source.shape, "trained") if name in arrays else source


def training_options(**fields: Any) -> TrainingOptions:
    """Return `TrainingOptions` with these fields. Products are computed in bfloat16 where that is faster than float32.

    Raises UsageError if torch is missing.
    """
    training = _training()
    made: TrainingOptions = training.TrainingOptions(**fields, in_bfloat16=training.bfloat16_is_faster())
    return made


def training_texts(ids: Sequence[int], length: int, first: int | None, most: int) -> NDArray[np.int32]:
    """Return at most `most` pieces of `length` tokens, spread evenly over a text: [texts, tokens].

    first: token that replaces the first one of each piece.

    Raises UsageError if the text is too short for one piece.
    """
    count = len(ids) // length
    if count < 1:
        raise UsageError(f"the text has {len(ids)} tokens, fewer than one piece of {length}; give more text")
    texts: NDArray[np.int32] = np.array(ids[: count * length], np.int32).reshape(count, length)
    texts = texts[np.linspace(0, count - 1, min(most, count)).round().astype(np.intp)]
    if first is not None:
        texts[:, 0] = first
    return texts


def _training() -> Any:
    """Import the module that needs torch. If torch is missing, raises UsageError saying how to install it."""
    try:
        from octavo.backends.torch import distillation
    except ImportError as error:
        raise UsageError(_REMEDY) from error
    return distillation
