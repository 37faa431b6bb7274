"""Octavo's engine, at its defaults, as a peer. Run with a Python that has octavo; `protocol.Peer` starts it."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray
from protocol import serve

import octavo
from octavo.batch import Batch
from octavo.config import EngineConfig
from octavo.engine.load import LoadedModel, load_engine
from octavo.sampling_params import SamplingParams


class Octavo:
    version = ""

    def load(self, model: str, threads: int, context: int) -> None:
        self._options = {"model": model, "num_threads": threads, "max_model_len": context}
        self._loaded: LoadedModel | None = load_engine(EngineConfig(**self._options, enable_prefix_caching=False))
        self.version = f"octavo {octavo.__version__} ({getattr(self._loaded.executor, 'isa', 'no native code')})"
        self._rows = 0

    def cache_bytes(self, tokens: int) -> int:
        assert self._loaded is not None
        return tokens * self._loaded.executor.kv_bytes_per_token

    def prefill(self, tokens: list[int]) -> None:
        self.decode(tokens, 0)

    def decode(self, prompt: list[int], count: int) -> tuple[float, float]:
        assert self._loaded is not None
        engine = self._loaded.engine
        params = SamplingParams(temperature=0, max_tokens=count + 1, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        request = engine.create_request("measured", prompt, params)
        engine.add_request(request)
        while not request.first_token_time:
            engine.step()
        first = time.perf_counter()
        while engine.has_work:
            engine.step()
        return first - start, time.perf_counter() - first

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """One step over the whole prompt, straight to the executor, which samples nothing."""
        count = len(tokens)
        if self._rows < count:
            self._reload(count)
        assert self._loaded is not None
        positions = np.arange(count, dtype=np.int32)
        block_size = self._loaded.engine.limits.block_size
        batch = Batch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=positions,
            query_start_loc=np.array([0, count], dtype=np.int32),
            seq_lens=np.array([count], dtype=np.int32),
            block_tables=np.arange(-(-count // block_size), dtype=np.int32)[None],
            slot_mapping=positions,
            logits_indices=positions,
            return_logits=True,
        )
        logits = self._loaded.executor.execute(batch).logits
        assert logits is not None
        return logits

    def _reload(self, rows: int) -> None:
        """An engine whose step may give the logits of `rows` tokens: as many as it may run sequences."""
        assert self._loaded is not None
        self._loaded.executor.close()
        self._loaded = None
        self._loaded = load_engine(EngineConfig(**self._options, max_num_seqs=rows, max_num_batched_tokens=rows))
        self._rows = rows


if __name__ == "__main__":
    serve(Octavo())
