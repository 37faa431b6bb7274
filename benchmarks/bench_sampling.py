"""Time of the native sampler alone: each filter on rows of a large vocabulary, one thread.

    python benchmarks/bench_sampling.py [--vocab 151936] [--isa avx2] [--rounds 30]

Peaked rows resemble a model that is sure of a few tokens. In flat rows a nucleus of 0.9 holds most of the
vocabulary, which is the worst case for a filter. The best of several rounds counts, because other programs on a shared
machine can only slow a round down. At real-time priority (`chrt -f 10`) it takes a few seconds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from report import table

from octavo.backends.cpu import _native_tests
from octavo.backends.cpu.instruction_set import choose_isa
from octavo.batch import SamplingBatch, StepOutput, greedy_rows

ROWS = 8
NUM_TOP = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Sampling options of one row that differ from plain temperature 1."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    history: int = 0  # tokens seen
    allowed: float | None = None  # share of the vocabulary that a mask allows


CASES = (
    Case("greedy", {"temperature": 0}),
    Case("temperature"),
    Case("min_p 0.05", {"min_p": 0.05}),
    Case("top_k 40", {"top_k": 40}),
    Case("top_k 2000", {"top_k": 2000}),
    Case("top_k 50000", {"top_k": 50_000}),
    Case("top_p 0.9", {"top_p": 0.9}),
    Case("top_p 0.99", {"top_p": 0.99}),
    Case("typical_p 0.2", {"typical_p": 0.2}),
    Case("typical_p 0.9", {"typical_p": 0.9}),
    Case("top_k 40, top_p 0.9, min_p 0.01", {"top_k": 40, "top_p": 0.9, "min_p": 0.01}),
    Case("typical_p 0.9, top_p 0.9", {"typical_p": 0.9, "top_p": 0.9}),
    Case("penalties, 1000 tokens", {"repetition_penalty": 1.1, "presence_penalty": 0.5}, history=1000),
    Case("mask, half allowed", allowed=0.5),
    Case("mask, 100 allowed", allowed=100 / 151_936),
    Case("mask, half allowed, top_p 0.9", {"top_p": 0.9}, allowed=0.5),
    Case("greedy, logprobs 5", {"temperature": 0, "num_logprobs": NUM_TOP}),
)


def make_logits(vocab: int, *, flat: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, vocab)) * (0.3 if flat else 2.5)
    if not flat:
        for row in logits:
            row[rng.choice(vocab, 50, replace=False)] += rng.exponential(5, 50) + 6
    return logits.astype(np.float32)


def make_batch(case: Case, vocab: int) -> SamplingBatch:
    rng = np.random.default_rng(1)
    rows = greedy_rows(ROWS)
    rows["temperature"] = rows["seed"] = 1
    rows["counter"] = np.arange(ROWS)
    for name, value in case.options.items():
        rows[name] = value
    seen = [rng.choice(vocab, case.history, replace=False) for _ in range(ROWS)]
    mask = None
    if case.allowed is not None:
        bits = rng.random((ROWS, -(-vocab // 32) * 32)) < case.allowed
        mask = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return SamplingBatch(
        rows,
        history_start=np.arange(ROWS + 1, dtype=np.int32) * case.history,
        history_ids=np.concatenate(seen).astype(np.int32),
        history_counts=np.ones(ROWS * case.history, np.int32),
        bias_start=np.zeros(ROWS + 1, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        allowed_mask=mask,
    )


def aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


def best_milliseconds(isa: str, logits: np.ndarray, batch: SamplingBatch, rounds: int) -> float:
    """Return the time per row in the fastest round over all rows."""
    num_top = max(int(batch.rows["num_logprobs"].max()), 0)
    output = StepOutput(
        np.empty(ROWS, np.int32),
        np.empty(ROWS, np.float32),
        np.empty(ROWS, np.int32),
        np.empty((ROWS, num_top), np.int32),
        np.empty((ROWS, num_top), np.float32),
    )
    errors = np.empty(ROWS, np.int32)
    scratch = aligned(_native_tests.sampling_scratch_bytes(logits.shape[1]))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        _native_tests.sample(isa, logits, batch, output, errors, 1, scratch)
        best = min(best, time.perf_counter() - start)
    return best / ROWS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    isa = choose_isa(args.isa)
    rows = []
    for case in CASES:
        batch = make_batch(case, args.vocab)
        times = {
            kind: best_milliseconds(isa, make_logits(args.vocab, flat=kind == "flat"), batch, args.rounds)
            for kind in ("peaked", "flat")
        }
        rows.append({"case": case.name, **times})
    print(f"milliseconds a row of {args.vocab} logits, {isa}, one thread\n")
    print(table({"options": "case", "peaked": "peaked", "flat": "flat"}, rows))


if __name__ == "__main__":
    main()
