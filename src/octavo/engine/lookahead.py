"""The next step of sequences that all decode, prepared while the one before it runs: only its tokens are missing."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.batch import Batch, StepOutput
from octavo.engine.model_runner import ModelRunner
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose sequences are those of the step before, each with the token that it gives."""

    schedule: Schedule
    batch: Batch

    def complete(self, output: StepOutput) -> bool:
        """Puts the tokens of the step before in place. False: one of them ends its sequence, and this step is void."""
        for token_id, sequence in zip(output.token_ids.tolist(), self.schedule.scheduled, strict=True):
            if token_id in sequence.request.end_token_ids:
                return False
        self.batch.token_ids = output.token_ids
        return True


def prepare(step: Schedule, scheduler: Scheduler, model_runner: ModelRunner) -> PreparedStep | None:
    """The step after `step`, which is in flight. None: it depends on more than the tokens that `step` gives."""
    schedule = scheduler.schedule_ahead(step)
    return None if schedule is None else PreparedStep(schedule, model_runner.build(schedule))
