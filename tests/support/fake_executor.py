"""An executor whose cache holds token ids, and whose next token depends on every token it can see.

A mixed-up block, or a slot that is written twice or read before it is written, changes the answer or fails an
assertion.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from octavo.backends import Executor, PendingStep
from octavo.backends.sampling import sample
from octavo.batch import SAMPLING_ROW, Batch, SamplingBatch, StepOutput
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.request import Request
from octavo.generation_request import GenerationRequest, Params, RequestOptions
from octavo.graph.cache import CacheSizes, KVCache, cache_layout
from octavo.prompt import Prompt
from octavo.tokenizer.tokenizer import NO_REPLACEMENTS
from tests.support.late_steps import LateStep, with_tokens

VOCAB_SIZE = 64
EOS_ID = 1


class RealModel(Protocol):
    """A model that replaces the hash."""

    def logits(self, token_ids: list[int], vocab_size: int) -> np.ndarray:
        """Return the logits [vocab] after these tokens."""

    def executor(self, vocab_size: int) -> Executor:
        """Return a new executor of the model, whose steps are checked against `logits`."""


real_model: RealModel | None = None  # tests.support.torch_model


def fake_logits(token_ids: list[int], vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """Return the logits [vocab] of the "model": a hash of all tokens so far, unless there is a real one."""
    if real_model is not None:
        return real_model.logits(token_ids, vocab_size)
    digest = hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 3, vocab_size).astype(np.float32)


def check_arrays(batch: Batch | SamplingBatch) -> None:
    """Assert the requirements of a native executor: contiguous arrays with the types in `octavo.batch`."""
    dtypes = {"rows": SAMPLING_ROW, "allowed_mask": np.uint32, "bias_values": np.float32}
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        if isinstance(array, np.ndarray):
            assert array.flags.c_contiguous, field.name
            assert array.dtype == dtypes.get(field.name, np.int32), field.name
        elif isinstance(array, SamplingBatch):
            check_arrays(array)


class FakeStep:
    """A `PendingStep` that is computed on submission, or as late as a step in flight may be."""

    def __init__(self, executor: FakeExecutor, batch: Batch) -> None:
        most = max(executor.max_in_flight, executor.num_stages)
        assert executor.num_in_flight < most, "a step is submitted before another one has ended"
        executor.num_in_flight += 1
        self._executor = executor
        self._step = LateStep(executor.late, lambda: executor.compute(batch))
        if not executor.is_deferred:
            self._step.run()

    def wait(self) -> StepOutput:
        self._executor.num_in_flight -= 1
        return self._step.wait()


class FakeExecutor:
    """A fake `octavo.backends.Executor` that works on token ids.

    windows: windows of the groups of layers, one of them None. All groups hold the tokens; the answers come from that
        one.
    real: executor of the real model, if there is one; its results become those of a step.
    is_deferred: compute a step when its result is awaited, not when it is submitted.
    """

    def __init__(self, windows: tuple[int | None, ...] = (None,), num_stages: int = 1) -> None:
        self.num_stages = num_stages
        caches = [KVCache(layer, 1, 1, 1, window) for layer, window in enumerate(windows)]
        self.cache_sizes = CacheSizes(cache_layout(caches), 8 * len(windows), 8)
        self.windows = [group.window for group in self.cache_sizes.layout.groups]
        self.slots = np.zeros(0, np.int64)
        self.block_size = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.num_in_flight = 0
        self.fails_at_step: int | None = None
        self.is_closed = False
        self.is_deferred = False
        self.late: list[LateStep] = []
        self.max_in_flight = 1
        self.settles_drafts = False
        self._tokens = np.zeros(0, np.int32)  # of the step before
        self.real: Executor | None = None

    workspace_bytes = 0
    num_threads = 1
    weight_bytes = 0
    span_width = 0  # as in `EngineLimits`; the values themselves are not looked at

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:  # noqa: ARG002
        self.block_size = block_size
        self.slots = np.full(num_blocks * block_size, -1, np.int64)
        if real_model is not None:
            assert self.windows == [None], "the real model has one group of layers"
            self.real = real_model.executor(len(fake_logits([0])))
            self.real.allocate_cache(num_blocks, block_size)

    def submit(self, batch: Batch) -> PendingStep:
        return FakeStep(self, batch)

    def compute(self, batch: Batch) -> StepOutput:
        self.num_steps += 1
        self.num_tokens += len(batch.token_ids)
        check_arrays(batch)
        if batch.token_sources is not None:
            assert self.max_in_flight > 1
        submitted, batch = batch, with_tokens(batch, self._tokens)
        if self.num_steps == self.fails_at_step:
            raise RuntimeError("the fake executor was told to fail")
        for source, destination in batch.block_copies.tolist():
            self._copy_block(source, destination)
        assert np.unique(batch.slot_mapping).size == batch.slot_mapping.size, "a slot is written twice in a step"
        self.slots[batch.slot_mapping] = batch.token_ids
        owner = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
        rows = [self._context(batch, int(owner[i]), int(batch.positions[i])) for i in batch.output_indices]
        for request in range(len(batch.seq_lens)):
            last = int(batch.query_start_loc[request + 1]) - 1
            assert batch.positions[last] == batch.seq_lens[request] - 1
            assert self._context(batch, request, int(batch.positions[last]))[-1] == batch.token_ids[last]
        values = np.stack([fake_logits(row) for row in rows]) if rows else np.zeros((0, VOCAB_SIZE), np.float32)
        logits, hidden = np.split(values, [len(batch.logits_indices)])
        self._tokens = np.zeros(len(logits), np.int32)  # unless rows have no outcome
        output = StepOutput.unsampled(0) if batch.sampling is None else sample(logits, batch.sampling)
        self._tokens = output.token_ids
        if len(hidden):
            output.hidden_states = hidden
        return output if self.real is None else self._checked(self.real.submit(submitted).wait(), output)

    def _checked(self, output: StepOutput, expected: StepOutput) -> StepOutput:
        """Return the results of the real executor, after checking them against the logits of its model."""
        for name in ("token_ids", "ranks", "top_ids"):
            np.testing.assert_array_equal(getattr(output, name), getattr(expected, name), err_msg=name)
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(output, name), getattr(expected, name), 1e-5, 1e-5, err_msg=name)
        return output

    def _context(self, batch: Batch, request: int, position: int) -> list[int]:
        """Return the tokens visible to the token at `position`, read from the caches of all groups as attention
        would.
        """
        whole = self._visible(batch, self.windows.index(None), request, range(position + 1))
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(position - window + 1, 0)
            assert self._visible(batch, group, request, range(first, position + 1)) == whole[first:], "another's tokens"
        return whole

    def _visible(self, batch: Batch, group: int, request: int, positions: range) -> list[int]:
        at, table = np.array(positions), batch.block_tables[group, request]
        tokens = self.slots[table[at // self.block_size] * self.block_size + at % self.block_size]
        assert (tokens >= 0).all(), "a slot is read before it is written"
        return [int(token) for token in tokens]

    def _copy_block(self, source: int, destination: int) -> None:
        size = self.block_size
        self.slots[destination * size : (destination + 1) * size] = self.slots[source * size : (source + 1) * size]

    def close(self) -> None:
        self.is_closed = True


class FakeTokenizer:
    """A tokenizer with 64 tokens: 0 is BOS, 1 is EOS, the rest are one character each, and two of them form one
    character.
    """

    vocab_size = VOCAB_SIZE
    replacements = NO_REPLACEMENTS
    bos_token_id = 0
    eos_token_ids = frozenset({EOS_ID})
    special_token_ids = frozenset({0, EOS_ID})
    chat_template = None
    special_tokens: Mapping[str, str] = {}

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,  # noqa: ARG002
        max_tokens: int | None = None,  # noqa: ARG002
    ) -> list[int]:
        return ([0] if add_special_tokens else []) + [4 + (byte - 64) % 60 for byte in text.encode()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")

    def encode_chat(self, rendered: str, *, max_tokens: int | None = None) -> list[int]:  # noqa: ARG002
        return self.encode(rendered)

    def guard(self, value: Any) -> Any:
        return value

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 2:
            return b"<bos>" if token_id == 0 else b"<eos>"
        if token_id < 4:
            return "é".encode()[token_id - 2 : token_id - 1]
        return bytes([64 + token_id - 4])


def fake_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_num_outputs: int | None = None,
    enable_prefix_caching: bool = True,
    executor: FakeExecutor | None = None,
) -> Engine:
    """Return an engine with a `FakeExecutor` as its `executor`."""
    executor = executor or FakeExecutor()
    executor.allocate_cache(num_blocks, block_size)
    limits = EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_outputs=max_num_outputs or max_num_seqs + 4,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        enable_prefix_caching=enable_prefix_caching,
        span_width=executor.span_width,
    )
    return Engine(executor, FakeTokenizer(), limits)


def create_request(
    engine: Engine,
    name: str,
    prompt: Sequence[int] | Prompt,
    params: Params,
    *,
    text: str | None = None,
    **options: Any,
) -> Request:
    """Make a request for an engine without adding it.

    text: text that the prompt represents.
    options: fields of `RequestOptions`.
    """
    whole = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    generation = GenerationRequest(prompt=whole, params=params, text=text, options=RequestOptions(**options))
    return engine.create_request(name, generation)
