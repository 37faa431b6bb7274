"""The rows of any domain in a step."""

from __future__ import annotations

from octavo.batch import Batch, DomainRows
from octavo.graph.values import LOGITS, OUTPUTS, SELECTED, TOKENS, RowDomain

_NONE = DomainRows(0)


def domain_rows(batch: Batch, domain: RowDomain) -> DomainRows:
    """Return the rows of any domain in a step, including domains that are built from the fields of the batch."""
    if domain is OUTPUTS or domain is LOGITS:
        rows = batch.output_indices if domain is OUTPUTS else batch.logits_indices
        return DomainRows(len(rows), indices={SELECTED.name: rows})
    further = batch.domains.get(domain.name, _NONE)
    if domain is not TOKENS:
        return further
    positions = batch.positions[None] if further.positions is None else further.positions
    return DomainRows(len(batch.token_ids), batch.query_start_loc, positions, further.indices)
