"""Decides in which rounds of the step loop the encoder for images or sources runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.encoding.encodings import Encodings
    from octavo.engine.request import Sequence
    from octavo.engine.scheduler import Scheduler


class EncoderTurns:
    """Runs the encoder every other round while there are streams, and every round without any.

    In the other rounds, prompts are computed together with the streams.
    """

    def __init__(self, encodings: Encodings, scheduler: Scheduler) -> None:
        self._encodings, self._scheduler = encodings, scheduler
        self._has_run = False  # in the last round

    @property
    def is_due(self) -> bool:
        """True if the encoder runs in this round. No step may be in flight then, because both use the same device."""
        return self._encodings.has_work and not (self._has_run and self._streams())

    def run(self) -> bool:
        """Run the encoder for as long as streams can wait.

        Return True if streams have waited and must not wait longer.
        """
        if not self._encodings.has_work:
            return False
        self._has_run = self.is_due
        if not self._has_run:
            return False
        budget, streams = self._scheduler.step_budget, self._streams()
        num_rows = sum(1 + len(each.draft_token_ids) for each in streams)
        self._encodings.work(None if budget is None else budget.encoder_s(num_rows), self._needed_keys)
        return bool(streams)

    def _streams(self) -> list[Sequence]:
        """Return the sequences that are waiting for their next tokens."""
        return [each for each in self._scheduler.admission.running if each.num_output_tokens]

    def _needed_keys(self) -> set[bytes]:
        """Return the keys of the items that running sequences must compute."""
        running = self._scheduler.admission.running
        sources = (each.request.prompt.source for each in running if not each.num_computed_tokens)
        pairs = ((each.request.prompt, each.num_computed_tokens) for each in running)
        spans = (span for prompt, start in pairs if prompt.spans for span in prompt.overlapping(start, len(prompt)))
        found = {span.item.key for span in spans if span.item is not None}
        return found | {source.key for source in sources if source is not None}
