"""The answers of an engine's requests, added up from the outputs of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.engine.engine import Engine, Output
from octavo.outputs import OutputDelta


class Answers(dict[str, Output]):
    """By request: the sum of its deltas with choices in order, its vector, or its failure."""

    def take(self, outputs: Iterable[Output]) -> None:
        """Add the outputs of the next step."""
        for output in outputs:
            before = self.get(output.request_id)
            if isinstance(output, OutputDelta) and isinstance(before, OutputDelta) and not before.finished:
                before.add(output)
                before.outputs.sort(key=lambda choice: choice.index)
            else:
                # The test may keep the delta itself, whose list grows with later ones.
                self[output.request_id] = (
                    replace(output, outputs=list(output.outputs)) if isinstance(output, OutputDelta) else output
                )


def answers_of(engine: Engine) -> Answers:
    """Run steps until no request is left."""
    answers = Answers()
    while engine.has_work:
        answers.take(engine.step())
    return answers


def whole(outputs: Iterable[Output]) -> OutputDelta:
    """Return the answer to the only request."""
    answers = Answers()
    answers.take(outputs)
    (answer,) = answers.values()
    assert isinstance(answer, OutputDelta), answer
    return answer
