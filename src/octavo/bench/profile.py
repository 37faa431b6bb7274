"""Times each operation in a step, and compares it with the minimum time it needs on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.backends.profiling import Ceilings, ProfiledExecutor, RecordTime
from octavo.batch import Batch, SamplingBatch, greedy_rows
from octavo.bench.requests import check_sizes
from octavo.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.loading.devices import STEP_TOKENS
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError
from octavo.graph.ops.base import StepSizes

_FASTEST_SHARE = 4  # the report averages the fastest quarter of the steps


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """One operation of a step, or all operations of one kind in all layers. Seconds are per step."""

    label: str
    kernel: str
    count: int
    seconds: float
    waiting_seconds: float  # of all threads, waiting for the slowest one at the barrier
    bytes_moved: int
    flops: int
    least_seconds: float  # according to the measured ceilings

    @property
    def fraction_of_ceiling(self) -> float:
        return self.least_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One kind of step.

    seconds: from the batch to the result, including the operations' seconds.
    """

    name: str
    num_rows: int
    context: int
    num_steps: int  # measured steps; the figures are means over the fastest quarter
    ceilings: Ceilings  # measured right before and after: the speed of a shared machine changes within seconds
    seconds: float
    operations: tuple[OperationProfile, ...]

    @property
    def operation_seconds(self) -> float:
        return sum(operation.seconds for operation in self.operations)

    def by_kind(self) -> list[OperationProfile]:
        """Merge each operation over all layers, sorted by the time lost."""
        kinds: dict[str, list[OperationProfile]] = {}
        for operation in self.operations:
            name = _without_layer(operation.label)
            kinds.setdefault(name, []).append(replace(operation, label=name))
        merged = [_sum(operations) for operations in kinds.values()]
        return sorted(merged, key=lambda operation: operation.least_seconds - operation.seconds)


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Step profiles of one model on one machine. `dataclasses.asdict` turns them into JSON-compatible data."""

    model: str
    architecture: str
    weight_bytes: int
    steps: tuple[StepProfile, ...]


def profile(
    model: str = "smollm2",
    rows: Sequence[int] = (1, 8, 16),
    prefill: Sequence[int] = (512,),
    context: int = 128,
    iterations: int = 40,
    *,
    show_progress: bool = False,
    **options: Any,
) -> ProfileReport:
    """Profile a decode step for each number of rows at `context` tokens, and a prefill of each number of tokens.

    iterations: decode steps of each kind; prefill runs a quarter as many, but at least 4.
    show_progress: show a bar on a terminal.
    options: additional fields of `octavo.config.EngineConfig`.

    Raises UsageError, ModelLoadError or InsufficientMemoryError.
    """
    counts = {
        f"{name}[{i}]": n for name, values in (("rows", rows), ("prefill", prefill)) for i, n in enumerate(values)
    }
    check_sizes(context=context, iterations=iterations, **counts)
    longest = max([context, *prefill])
    room = {
        "max_num_seqs": max([1, *rows]),
        "max_num_batched_tokens": max([longest, *rows, STEP_TOKENS]),
        "enable_prefix_caching": False,
    }
    loaded = load_engine(EngineConfig.resolve(model, {**options, **room}))
    executor = loaded.executor
    try:
        if not isinstance(executor, ProfiledExecutor):
            raise UsageError(
                "only one process on the cpu backend can be profiled; leave out --backend and the parallel sizes"
            )
        limits = loaded.engine.limits
        num_blocks = limits.num_blocks // len(executor.cache_sizes.layout.groups)  # blocks of each group
        blocks = -(-longest // limits.block_size)
        if longest > limits.max_model_len or blocks * max([1, *rows]) > num_blocks:
            raise UsageError(
                f"{max([1, *rows])} sequences of {longest} tokens do not fit the context of {limits.max_model_len} "
                f"and the cache of {num_blocks * limits.block_size} tokens"
            )
        stepper = _Stepper(executor, limits.block_size, limits.vocab_size)
        steps = []
        with ProgressBar(enabled=show_progress) as bar:
            bar.update("kinds of steps", 0, len(rows) + len(prefill))
            for i, count in enumerate([*rows, *prefill]):
                if i < len(rows):
                    steps.append(stepper.decode(count, context, iterations))
                else:
                    steps.append(stepper.prefill(count, max(iterations // 4, 4)))
                bar.update("kinds of steps", i + 1, len(rows) + len(prefill))
        return ProfileReport(loaded.name, loaded.architecture, executor.weight_bytes, tuple(steps))
    finally:
        executor.close()


class _Stepper:
    """Runs synthetic steps on an executor whose cache nothing else uses."""

    def __init__(self, executor: ProfiledExecutor, block_size: int, vocab_size: int) -> None:
        self._executor = executor
        self._num_groups = len(executor.cache_sizes.layout.groups)
        self._ceilings = executor.measure_ceilings()
        self._block_size = block_size
        self._token_ids = np.random.default_rng(0)
        self._vocab_size = vocab_size

    def decode(self, rows: int, context: int, iterations: int) -> StepProfile:
        """Profile steps of one token for each of `rows` sequences, whose length is then `context` tokens."""
        blocks = -(-context // self._block_size) * self._num_groups
        self._executor.submit(self._batch(1, context)).wait()
        copies = [(b, r * blocks + b) for r in range(1, rows) for b in range(blocks)]
        batch = self._batch(rows, 1, context - 1)
        self._executor.submit(replace(batch, block_copies=np.array(copies, np.int32).reshape(-1, 2))).wait()
        sizes = self._sizes(tokens=rows, requests=rows, context=context)
        return self._measure(f"decode, {rows} row{'s' if rows > 1 else ''}", batch, sizes, iterations)

    def prefill(self, tokens: int, iterations: int) -> StepProfile:
        """Profile a prompt of `tokens` tokens in one step."""
        sizes = self._sizes(tokens=tokens, requests=1, context=tokens)
        return self._measure(f"prefill, {tokens} tokens", self._batch(1, tokens), sizes, iterations)

    def _sizes(self, tokens: int, requests: int, context: int) -> StepSizes:
        return StepSizes(tokens, requests, requests, context, self._executor.kv_element_bytes)

    def _batch(self, requests: int, tokens: int, start: int = 0) -> Batch:
        """Make a batch of `requests` greedily sampled sequences, with `tokens` new tokens each after `start` cached
        ones.
        """
        length = start + tokens
        blocks = -(-length // self._block_size)
        # The first sequence has the same blocks however many there are: the others begin as copies of it.
        tables = np.arange(requests * self._num_groups * blocks, dtype=np.int32).reshape(requests, -1, blocks)
        tables = np.ascontiguousarray(tables.swapaxes(0, 1))
        positions = np.arange(start, length, dtype=np.int32)
        slots = tables[:, :, positions // self._block_size] * self._block_size + positions % self._block_size
        ends = np.arange(requests + 1, dtype=np.int32) * np.int32(tokens)
        return Batch(
            token_ids=self._token_ids.integers(0, self._vocab_size, requests * tokens, dtype=np.int32),
            positions=np.tile(positions, requests),
            query_start_loc=ends,
            seq_lens=np.full(requests, length, np.int32),
            block_tables=tables,
            slot_mapping=slots.reshape(self._num_groups, -1).astype(np.int32),
            logits_indices=ends[1:] - np.int32(1),
            sampling=SamplingBatch.plain(greedy_rows(requests)),
            state_slots=np.arange(requests, dtype=np.int32),  # not read without states
        )

    def _measure(self, name: str, batch: Batch, sizes: StepSizes, iterations: int) -> StepProfile:
        """Return the mean of the fastest quarter of the steps, after one warm-up step."""
        measured: list[tuple[float, list[RecordTime]]] = []
        for _ in range(iterations + 1):
            self._executor.start_profile()
            start = time.perf_counter()
            self._executor.submit(batch).wait()
            seconds = time.perf_counter() - start
            measured.append((seconds, self._executor.profile(sizes)))
        before, self._ceilings = self._ceilings, self._executor.measure_ceilings()
        ceilings = before.best_of(self._ceilings)
        fastest = sorted(measured[1:], key=lambda step: step[0])[: max(iterations // _FASTEST_SHARE, 1)]
        records = zip(*(records for _, records in fastest), strict=True)
        return StepProfile(
            name=name,
            num_rows=sizes.tokens,
            context=sizes.context,
            num_steps=iterations,
            ceilings=ceilings,
            seconds=sum(seconds for seconds, _ in fastest) / len(fastest),
            operations=tuple(_operation(of_one, ceilings) for of_one in records),
        )


def _operation(times: Sequence[RecordTime], ceilings: Ceilings) -> OperationProfile:
    """Summarize one operation from its times in several steps."""
    seconds = sum(t.seconds for t in times) / len(times)
    busy = sum(t.busy_seconds for t in times) / len(times)
    record = times[0]
    cost = record.cost
    return OperationProfile(
        label=_label(record),
        kernel=record.kernel,
        count=1,
        seconds=seconds,
        waiting_seconds=max(ceilings.threads * seconds - busy, 0.0),
        bytes_moved=cost.bytes_read + cost.bytes_written,
        flops=cost.flops,
        least_seconds=_least_seconds(record, ceilings),
    )


def _least_seconds(record: RecordTime, ceilings: Ceilings) -> float:
    """Return the minimum time of an operation.

    Weights and cache are read from memory, activations from the L2 cache, and arithmetic runs in parallel with both.
    """
    moved = record.cost.bytes_read + record.cost.bytes_written - record.cost.activation_bytes
    reading = moved / ceilings.value("read from memory") + record.cost.activation_bytes / ceilings.value("read from L2")
    rate = ceilings.value(ceilings.product_rate if record.is_quantized else "float multiply-adds")
    return max(reading, record.cost.flops / 2 / rate)


def _label(record: RecordTime) -> str:
    """Return the operation and the last part of its weights' names: `layers.3: fused_linear gate+up`."""
    names = [name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj") for name in record.matrices]
    return " ".join([record.label, "+".join(names)]).strip()


def _without_layer(label: str) -> str:
    """Remove the layer: `layers.3: linear` -> `linear`."""
    place, _, operation = label.partition(": ")
    place = ".".join(part for part in place.split(".") if part != "layers" and not part.isdigit())
    return f"{place}: {operation}" if place else operation


def _sum(operations: Sequence[OperationProfile]) -> OperationProfile:
    first = operations[0]
    return replace(
        first,
        count=len(operations),
        seconds=sum(o.seconds for o in operations),
        waiting_seconds=sum(o.waiting_seconds for o in operations),
        bytes_moved=sum(o.bytes_moved for o in operations),
        flops=sum(o.flops for o in operations),
        least_seconds=sum(o.least_seconds for o in operations),
    )
