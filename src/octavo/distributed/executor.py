"""The executor of an engine with several ranks: sends each batch to all of them, and values from stage to stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

import msgspec

from octavo.backends.moved_blocks import MovedSizes, moves, with_part
from octavo.backends.work_done import WatchedExecutor
from octavo.distributed.pipeline import Pipeline, PipelinedStep
from octavo.distributed.rank_messages import (
    AdapterPart,
    Allocate,
    Allocated,
    DropAdapter,
    HoldAdapter,
    LoadAdapter,
    SavedBlocks,
    Tensor,
    moved_tensors,
    step_message,
)
from octavo.errors import EngineDeadError, OctavoError, UsageError

if TYPE_CHECKING:
    from octavo.backends import AdaptingExecutor, Executor, Paging, PendingStep, RankGroup
    from octavo.batch import Batch, StepOutput
    from octavo.distributed.leader import Leader
    from octavo.distributed.ranks import Ranks
    from octavo.graph.cache import CacheSizes
    from octavo.graph.ops.low_rank import LowRank

_MAX_PART_BYTES = 1 << 30  # per message, because other messages in the ring wait for it


class GroupExecutor:
    """Implements `octavo.backends.Executor` on top of rank 0's executor and the other ranks."""

    max_in_flight = 1
    settles_drafts = False
    paging: Paging | None = None

    def __init__(
        self,
        local: Executor,
        leader: Leader,
        ranks: Ranks,
        group: RankGroup | None,
        cache_sizes: CacheSizes,
        weight_bytes: int,
        available_bytes: int,
    ) -> None:
        """group: the ranks of the last stage; None means rank 0 alone.
        cache_sizes: the largest cache sizes of any rank.
        weight_bytes: total bytes of all ranks' weights.
        available_bytes: the smallest number of bytes that any other rank has for its cache.
        """
        self._local, self._leader, self._ranks, self._group = local, leader, ranks, group
        self._number = 0
        self._adapter_numbers = count()
        self._moved = self._own = MovedSizes()
        self.num_stages = ranks.pipeline_parallel
        self._pipeline = Pipeline(local, leader, ranks, self.outcome) if self.num_stages > 1 else None
        self.cache_sizes = cache_sizes
        self.weight_bytes = weight_bytes
        self.own_weight_bytes = local.weight_bytes  # weights on rank 0
        self.available_bytes = available_bytes
        self.mapped_bytes = local.mapped_bytes
        self.workspace_bytes = local.workspace_bytes
        self.num_threads = local.num_threads
        if group is not None:
            leader.on_failure = group.fail

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self._moved = MovedSizes.of(self.cache_sizes, num_blocks, block_size, num_states)
        self._own = MovedSizes.of(self._local.cache_sizes, num_blocks, block_size, num_states)
        self._leader.send(Allocate(num_blocks, block_size, num_states))
        self._local.allocate_cache(num_blocks, block_size, num_states)
        for rank in range(1, self._ranks.count):
            self._leader.receive(rank, Allocated)
        self._leader.watch()

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> RankAdapter:
        """See `AdaptingExecutor`.

        The other ranks prepare their parts at the same time. The parts are sent to them one by one, between steps.
        """
        largest = max((x.nbytes for part in parts.values() for x in (part.a, part.b) if x is not None), default=0)
        if largest > _MAX_PART_BYTES:
            raise UsageError(
                f"a weight of the adapter has {largest:,} bytes, too many to send to other ranks (at most "
                f"{_MAX_PART_BYTES:,}); run the model on one rank"
            )
        number = next(self._adapter_numbers)
        for name, part in parts.items():
            a, gain = (None if each is None else Tensor.of(each) for each in (part.a, part.gain))
            self._leader.send(AdapterPart(number, name, a, Tensor.of(part.b), float(part.scale), gain))
        self._leader.send(HoldAdapter(number))
        prepared = RankAdapter(number, cast("AdaptingExecutor", self._local).prepare_adapter(parts))
        weakref.finalize(prepared, _forget, self._leader, number).atexit = False
        return prepared

    def load_adapter(self, slot: int, prepared: RankAdapter) -> None:
        """See `AdaptingExecutor`. The other ranks load the adapter before the next step."""
        self._leader.send(LoadAdapter(prepared.number, slot))
        cast("AdaptingExecutor", self._local).load_adapter(slot, prepared.own)

    def drop_adapter(self, slot: int) -> None:
        """See `AdaptingExecutor`. Drops only rank 0's part: no step reads the slot on other ranks either."""
        cast("AdaptingExecutor", self._local).drop_adapter(slot)

    def submit(self, batch: Batch) -> PendingStep:
        self._leader.check()
        self._moved.check(batch)
        own = with_part(batch, (0, self._own.block_bytes), (0, self._own.state_bytes))
        gather = partial(self._gather, batch, self._number + 1)
        if self._pipeline is not None:
            staged = PipelinedStep(self._number + 1, own, gather)
            self._tell(batch)
            self._pipeline.submit(staged)
            return staged
        step = self._local.submit(own)  # checks it before the other ranks receive it
        self._tell(batch)
        return _GroupStep(self, partial(self._end, step, gather))

    def _end(self, step: PendingStep, gather: Callable[[int], None]) -> StepOutput:
        try:
            return step.wait()
        finally:  # also if a row has no outcome
            for rank in range(1, self._ranks.count):
                gather(rank)

    def _gather(self, batch: Batch, number: int, rank: int) -> None:
        """Receive a rank's part of the blocks and states that a step has saved. Raises the leader's `failure` if there
        is one.
        """
        wanted = (batch.block_saves, batch.snapshot_saves)
        if not any(saves is not None and len(saves.block_ids) for saves in wanted):
            return
        saved = self._leader.receive(rank, SavedBlocks)
        for saves, tensor, (begin, end) in zip(wanted, (saved.blocks, saved.states), self._parts(rank), strict=True):
            data, count = tensor.array(), 0 if saves is None else len(saves.data)
            if saved.number != number or data.ndim != 2 or len(data) != count or data.shape[1] > end - begin:
                self._leader.fail(rank, f"it saved {data.shape} bytes at step {saved.number} instead of {number}")
                self._leader.check()
            if saves is not None:
                saves.data[:, begin : begin + data.shape[1]] = data

    def _parts(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return a rank's byte ranges in each block and in each state.

        All ranks get the room that the largest part needs.
        """
        sizes = (self._moved.block_bytes, self._moved.state_bytes)
        blocks, states = (size // self._ranks.count for size in sizes)
        return (rank * blocks, (rank + 1) * blocks), (rank * states, (rank + 1) * states)

    def _tell(self, batch: Batch) -> None:
        """Send the step to all ranks.

        Ranks of the first stage get the inputs. Ranks of the last stage, which sample together, get the sampling
        options.
        """
        self._number += 1
        if self._leader.patience is not None:
            self._leader.patience.begin(batch)
        is_sampled = self._group is not None and not batch.return_logits
        message = step_message(self._number, batch, with_sampling=is_sampled)
        for stage in range(self.num_stages):
            sampling = message.sampling if stage == self.num_stages - 1 else []
            part = msgspec.structs.replace(message, sampling=sampling, inputs=[] if stage else message.inputs)
            ranks = [rank for rank in self._ranks.of_stage(stage) if rank > 0]
            if not moves(batch):
                self._leader.send(part, ranks)
                continue
            for rank in ranks:
                moved = moved_tensors(batch, *self._parts(rank))
                self._leader.send(msgspec.structs.replace(part, moved=moved), [rank])

    def outcome(self, compute: Callable[[], StepOutput]) -> StepOutput:
        """Return the result of `compute`. Raises EngineDeadError if a rank is gone."""
        try:
            return compute()
        except RuntimeError:
            if self._group is None or not self._group.error:
                raise
            self._leader.fail(None, self._group.error)
            raise EngineDeadError(str(self._leader.failure or self._group.error)) from None

    def progress(self) -> int:
        """See `octavo.backends.work_done.WatchedExecutor`. It also changes while another rank computes."""
        own = self._local.progress() if isinstance(self._local, WatchedExecutor) else 0
        return own + self._leader.progress

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._leader.close()
        self._local.close()


class RankAdapter:
    """An adapter that all ranks have prepared.

    number: the number by which the ranks identify it.
    own: rank 0's part.
    """

    def __init__(self, number: int, own: object) -> None:
        self.number, self.own = number, own


def _forget(leader: Leader, number: int) -> None:
    with suppress(OctavoError):  # ranks that are gone hold nothing
        leader.send(DropAdapter(number))


class _GroupStep:
    """Implements `octavo.backends.PendingStep`."""

    def __init__(self, executor: GroupExecutor, compute: Callable[[], StepOutput]) -> None:
        self._executor, self._compute = executor, compute
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        if self._output is None:
            self._output = self._executor.outcome(self._compute)
        return self._output
