"""Sampling options for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from octavo.batch import SAMPLING_ROW, SamplingBatch, greedy_rows


def sampling_batch(num_rows: int, **fields: Any) -> SamplingBatch:
    """Return greedy rows with no options except `fields`: fields of a row, or arrays of the batch."""
    rows = greedy_rows(num_rows)
    rows["counter"] = np.arange(num_rows)
    for name in set(fields) & set(SAMPLING_ROW.names or ()):
        rows[name] = fields.pop(name)
    return replace(SamplingBatch.plain(rows), **fields)
