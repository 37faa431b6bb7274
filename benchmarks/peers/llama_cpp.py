"""llama.cpp through llama-cpp-python, at its own defaults (float16 cache, batches of 512 tokens), as a peer.

One stream runs through `Llama.eval`; many sequences through the batch API with one sequence id each and a context
as `llama-batched-bench` makes it (logical batches of 2048 tokens, a cache of its own for each sequence).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from protocol import Generated, LoadOptions, serve

LOGICAL_BATCH = 2048
CACHE_STEP = 256  # a sequence's part of the cache is a multiple of so many tokens


class SequenceBatch:
    """A buffer for the tokens of several sequences in one `llama_decode`."""

    def __init__(self, room: int) -> None:
        self.native = llama_cpp.llama_batch_init(room, 0, 1)
        self._room = room
        self.native.n_tokens = 0

    @property
    def is_full(self) -> bool:
        return self.native.n_tokens == self._room

    def add(self, token: int, position: int, sequence: int, wants_logits: bool) -> int:
        """Add a token and return its row."""
        row = self.native.n_tokens
        self.native.token[row], self.native.pos[row] = token, position
        self.native.n_seq_id[row], self.native.seq_id[row][0] = 1, sequence
        self.native.logits[row] = wants_logits
        self.native.n_tokens = row + 1
        return row

    def free(self) -> None:
        llama_cpp.llama_batch_free(self.native)


class LlamaCpp:
    version = f"llama-cpp-python {llama_cpp.__version__}"

    def load(self, options: LoadOptions) -> None:
        self._options = {
            "n_threads": options.threads,
            "n_threads_batch": options.threads,
            "n_batch": 512,
            "verbose": False,
        }
        if options.kv_dtype == "int8":
            kind = llama_cpp.GGML_TYPE_Q8_0
            self._options |= {"type_k": kind, "type_v": kind, "flash_attn": True}
        self._model = options.model
        self._llama = llama_cpp.Llama(options.model, n_ctx=options.context, **self._options)
        self._num_sequences = 0
        self._many: llama_cpp.llama_context_p | None = None

    def _run(self, tokens: list[int]) -> int:
        """Evaluate tokens after those in the cache, and return the most likely next one."""
        self._llama.eval(tokens)
        logits = np.ctypeslib.as_array(self._llama._ctx.get_logits(), shape=(self._llama.n_vocab(),))
        return int(logits.argmax())

    def decode(self, prompt: list[int], count: int) -> Generated:
        self._llama.reset()
        start = time.perf_counter()
        tokens = [self._run(prompt)]
        first = time.perf_counter()
        for _ in range(count):
            tokens.append(self._run(tokens[-1:]))
        return Generated(first - start, time.perf_counter() - first, [tokens])

    def adapted(self, prompts: list[list[int]], adapters: list[str], count: int) -> float:
        """Return the seconds to answer prompts with one adapter each, one after another; all adapters are in memory."""
        model, context = self._llama._model.model, self._llama._ctx.ctx
        loaded = [llama_cpp.llama_adapter_lora_init(model, path.encode()) for path in adapters]
        if not all(loaded):
            raise RuntimeError(f"llama.cpp could not read {adapters}")
        scales = (ctypes.c_float * 1)(1.0)
        start = time.perf_counter()
        for prompt, adapter in zip(prompts, loaded, strict=True):
            one = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            if llama_cpp.llama_set_adapters_lora(context, one, 1, scales):
                raise RuntimeError("llama.cpp could not set an adapter")
            self.decode(prompt, count)
        seconds = time.perf_counter() - start
        llama_cpp.llama_set_adapters_lora(context, None, 0, None)
        for adapter in loaded:
            llama_cpp.llama_adapter_lora_free(adapter)
        return seconds

    def restored(self, prompt: list[int], path: str) -> float:
        """Return the seconds to the first token of a prompt restored from a file except for its last token: read and
        one step.
        """
        self._llama.reset()
        self._run(prompt[:-1])
        context, count = self._llama._ctx.ctx, len(prompt) - 1
        tokens, found = (llama_cpp.llama_token * count)(*prompt[:-1]), ctypes.c_size_t(0)
        if not llama_cpp.llama_state_save_file(context, path.encode(), tokens, count):
            raise RuntimeError(f"llama.cpp could not write {path}")
        self._llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        if not llama_cpp.llama_state_load_file(context, path.encode(), tokens, count, ctypes.byref(found)):
            raise RuntimeError(f"llama.cpp could not read {path}")
        self._llama.n_tokens = found.value
        self._run(prompt[-1:])
        return time.perf_counter() - start

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        context = self._context_of(len(prompts), max(len(prompt) for prompt in prompts) + count)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = SequenceBatch(LOGICAL_BATCH)
        try:
            start = time.perf_counter()
            answers = [[token] for token in self._step(context, batch, prompts, [0] * len(prompts))]
            first = time.perf_counter()
            for done in range(count):
                positions = [len(prompt) + done for prompt in prompts]
                new = self._step(context, batch, [answer[-1:] for answer in answers], positions)
                for answer, token in zip(answers, new, strict=True):
                    answer.append(token)
            return Generated(first - start, time.perf_counter() - first, answers)
        finally:
            batch.free()

    def _step(
        self,
        context: llama_cpp.llama_context_p,
        batch: SequenceBatch,
        inputs: Sequence[Sequence[int]],
        positions: Sequence[int],
    ) -> list[int]:
        """Run the new tokens of every sequence, and return the most likely next token of each."""
        following = [0] * len(inputs)
        rows: dict[int, int] = {}
        for sequence, (tokens, position) in enumerate(zip(inputs, positions, strict=True)):
            for at, token in enumerate(tokens):
                if batch.is_full:
                    self._run_batch(context, batch, rows, following)
                is_last = at == len(tokens) - 1
                row = batch.add(token, position + at, sequence, is_last)
                if is_last:
                    rows[sequence] = row
        self._run_batch(context, batch, rows, following)
        return following

    def _run_batch(
        self, context: llama_cpp.llama_context_p, batch: SequenceBatch, rows: dict[int, int], following: list[int]
    ) -> None:
        """Run the batch, record the next tokens of the sequences in `rows`, and empty both."""
        status = llama_cpp.llama_decode(context, batch.native)
        if status:
            raise RuntimeError(f"llama_decode of {batch.native.n_tokens} tokens returned {status}")
        for sequence, row in rows.items():
            logits = llama_cpp.llama_get_logits_ith(context, row)
            following[sequence] = int(np.ctypeslib.as_array(logits, shape=(self._llama.n_vocab(),)).argmax())
        rows.clear()
        batch.native.n_tokens = 0

    def _context_of(self, sequences: int, length: int) -> llama_cpp.llama_context_p:
        """Return a context with a cache of `length` tokens for each of `sequences` sequences."""
        if self._many is None or self._num_sequences != sequences:
            if self._many is not None:
                llama_cpp.llama_free(self._many)
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = sequences * -(-length // CACHE_STEP) * CACHE_STEP
            options.n_seq_max, options.n_batch = sequences, LOGICAL_BATCH
            options.n_threads = options.n_threads_batch = self._options["n_threads"]
            self._many = llama_cpp.llama_init_from_model(self._llama._model.model, options)
            if self._many is None:
                raise RuntimeError(f"no context for {sequences} sequences of {length} tokens")
            self._num_sequences = sequences
        return self._many

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        if not self._llama._logits_all:
            self._llama = llama_cpp.Llama(self._model, n_ctx=len(tokens), logits_all=True, **self._options)
        self._llama.reset()
        self._llama.eval(tokens)
        return self._llama.scores[: len(tokens)]


if __name__ == "__main__":
    serve(LlamaCpp())
