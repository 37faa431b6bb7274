"""Runs of random requests, all submitted at once."""

from __future__ import annotations

import queue
import random
import time
from dataclasses import dataclass

from octavo.engine.session import Session
from octavo.errors import OctavoError, UsageError
from octavo.generation_request import RequestOptions
from octavo.outputs import RequestMetrics, RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its wall time in seconds, and the engine's metrics of each request."""

    end_to_end_s: float
    requests: list[RequestMetrics]

    @property
    def time_to_first_tokens_s(self) -> list[float]:
        return [metrics.time_to_first_token_s or 0.0 for metrics in self.requests]

    @property
    def time_per_output_tokens_s(self) -> list[float]:
        pairs = [(metrics.decode_s, metrics.num_generated_tokens - 1) for metrics in self.requests]
        return [decode_s / count for decode_s, count in pairs if count > 0]


def check_sizes(**sizes: int) -> None:
    """Raises UsageError naming the first size that is not an integer above 0."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be an integer of at least 1")


def run_once(session: Session, num_requests: int, input_len: int, output_len: int, rng: random.Random) -> Run:
    """Submits random prompts of input_len tokens and waits for output_len tokens of each.

    Raises UsageError if they are too long for the context.
    """
    if input_len + output_len > session.max_model_len:
        raise UsageError(
            f"input_len {input_len} and output_len {output_len} are {input_len + output_len} tokens; "
            f"the context has {session.max_model_len}"
        )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    num_tokens = session.tokenizer.vocab_size
    prompts = [[rng.randrange(num_tokens) for _ in range(input_len)] for _ in range(num_requests)]
    results: queue.SimpleQueue[RequestOutput | OctavoError] = queue.SimpleQueue()
    start = time.perf_counter()
    for prompt in prompts:
        session.submit(session.create_request(prompt, params, options=RequestOptions()), results.put)
    outputs = []
    for _ in prompts:
        item = results.get()
        if isinstance(item, OctavoError):
            raise item
        outputs.append(item)
    return Run(time.perf_counter() - start, [output.metrics for output in outputs])
