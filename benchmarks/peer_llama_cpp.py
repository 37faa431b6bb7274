"""llama.cpp through llama-cpp-python, at its own defaults (float16 cache, batches of 512), as a peer.

Run with a Python that has llama-cpp-python; `protocol.Peer` starts it.
"""

from __future__ import annotations

import time

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from protocol import serve


class LlamaCpp:
    version = f"llama-cpp-python {llama_cpp.__version__}"

    def load(self, model: str, threads: int, context: int) -> None:
        self._options = {"n_threads": threads, "n_threads_batch": threads, "n_batch": 512, "verbose": False}
        self._model = model
        self._llama = llama_cpp.Llama(model, n_ctx=context, **self._options)

    def _run(self, tokens: list[int]) -> NDArray[np.float32]:
        """Evaluate tokens after those in the cache; the logits of the last one."""
        self._llama.eval(tokens)
        return np.ctypeslib.as_array(self._llama._ctx.get_logits(), shape=(self._llama.n_vocab(),))

    def cache_bytes(self, tokens: int) -> int:
        about = self._llama.metadata
        name = about["general.architecture"]
        heads, width = int(about[f"{name}.attention.head_count"]), int(about[f"{name}.embedding_length"])
        kv_heads = int(about.get(f"{name}.attention.head_count_kv", heads))
        return tokens * int(about[f"{name}.block_count"]) * 2 * kv_heads * (width // heads) * 2

    def prefill(self, tokens: list[int]) -> None:
        self._llama.reset()
        self._run(tokens)

    def decode(self, prompt: list[int], count: int) -> tuple[float, float]:
        self._llama.reset()
        start = time.perf_counter()
        token = int(self._run(prompt).argmax())
        first = time.perf_counter()
        for _ in range(count):
            token = int(self._run([token]).argmax())
        return first - start, time.perf_counter() - first

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        if not self._llama._logits_all:
            self._llama = llama_cpp.Llama(self._model, n_ctx=len(tokens), logits_all=True, **self._options)
        self._llama.reset()
        self._llama.eval(tokens)
        return self._llama.scores[: len(tokens)]


if __name__ == "__main__":
    serve(LlamaCpp())
