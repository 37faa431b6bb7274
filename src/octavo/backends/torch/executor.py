"""A compiled graph on a torch device: its paged cache, steps and sampling."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from octavo.backends import Executor, ExecutorLimits, Paging
from octavo.backends.sampling import raise_row_errors
from octavo.backends.torch.adapters import AdapterTable, PreparedFactors
from octavo.backends.torch.cache import CacheNumbers, PagedCache
from octavo.backends.torch.checks import BatchChecks
from octavo.backends.torch.graphs import Capture, DecodeGraphs, SpareRows, buckets
from octavo.backends.torch.operations import evaluate
from octavo.backends.torch.paged_step import PagedStep, StepKernels
from octavo.backends.torch.pieces import PromptPieces, token_sizes
from octavo.backends.torch.providers.calls import provided
from octavo.backends.torch.providers.problems import Place
from octavo.backends.torch.rank_group import TorchRankGroup
from octavo.backends.torch.rank_sampling import offers_of, sample_together
from octavo.backends.torch.sampler import Samples, joined, rows_of, sample
from octavo.backends.torch.step import NO_FURTHER_ROWS, FurtherRows
from octavo.backends.torch.step_arrays import HostArrays, SeenBlocks, host_arrays, seen_blocks, sent
from octavo.backends.torch.token_board import HeadStates, LateNumbers, TokenBoard
from octavo.backends.torch.weights import DeviceWeights, vector_type
from octavo.backends.torch.workspace import Workspace, value_types
from octavo.batch import Batch, Float32, Int32, StepOutput
from octavo.errors import InsufficientMemoryError, UsageError
from octavo.graph.builder import Graph, Node
from octavo.graph.cache import CacheSizes
from octavo.graph.domain_rows import domain_rows
from octavo.graph.domains import described, domain_needs
from octavo.graph.feeds import fed_products
from octavo.graph.memory_plan import MemoryPlan
from octavo.graph.ops.attention import RopeParams
from octavo.graph.ops.collective import AllGather
from octavo.graph.ops.low_rank import LowRank
from octavo.graph.values import LOGITS, RowDomain

logger = logging.getLogger(__name__)

_NO_VALUES: Mapping[str, Sequence[Tensor]] = {}


class TorchPendingStep:
    """Implements `octavo.backends.PendingStep` for a step whose results are on their way to the host."""

    def __init__(self, started: Future[Results], group: TorchRankGroup | None = None) -> None:
        """started: the results of a step that was or will be started.
        group: the rank group; if it has failed, so has the step.
        """
        self._started, self._group = started, group
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        results = self._started.result()
        if self._output is None:
            self._output = results.output()
        if self._group is not None and self._group.error:
            raise RuntimeError(self._group.error)
        raise_row_errors(results.errors())
        return self._output


class Results:
    """The results of a step, copied to the host while later work runs."""

    def __init__(
        self,
        num_rows: int,
        samples: Samples | None,
        values: Mapping[str, Sequence[Tensor]],
        *,
        reports: bool = True,
        computed: Tensor | None = None,
    ) -> None:
        """values: tensors for fields of `StepOutput`, by field name; the next step may overwrite them.
        reports: False if nobody wants log-probabilities, ranks or the most likely tokens; they are then not copied.
        computed: `StepOutput.computed_ids`.
        """
        self._num_rows = num_rows
        self._computed = None if computed is None else _to_host(computed)
        names = Samples.__slots__ if reports else ("token_ids", "errors")
        self._samples = {} if samples is None else {name: _to_host(getattr(samples, name)) for name in names}
        self._values = {name: [_to_host(x.float()) for x in tensors] for name, tensors in values.items()}
        is_cuda = any(x.is_cuda for tensors in values.values() for x in tensors)
        is_cuda = is_cuda or (samples is not None and samples.token_ids.is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def _settle(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def errors(self) -> np.ndarray:
        """Return an error code for each row: `ROW_OK` if it has a token, otherwise the reason why not."""
        self._settle()
        return self._samples["errors"].numpy() if self._samples else np.zeros(0, np.int32)

    def output(self) -> StepOutput:
        """Return the results as arrays."""
        self._settle()
        output = StepOutput.unsampled(self._num_rows)
        for name, tensor in self._samples.items():
            if name != "errors":
                is_real = name in ("logprobs", "top_logprobs")
                setattr(output, name, tensor.numpy().astype(np.float32 if is_real else np.int32, copy=False))
        for name, tensors in self._values.items():
            arrays = tuple(x.numpy() for x in tensors)
            setattr(output, name, arrays if name == "values" else arrays[0])
        if self._computed is not None:
            output.computed_ids = self._computed.numpy().astype(np.int32, copy=False)
        return output


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class StepMode(NamedTuple):
    """The way an executor runs its steps.

    capture: captures steps with one token per sequence; None means that none is captured.
    repeats: see `TorchStep`.
    group: the ranks that compute the other parts of the graph, or None if there are none.
    prompt_tokens: tokens of the largest captured step that contains parts of prompts; 0 means that none is captured.
    """

    device: torch.device
    capture: Capture | None = None
    repeats: bool = False
    group: TorchRankGroup | None = None
    prompt_tokens: int = 0


class TorchExecutor:
    """Implements `octavo.backends.Executor`. Steps run on the device's current stream, in the order in which they were
    submitted.
    """

    mapped_bytes = 0
    paging: Paging | None = None

    def __init__(
        self,
        graph: Graph,
        weights: DeviceWeights,
        limits: ExecutorLimits,
        sizes: tuple[CacheSizes, int],
        plan: MemoryPlan,
        numbers: CacheNumbers,
        mode: StepMode,
    ) -> None:
        """sizes: sizes of the cache, and the additional bytes that a step needs.
        plan: result of `step_plan`.
        numbers: number types of the cache.
        """
        device = mode.device
        # On the CPU, a step is computed by the call that submits it.
        self.max_in_flight = 2 if device.type == "cuda" else 1
        self.settles_drafts = mode.group is None
        self.num_stages = 1
        self.cache_sizes, self.workspace_bytes = sizes
        self.weight_bytes = weights.nbytes
        self.num_threads = torch.get_num_threads() if device.type == "cpu" else 1
        self.device = device
        self._graph, self._weights, self._limits = graph, weights, limits
        self._checks = BatchChecks(graph, limits)
        self._adapters = AdapterTable(graph, weights.dtype, device)
        self._described = described(domain_needs(graph))
        self._layout, self._has_states = graph.cache_layout, bool(graph.state_caches)
        self._numbers, self._capture, self._repeats = numbers, mode.capture, mode.repeats
        self._group, self._widths = mode.group, gathered_widths(graph, mode.group)
        # A step waits for other ranks, which start it only after it was submitted here.
        self._thread = None if mode.group is None else ThreadPoolExecutor(1, "octavo-rank")
        place = Place.of(device, weights.dtype, repeats=mode.repeats)
        self.calls = provided(triton_calls(device), place, products=weights.streamed is None)
        self._plan = plan
        self._workspace: Workspace | None = self._new_workspace()
        self._graphs: DecodeGraphs | None = None
        self._pieces: PromptPieces | None = None
        self._prompt_tokens = min(mode.prompt_tokens, limits.max_num_batched_tokens)
        self._angles: dict[RopeParams, Tensor] = {}
        self._cache = self._new_cache(0, 1, 0)
        self._lender: TorchExecutor | None = None  # the executor that owns the cache
        # Number of blocks, block size and state slots before a sleep.
        self._slept_sizes: tuple[int, int, int] | None = None
        self._board, self._is_guessing = TokenBoard(*_board_sizes(graph, limits), device), False
        self._hidden = HeadStates(device)
        self._target_ids: Tensor | None = None  # for a draft head: see `share_tokens`
        head = next((i for i, node in enumerate(graph.nodes) if node.output.rows is LOGITS), len(graph.nodes))
        self._body, self._head = graph.nodes[:head], graph.nodes[head:]
        self._feeds = fed_products(graph)

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> PreparedFactors:
        """See `octavo.backends.AdaptingExecutor`."""
        num_bytes = sum(part.size for part in parts.values()) * self._adapters.dtype.itemsize
        with torch.no_grad(), current(self.device), room_for("an adapter", num_bytes):
            return self._adapters.prepare(parts)

    def load_adapter(self, slot: int, prepared: PreparedFactors) -> None:
        """See `octavo.backends.AdaptingExecutor`."""
        with torch.no_grad(), current(self.device):
            self._adapters.load(slot, prepared)

    def drop_adapter(self, slot: int) -> None:
        """See `octavo.backends.AdaptingExecutor`."""
        self.load_adapter(slot, PreparedFactors([], []))

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self._graphs = self._pieces = None  # they contain addresses in the old cache
        num_bytes = num_blocks * self.cache_sizes.block_bytes(block_size) + num_states * self.cache_sizes.state_bytes
        with room_for("the KV cache", num_bytes):
            self._cache = self._new_cache(num_blocks, block_size, num_states)
        graph, limits = self._graph, self._limits
        is_plain = graph.generates and not graph.inputs and not graph.takes_whole_texts and not self._described
        if self._capture is not None and is_plain:
            spare = SpareRows(len(self._layout.groups), num_blocks, block_size, num_states)
            if self._prompt_tokens:
                self._pieces = self._captured_pieces(self._capture, spare)
            most = min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.rows[LOGITS])
            host_of = partial(self._host_arrays, max_tokens=limits.max_model_len)
            try:
                with current(self.device):
                    self._graphs = DecodeGraphs(
                        self._captured_logits,
                        host_of,
                        self._seen_blocks,
                        spare,
                        self._capture,
                        buckets(most),
                        self.device,
                    )
            except RuntimeError as error:  # a driver error, or too little memory: steps also run without graphs
                reason = str(error).partition("\n")[0]
                logger.warning("capturing decode steps failed; their operations are launched one by one: %s", reason)

    def borrow_cache(self, other: Executor) -> None:
        """See `octavo.backends.BorrowingExecutor`."""
        if not isinstance(other, TorchExecutor) or other.device != self.device:
            raise UsageError(
                "a draft_model that reads the model's cache must be on the same device; leave draft_model out"
            )
        self._lender = other

    def share_tokens(self, other: Executor, target_ids: Int32 | None, bias: Float32 | None) -> bool:
        """See `octavo.backends.GuessingExecutor`."""
        if not isinstance(other, TorchExecutor) or other.device != self.device or not other.settles_drafts:
            return False
        self._board, self._is_guessing = other._board, True
        self._hidden = HeadStates(self.device, other._hidden, bias)
        self._target_ids = None if target_ids is None else sent(target_ids, self.device).long()
        self._checks.num_source_rows = other._limits.max_num_outputs
        return True

    def _captured_pieces(self, capture: Capture, spare: SpareRows) -> PromptPieces | None:
        """Capture the pieces of steps with parts of prompts. Return None if the capture failed."""
        sizes, begin = token_sizes(self._prompt_tokens), partial(self._step, avoids_host=True)

        def host_of(size: int) -> HostArrays:
            return self._host_arrays(spare.alone(size))

        try:
            with current(self.device), torch.no_grad():
                return PromptPieces(self._graph, self._body, begin, host_of, capture, sizes, self.device)
        except RuntimeError as error:  # as for decode steps
            reason = str(error).partition("\n")[0]
            logger.warning("capturing prompts failed; their operations are launched one by one: %s", reason)
            return None

    def _new_workspace(self) -> Workspace:
        with room_for("the values of a step", self._plan.total_bytes):
            return Workspace(self._plan, value_types(self._graph, self._weights.dtype), self.device)

    def _new_cache(self, *sizes: int) -> PagedCache:
        blocks, block_size, states = sizes
        state_dtype = vector_type(self._weights.dtype)
        shape, (types, factors) = (blocks, block_size, states), self._numbers
        return PagedCache(self._graph, shape, self.device, types, state_dtype, factors)

    def submit(self, batch: Batch) -> TorchPendingStep:
        if self._lender is not None:  # its cache is a new one after a sleep
            self._cache = self._lender._cache
        self._checks.check(batch, self._cache)
        if self._thread is not None:
            return TorchPendingStep(self._thread.submit(self._start, batch), self._group)
        started: Future[Results] = Future()
        try:
            started.set_result(self._start(batch))
        except Exception as error:  # `wait` reports it, as for a native thread
            started.set_exception(error)
        return TorchPendingStep(started)

    def _start(self, batch: Batch) -> Results:
        with torch.no_grad(), current(self.device):
            return self._run(batch)

    def _run(self, batch: Batch) -> Results:
        self._cache.copy(batch)
        late = None if batch.late is None else LateNumbers(self._board, batch, self._cache.block_size)
        draws, given = None if late is None else late.draws(), batch
        batch = self._board.placed(given)
        if self._graphs is not None and (bucket := self._graphs.bucket_of(batch)) is not None:
            logits = self._graphs.logits(batch, bucket, late)
            return self._results([self._sampled(logits, batch, slice(0, len(logits)), draws)], batch)
        host = self._host_arrays(batch)
        flat = host.sent(self.device)
        inputs = self._hidden.inputs(batch, [value.cols for value in self._graph.inputs])
        if late is not None:
            late.move(host, flat)
        step, graph = self._step(host, flat, inputs, self._further(batch)), self._graph
        step.draws = draws
        if not self._is_guessing:
            self._board.keep_computed(step.rows.token_ids)
        if self._pieces is not None and (size := self._pieces.size_of(batch)) is not None:
            self._pieces.evaluate(step, batch, size)
        else:
            self._evaluate(step, self._body)
        count = len(batch.logits_indices)
        if not graph.makes_logits:
            return Results(count, None, {"values": [step.values[value] for value in graph.outputs]})
        if not len(batch.hidden_indices):
            return self._finish(step, batch)
        hidden = {"hidden_states": [step.values[graph.hidden_states][count:]]}
        if graph.tap is not None:
            hidden["taps"] = [step.values[graph.tap][count:]]
        self._hidden.keep(hidden.get("taps", hidden["hidden_states"])[0], len(batch.token_ids))
        return self._finish(step, batch, hidden) if count else Results(0, None, hidden)

    def _host_arrays(self, batch: Batch, max_tokens: int = 0) -> HostArrays:
        spare = self._cache.num_states if self._has_states else None
        size, is_whole = self._cache.block_size, self.calls is not None
        return host_arrays(batch, self._layout, size, spare, max_tokens, whole_tables=is_whole)

    def _further(self, batch: Batch) -> dict[RowDomain, FurtherRows]:
        """Return the rows of the domains that the step's own arrays do not describe completely."""
        found = {}
        for domain in self._described:
            rows = domain_rows(batch, domain)
            starts = () if rows.starts is None else tuple(rows.starts.tolist())
            positions = None if rows.positions is None else sent(rows.positions, self.device).long()
            indices = {name: sent(array, self.device).long() for name, array in rows.indices.items()}
            found[domain] = FurtherRows(rows.count, starts, positions, indices)
            if rows.lengths is not None:  # the domain has caches
                slots = None if rows.slots is None else sent(rows.slots, self.device).long()
                tables = sent(batch.block_tables, self.device).long()
                lengths = tuple(rows.lengths.tolist())
                found[domain] = replace(found[domain], lengths=lengths, slots=slots, tables=tables)
        return found

    def _seen_blocks(self, batch: Batch) -> list[SeenBlocks]:
        """Return the blocks that each sequence sees, by group of layers."""
        size, is_whole = self._cache.block_size, self.calls is not None
        groups = enumerate(self._layout.groups)
        return [seen_blocks(batch, group, i, slice(None), size, whole=is_whole) for i, group in groups]

    def _step(
        self,
        host: HostArrays,
        flat: Tensor,
        inputs: Sequence[Tensor] = (),
        further: Mapping[RowDomain, FurtherRows] = NO_FURTHER_ROWS,
        *,
        avoids_host: bool = False,
    ) -> PagedStep:
        arrays = host.views(flat.long())
        rows, sources = arrays.rows, arrays.sources
        # A row without a token has drawn -1, and the step that uses it is discarded. A model may draw tokens that
        # are missing from its draft model's table.
        drawn = self._board.tokens[sources.clamp(min=0)].clamp(min=0, max=self._checks.last_token)
        token_ids = torch.where(sources >= 0, drawn, rows.token_ids)
        assert self._workspace is not None, "a step after `close`, or asleep"
        return PagedStep(
            replace(rows, token_ids=token_ids),
            inputs,
            further,
            avoids_host=avoids_host,
            weights=self._weights,
            cache=self._cache,
            arrays=arrays,
            small=host.views(flat),
            calls=self.calls,
            max_positions=self._limits.max_model_len,
            angles=self._angles,
            repeats=self._repeats,
            group=self._group,
            widths=self._widths,
            feeds=self._feeds,
            workspace=self._workspace,
            num_outputs=len(rows.wanted),
            adapters=self._adapters,
        )

    def _captured_logits(self, host: HostArrays, flat: Tensor) -> Tensor:
        """Return the logits of a step that may be captured."""
        step = self._step(host, flat, avoids_host=True)
        self._evaluate(step, self._graph.nodes)
        return step.values[self._graph.output].float()

    def _evaluate(self, step: PagedStep, nodes: Sequence[Node]) -> None:
        for node in self._weights.in_turn(nodes):
            evaluate(node, step)

    def _finish(self, step: PagedStep, batch: Batch, hidden: Mapping[str, Sequence[Tensor]] = _NO_VALUES) -> Results:
        """Run the output head and sampling, for as many rows at a time as the memory for logits allows.

        hidden: additional values for the results.
        """
        count = len(batch.logits_indices)
        at_once = self._limits.rows[LOGITS] if self._head else max(count, 1)
        whole, parts = dict(step.values), []
        offers = self._offers(batch)
        for begin in range(0, max(count, 1), at_once):
            rows = slice(begin, min(begin + at_once, count))
            step.take_outputs(whole, rows)
            parts.append(self._of_head(step, batch, rows, offers))
        is_wanted = not self._is_guessing and self._board.has_guesses(batch)
        return self._results(parts, batch, hidden, step.rows.token_ids if is_wanted else None)

    def _offers(self, batch: Batch) -> int | None:
        """Return the number of tokens that each rank offers per row if the ranks sample together.

        Return None if they do not, because nothing is sampled, all logits are needed, or the logits are not divided
        among ranks.
        """
        last = self._head[-1].op if self._head else None
        if self._group is None or last not in self._widths or batch.sampling is None or batch.return_logits:
            return None
        return offers_of(batch.sampling) if len(batch.logits_indices) else None

    def _of_head(
        self, step: PagedStep, batch: Batch, rows: slice, offers: int | None
    ) -> tuple[Samples | None, Tensor | None]:
        """Run the output head for some rows. Return what `_sampled` returns."""
        if offers is None:
            self._evaluate(step, self._head)
            draws = None if step.draws is None else step.draws[rows]
            return self._sampled(step.values[self._graph.output].float(), batch, rows, draws)
        gather, group = self._head[-1].op, self._group
        assert isinstance(gather, AllGather)
        assert group is not None
        assert batch.sampling is not None
        self._evaluate(step, self._head[:-1])
        own, options = step.values[gather.x].float(), rows_of(batch.sampling, rows)
        samples = sample_together(own, options, self._widths[gather], group.rank, group.side_by_side, offers)
        # Only the first rank reports rows without a token: it alone knows the requests. The other ranks continue.
        return samples if group.rank == 0 else None, None

    def _sampled(
        self, logits: Tensor, batch: Batch, rows: slice, draws: Tensor | None = None
    ) -> tuple[Samples | None, Tensor | None]:
        """Sample some rows. Return the tokens and, if wanted, a copy of the logits, because the next step may overwrite
        them.

        draws: random numbers for these rows; None means the random numbers in the rows' options.
        """
        # The first rank samples from the gathered logits.
        options = batch.sampling if self._group is None or self._group.rank == 0 else None
        num_top = 0 if options is None else max(int(options.rows["num_logprobs"].max(initial=0)), 0)
        draw = sample if self.calls is None else self.calls.sampled
        if options is not None and rows != slice(0, len(options.rows)):
            options = rows_of(options, rows)
        samples = None if options is None else draw(logits, options, num_top, draws)
        return samples, logits.clone() if batch.return_logits else None

    def _results(
        self,
        parts: Sequence[tuple[Samples | None, Tensor | None]],
        batch: Batch,
        hidden: Mapping[str, Sequence[Tensor]] = _NO_VALUES,
        computed: Tensor | None = None,
    ) -> Results:
        samples = [part for part, _ in parts if part is not None]
        logits = [part for _, part in parts if part is not None]
        values = {**hidden, "logits": [torch.cat(logits)]} if logits else hidden
        drawn = joined(samples) if samples else None
        if drawn is not None and not self._is_guessing:
            self._board.keep_drawn(drawn.token_ids)
        elif drawn is not None and batch.guesses_at >= 0:
            names = self._target_ids
            guesses = drawn.token_ids if names is None else names[drawn.token_ids.clamp(min=0)]
            self._board.keep_guesses(guesses, batch.guesses_at)
        reports = batch.sampling is not None and bool((batch.sampling.rows["num_logprobs"] >= 0).any())
        return Results(len(batch.logits_indices), drawn, values, reports=reports, computed=computed)

    def sleep(self) -> None:
        """See `octavo.backends.SleepingExecutor`."""
        if self._slept_sizes is None:
            self._slept_sizes = (self._cache.num_blocks, self._cache.block_size, self._cache.num_states)
            self._graphs = self._pieces = None
            self._angles.clear()
            self._hidden.forget()
            self._workspace = None
            self._cache = self._new_cache(0, 1, 0)
            with current(self.device):
                self._weights.move(torch.device("cpu"))
                self._adapters.move(torch.device("cpu"))
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """See `octavo.backends.SleepingExecutor`."""
        if self._slept_sizes is not None:
            with room_for("the weights", self.weight_bytes), current(self.device):
                self._weights.move(self.device)
                self._adapters.move(self.device)
            self._workspace = self._new_workspace()
            self.allocate_cache(*self._slept_sizes)
            self._slept_sizes = None

    def close(self) -> None:
        if self._group is not None and self._thread is not None:
            self._group.fail("the engine is closed")
            self._thread.shutdown()
        self._graphs = self._pieces = None
        self._weights.clear()
        self.weight_bytes = 0
        self._angles.clear()
        self._hidden.forget()
        self._workspace = None
        self._cache = self._new_cache(0, 1, 0)


def _board_sizes(graph: Graph, limits: ExecutorLimits) -> tuple[int, int, int]:
    """Return the rows and tokens of the largest step, and the columns of the logits."""
    columns = graph.output.cols if graph.makes_logits else 1
    return limits.max_num_outputs, limits.max_num_batched_tokens, columns


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current device: Triton launches, streams and events use the current device, not the device of
    their tensors.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def room_for(what: str, num_bytes: int) -> Iterator[None]:
    """Raise InsufficientMemoryError if torch runs out of GPU memory although the memory plan found enough.

    what: names the purpose of the memory in the error.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise InsufficientMemoryError(
            f"the GPU has no room for {what}, {num_bytes / 2**30:.2f} GiB: another program may have taken it since; "
            "end it, or lower gpu_memory or gpu_layers"
        ) from None


def triton_calls(device: torch.device) -> StepKernels | None:
    """Return `octavo.backends.torch.triton_calls` on a GPU, where kernels run, or None if plain torch replaces them."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return cast(StepKernels, importlib.import_module("octavo.backends.torch.triton_calls"))


def gathered_widths(graph: Graph, group: TorchRankGroup | None) -> dict[AllGather, list[int]]:
    """Return the number of columns that each rank has of each gathered value. The ranks exchange these numbers."""
    ops = [node.op for node in graph.nodes if isinstance(node.op, AllGather) and node.op.size > 1]
    if group is None or not ops:
        return {}
    of_ranks = group.exchanged([op.x.cols for op in ops])
    return {op: [widths[i] for widths in of_ranks] for i, op in enumerate(ops)}
