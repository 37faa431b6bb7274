"""The encoder for texts that a model reads before it answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.batch import Batch, Float32, StepOutput
from octavo.engine.encoding.row_encoder import Item, RowEncoder
from octavo.prompt import SourceText


class SourceEncoder(RowEncoder):
    """Encodes a text into one row per token. A step encodes whole texts only."""

    def _batch_of(self, items: Sequence[Item]) -> Batch:
        texts = [item.token_ids for item in items if isinstance(item, SourceText)]
        lengths = np.array([len(text) for text in texts], np.int32)
        starts = np.zeros(len(texts) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        token_ids = np.concatenate([np.array(text, np.int32) for text in texts])
        every = np.arange(len(token_ids), dtype=np.int32)
        return Batch(
            token_ids=token_ids,
            positions=every - np.repeat(starts[:-1], lengths),
            query_start_loc=starts,
            seq_lens=lengths,
            # There is no cache to read or to write.
            block_tables=np.zeros((1, len(texts), int(lengths.max())), np.int32),
            slot_mapping=np.zeros((1, len(token_ids)), np.int32),
            logits_indices=np.zeros(0, np.int32),
            hidden_indices=every,
        )

    def _rows_of(self, output: StepOutput) -> Float32:
        assert output.hidden_states is not None
        return output.hidden_states
