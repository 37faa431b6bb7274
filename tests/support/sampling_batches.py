"""Sampling options for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from octavo.batch import SamplingBatch


def sampling_batch(num_rows: int, **fields: Any) -> SamplingBatch:
    """Greedy rows without any option, except for `fields`."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(num_rows, value, dtype)

    base = SamplingBatch(
        temperature=full(0, np.float32),
        top_k=full(0, np.int32),
        top_p=full(1, np.float32),
        min_p=full(0, np.float32),
        typical_p=full(1, np.float32),
        repetition_penalty=full(1, np.float32),
        presence_penalty=full(0, np.float32),
        frequency_penalty=full(0, np.float32),
        seed=full(0, np.uint64),
        counter=np.arange(num_rows, dtype=np.uint64),
        target=full(-1, np.int32),
        num_logprobs=full(-1, np.int32),
        history_start=np.zeros(num_rows + 1, np.int32),
        history_ids=np.zeros(0, np.int32),
        history_counts=np.zeros(0, np.int32),
        bias_start=np.zeros(num_rows + 1, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
    )
    arrays = {
        name: np.broadcast_to(np.asarray(value, getattr(base, name).dtype), (num_rows,)).copy()
        if name not in ("allowed_mask", "history_start", "history_ids", "history_counts") and "bias" not in name
        else value
        for name, value in fields.items()
    }
    return replace(base, **arrays)
