"""The adapter slot of each token of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octavo.batch import Batch, DomainRows
from octavo.engine.schedule import ScheduledSequence
from octavo.graph.ops.low_rank import ADAPTER_SLOTS, ADAPTERS
from octavo.graph.values import TOKENS


def add_adapters(batch: Batch, scheduled: Sequence[ScheduledSequence], num_slots: int) -> None:
    """Fill the adapter fields of a batch if any sequence of the step has an adapter."""
    adapters = [item.sequence.request.adapter for item in scheduled]
    if not any(adapters):
        return
    slots = np.array([-1 if each is None else each.slot for each in adapters], np.int32)
    counts = np.diff(batch.query_start_loc)
    starts = np.array([item.sequence.request.adapter_start for item in scheduled], np.int32)
    of_tokens = np.where(batch.positions < np.repeat(starts, counts), -1, np.repeat(slots, counts)).astype(np.int32)
    tokens = batch.domains.get(TOKENS.name, DomainRows(len(of_tokens)))
    batch.domains = {
        **batch.domains,
        TOKENS.name: replace(tokens, indices={**tokens.indices, ADAPTER_SLOTS.name: of_tokens}),
        ADAPTERS.name: DomainRows(num_slots),
    }


def following_domains(batch: Batch) -> dict[str, DomainRows]:
    """Return the domains with adapter data for the next step, or none if the batch has no adapters.

    In both steps, the same sequences have one token each.
    """
    if ADAPTERS.name not in batch.domains:
        return {}
    tokens = batch.domains[TOKENS.name]
    slots = tokens.indices[ADAPTER_SLOTS.name]
    return {
        TOKENS.name: DomainRows(tokens.count, indices={ADAPTER_SLOTS.name: slots}),
        ADAPTERS.name: batch.domains[ADAPTERS.name],
    }
