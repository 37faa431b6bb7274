"""A training run whose state is on disk, so that a later process can resume it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import NumericalError, UsageError
from octavo.finetune.adapter_folder import tensor_of
from octavo.finetune.schedule import rate_at
from octavo.loader.atomic_file import write_text
from octavo.loader.json_file import read_json_object
from octavo.loader.safetensors import open_safetensors
from octavo.loader.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    from octavo.backends.learned_text import LearnedText
    from octavo.backends.torch.low_rank_training import LowRankTrainer

_OPTIONS_NAME, _STATE_NAME = "run.json", "state.safetensors"
_MAX_BYTES = 1 << 20


@dataclass(slots=True)
class RunProgress:
    """The work that a run has done.

    losses: loss of each step.
    held_out: losses on held-out text, by the number of steps done before.
    """

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.losses)


@dataclass(frozen=True)
class Plan:
    """The work of a run.

    held_out_every: steps between two evaluations on the held-out texts.
    """

    texts: Sequence[LearnedText]
    held_out: Sequence[LearnedText]
    steps: Sequence[Sequence[int]]  # indices of texts
    highest_rate: float
    batch_tokens: int
    held_out_every: int

    def num_tokens(self, begin: int, end: int) -> int:
        """Return the number of tokens in a range of steps."""
        return int(self._tokens_before[end] - self._tokens_before[begin])

    @cached_property
    def _tokens_before(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(sum(len(self.texts[i].ids) for i in step) for step in self.steps)])


class RunFolder:
    """The folder of an unfinished run: its original options, and its latest state in one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Record the options of a new run, or return those already recorded.

        Raises UsageError naming an option whose value has changed. Options with a leading underscore may differ; the
        first process's values apply.
        """
        path = self._folder / _OPTIONS_NAME
        if not path.exists():
            write_text(path, json.dumps(options, indent=2) + "\n")
            return options
        known = read_json_object(path, _MAX_BYTES)
        for name, value in options.items():
            if not name.startswith("_") and known.get(name) != value:
                raise UsageError(
                    f"{self._folder} has an unfinished run with {name} {known.get(name)!r:.80}, not {value!r:.80}; "
                    "give the same options to resume it, or --restart to start over"
                )
        return known

    def load(self) -> tuple[RunProgress, Mapping[str, NDArray[np.float32]]]:
        """Return the latest state, which is empty if no step has been saved."""
        path = self._folder / _STATE_NAME
        if not path.exists():
            return RunProgress(), {}
        with closing(open_safetensors(path)) as file:
            found = {name: np.array(file.weight(name).dequantize()) for name in file.tensors}
        held_out = found.pop("held_out").reshape(-1, 2).tolist()
        losses = found.pop("losses").tolist()
        return RunProgress(losses, {int(step): loss for step, loss in held_out}), found

    def save(self, progress: RunProgress, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Replace the state atomically."""
        extra = {
            "losses": np.array(progress.losses, np.float32),
            "held_out": np.array([*progress.held_out.items()], np.float32).reshape(-1),
        }
        tensors = [tensor_of(name, array) for name, array in {**state, **extra}.items()]
        write_safetensors(self._folder / _STATE_NAME, tensors)


@dataclass(frozen=True, slots=True)
class Watcher:
    """The functions that observe a run.

    is_due: returns True when it is time to save the state.
    should_stop: returns True if the run should end now.
    """

    on_step: Callable[[RunProgress], None] = lambda _progress: None
    on_held_out: Callable[[int, float], None] = lambda _steps, _loss: None
    is_due: Callable[[], bool] = lambda: False
    should_stop: Callable[[], bool] = lambda: False


def run_steps(trainer: LowRankTrainer, plan: Plan, folder: RunFolder, progress: RunProgress, watcher: Watcher) -> bool:
    """Train to the end. Returns False if the run was stopped earlier.

    progress: the trainer's progress so far. Each step extends it.

    Raises NumericalError for a loss that is not finite.
    """
    total = len(plan.steps)
    while progress.steps < total:
        if plan.held_out and progress.steps % plan.held_out_every == 0 and progress.steps not in progress.held_out:
            _evaluate(trainer, plan, progress, watcher)
        rate = rate_at(progress.steps, total, plan.highest_rate)
        try:
            loss = trainer.step([plan.texts[i] for i in plan.steps[progress.steps]], rate)
        except FloatingPointError as error:
            raise NumericalError(f"step {progress.steps}: {error}") from error
        progress.losses.append(loss)
        watcher.on_step(progress)
        if watcher.should_stop():
            folder.save(progress, trainer.state())
            return False
        if watcher.is_due():
            folder.save(progress, trainer.state())
    if plan.held_out and total not in progress.held_out:
        _evaluate(trainer, plan, progress, watcher)
    return True


def _evaluate(trainer: LowRankTrainer, plan: Plan, progress: RunProgress, watcher: Watcher) -> None:
    """Compute the mean loss over all trained tokens of the held-out texts, one batch at a time."""
    total, count, texts = 0.0, 0, list(plan.held_out)
    while texts:
        taken = [texts.pop()]
        while texts and sum(len(text.ids) for text in taken) + len(texts[-1].ids) <= plan.batch_tokens:
            taken.append(texts.pop())
        learned = sum(text.num_learned for text in taken)
        total += trainer.loss_of(taken) * learned
        count += learned
    progress.held_out[progress.steps] = total / count
    watcher.on_held_out(progress.steps, total / count)
