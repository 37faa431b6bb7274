"""Octavo's engine, at its defaults, as a peer."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from protocol import Generated, LoadOptions, serve

import octavo
from octavo.backends.cpu import _native
from octavo.batch import Batch
from octavo.config import EngineConfig
from octavo.engine.engine import Output
from octavo.engine.load import LoadedModel, load_engine
from octavo.engine.request import Request
from octavo.generation_request import GenerationRequest, RequestOptions
from octavo.outputs import OutputDelta
from octavo.prompt import Prompt
from octavo.sampling_params import RequestOutputKind, SamplingParams

# The default follows the free memory, and prompts that are never asked for again would fill it turn by turn.
CACHE_MEMORY = "1GiB"


class TimedProgram:
    """A wrapper around the native program that adds up the run time of its steps."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._program, name)

    def submit(self, *arguments: Any) -> TimedStep:
        return TimedStep(self, self._program.submit(*arguments))


class TimedStep:
    def __init__(self, program: TimedProgram, step: _native.PendingStep) -> None:
        self._program = program
        self._step = step

    def wait(self) -> None:
        self._step.wait()
        self._program.seconds += self._step.seconds

    @property
    def seconds(self) -> float:
        return self._step.seconds


class Octavo:
    version = ""

    def load(self, options: LoadOptions) -> None:
        self._options = {
            "model": options.model,
            "num_threads": options.threads,
            "max_model_len": options.context,
            "kv_dtype": options.kv_dtype,
            "quantization": options.quantization,
            # Answers to random tokens repeat themselves, so drafts would guess them and hide the time of a step;
            # `octavo bench speculation` measures drafts on texts.
            "speculation": "off",
        }
        config = EngineConfig(**self._options, kv_cache_memory=CACHE_MEMORY)
        if options.sequences > config.max_num_seqs:
            config = EngineConfig(**self._options, kv_cache_memory=CACHE_MEMORY, max_num_seqs=options.sequences)
        self._loaded: LoadedModel | None = load_engine(config)
        self.version = f"octavo {octavo.__version__} ({getattr(self._loaded.executor, 'isa', 'no native code')})"
        self._rows = 0
        self._salts = itertools.count()

    def cache_bytes(self, tokens: int) -> int:
        assert self._loaded is not None
        return tokens * self._loaded.executor.cache_sizes.token_bytes

    def decode(self, prompt: list[int], count: int) -> Generated:
        return self.many([prompt], count)

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        """Run every request with its own salt, so that none finds anything in the prefix cache."""
        params = SamplingParams(temperature=0, max_tokens=count + 1, ignore_eos=True, detokenize=False)
        return self._generate(prompts, params, [self._new_salt() for _ in prompts])

    def shared_prefix(self, first: list[int], second: list[int]) -> tuple[float, float]:
        """Return the seconds until the first token of one prompt, then of another with the same beginning."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        salt = self._new_salt()
        times = [self._generate([prompt], params, [salt]).first_s for prompt in (first, second)]
        return times[0], times[1]

    def host_time(self, prompts: list[list[int]], count: int) -> float:
        """Return the seconds without a native step in the median decode step, publishing outputs concurrently."""
        assert self._loaded is not None
        executor, engine = self._loaded.executor, self._loaded.engine
        program = executor._program
        timed = executor._program = TimedProgram(program)
        try:
            params = SamplingParams(
                temperature=0, max_tokens=count + 2, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            self._start(prompts, params, [self._new_salt() for _ in prompts])
            while not all(request.times.first_token for request in self._requests):
                self._round()
            gaps = []
            for _ in range(count):
                start, computed = time.perf_counter(), timed.seconds
                self._round()
                gaps.append(time.perf_counter() - start - (timed.seconds - computed))
            while engine.has_work:
                self._round()
            return statistics.median(gaps)
        finally:
            executor._program = program

    def _new_salt(self) -> str:
        return f"measured {next(self._salts)}"

    def _start(self, prompts: list[list[int]], params: SamplingParams, salts: list[str]) -> None:
        assert self._loaded is not None
        engine = self._loaded.engine
        self._requests: list[Request] = []
        for index, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
            request = engine.create_request(
                str(index),
                GenerationRequest(prompt=Prompt(prompt), params=params, options=RequestOptions(cache_salt=salt)),
            )
            engine.add_request(request)
            self._requests.append(request)

    def _round(self) -> list[Output]:
        """Run a step like the engine's thread: the outputs are those of the previous step."""
        assert self._loaded is not None
        engine = self._loaded.engine
        engine.start()
        outputs = engine.publish()
        engine.prepare()
        engine.finish()
        return outputs

    def _generate(self, prompts: list[list[int]], params: SamplingParams, salts: list[str]) -> Generated:
        assert self._loaded is not None
        engine = self._loaded.engine
        answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        start = time.perf_counter()
        self._start(prompts, params, salts)
        while engine.has_work:
            for output in self._round():
                if not isinstance(output, OutputDelta):
                    raise RuntimeError(f"a request failed: {output}")
                answers[output.request_id] += output.outputs[0].token_ids
        end = time.perf_counter()
        first = max(request.times.first_token for request in self._requests)
        return Generated(first - start, end - first, [answers[str(index)] for index in range(len(prompts))])

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Run one step over the whole prompt on the executor, without sampling."""
        count = len(tokens)
        if self._rows < count:
            self._reload(count)
        assert self._loaded is not None
        positions = np.arange(count, dtype=np.int32)
        block_size = self._loaded.engine.limits.block_size
        num_groups = len(self._loaded.executor.cache_sizes.layout.groups)
        tables = np.arange(num_groups * -(-count // block_size), dtype=np.int32).reshape(num_groups, 1, -1)
        batch = Batch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=positions,
            query_start_loc=np.array([0, count], dtype=np.int32),
            seq_lens=np.array([count], dtype=np.int32),
            block_tables=tables,
            slot_mapping=(tables[:, 0, positions // block_size] * block_size + positions % block_size).astype(np.int32),
            logits_indices=positions,
            return_logits=True,
        )
        logits = self._loaded.executor.submit(batch).wait().logits
        assert logits is not None
        return logits

    def _reload(self, rows: int) -> None:
        """Load an engine whose step returns the logits of up to `rows` tokens, which is its limit on sequences."""
        assert self._loaded is not None
        self._loaded.executor.close()
        self._loaded = None
        self._loaded = load_engine(EngineConfig(**self._options, max_num_seqs=rows, max_num_batched_tokens=rows))
        self._rows = rows


if __name__ == "__main__":
    serve(Octavo())
