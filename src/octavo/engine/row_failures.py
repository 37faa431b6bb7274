"""The error of a request whose row has no next token."""

from __future__ import annotations

from octavo.backends.sampling import RowError
from octavo.engine.request import Request
from octavo.errors import NumericalError, OctavoError, UsageError


def failure_of(request: Request, row_error: RowError) -> OctavoError:
    """Return the error that explains why a row has no next token: the grammar, invalid numbers, or the parameters."""
    name = request.request_id
    for sequence in request.sequences:
        if sequence.grammar is not None and sequence.grammar.error is not None:
            return UsageError(
                f"{name} failed: its structured output got stuck, because no token of this model can follow: "
                f"{sequence.grammar.error}",
                param="structured_outputs",
                code="invalid_grammar",
            )
    if row_error.kind is UsageError and not request.params.sampling.forbids_tokens:
        return NumericalError(f"{name} failed: the model rules out every token (all logits are -inf)")
    return row_error.kind(f"{name} failed: {row_error.reason}")
