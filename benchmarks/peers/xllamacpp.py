"""llama.cpp's server through xllamacpp, as a peer for requests with adapters.

Its kernels are those of the wheel: `version` says for which instructions they were built.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp
from protocol import Generated, LoadOptions, serve


class Server:
    version = f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip()}"

    def load(self, options: LoadOptions) -> None:
        self._options = options
        self._adapters: list[str] = []
        self._server = self._started(self._adapters)

    def _started(self, adapters: Sequence[str]) -> Any:
        """Start a server with a slot for each sequence and all adapters in memory, none of them active."""
        options, params = self._options, xllamacpp.CommonParams()
        params.model.path = options.model
        params.n_ctx, params.n_parallel = options.context * options.sequences, options.sequences
        params.verbosity, params.warmup = -1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 0.0) for path in adapters]
        return xllamacpp.Server(params)

    def _answer(self, prompt: list[int], count: int, adapter: int | None = None) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        if adapter is not None:
            asked["lora"] = [{"id": adapter, "scale": 1.0}]
        found: dict[str, Any] = self._server.handle_completions({**asked, "n_predict": count, "max_tokens": count})
        if "timings" not in found:
            raise RuntimeError(f"llama.cpp: {found}")
        return found

    def decode(self, prompt: list[int], count: int) -> Generated:
        timings = self._answer(prompt, count + 1)["timings"]
        return Generated(timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3, [])

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(lambda prompt: self._answer(prompt, count + 1), prompts))
        return Generated(0.0, time.perf_counter() - start, [])

    def adapted(self, prompts: list[list[int]], adapters: list[str], count: int) -> float:
        """Return the seconds until concurrent prompts with one adapter each have been answered."""
        if adapters != self._adapters:
            self._server = None
            self._adapters, self._server = adapters, self._started(adapters)
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(self._answer, prompts, [count + 1] * len(prompts), range(len(prompts))))
        return time.perf_counter() - start


if __name__ == "__main__":
    serve(Server())
