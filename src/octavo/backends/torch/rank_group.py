"""A group of ranks that compute parts of the same layers, over torch.distributed: NCCL on GPUs, gloo on the CPU.

All ranks are on one machine. They communicate over loopback sockets and find each other through a file.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from octavo import env
from octavo.errors import EngineDeadError

if TYPE_CHECKING:
    from octavo.backends import Executor

_POLL_S = 0.05
_WAIT = timedelta(seconds=120)  # for ranks to join, and for each other within a step
_LOOK = timedelta(seconds=0.2)  # between checks for a failure


class TorchRankGroup:
    """Implements `octavo.backends.RankGroup`. On a GPU, exchanges are queued like kernels; nothing waits for them."""

    is_waiting = True  # not known here, so assume it; a wait ends after two minutes
    compile: Callable[..., Executor]  # like `TorchBackend.compile`, for this rank's graph; set by the backend

    def __init__(self, group: Any, place: tuple[int, int], device: torch.device) -> None:
        """group: process group of torch.distributed.
        place: number of this rank, and number of ranks.
        """
        self._group, self.device = group, device
        self.rank, self.size = place
        self.error = ""

    def fail(self, reason: str) -> None:
        self.error = self.error or reason
        with suppress(RuntimeError):  # the group is already gone
            self._group.abort()

    def sum(self, x: Tensor, *, in_order: bool) -> Tensor:
        """Return the sum of x over the ranks, bit-identical on all of them, in x itself or a new tensor.

        in_order: add rank by rank; otherwise a library may add parts of x in different orders for different sizes.
        """
        x = x.contiguous()
        if in_order and self.size > 2:
            return reduce(torch.add, self._gathered(x).unbind(0))
        self._done(self._group.allreduce([x]))
        return x

    def side_by_side(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate the columns of x [rows, cols] of all ranks. `widths` gives the number of columns of each rank."""
        most = max(widths)
        found = self._gathered(torch.nn.functional.pad(x, (0, most - x.shape[1])).contiguous())
        if len(set(widths)) == 1:
            return found.transpose(0, 1).reshape(len(x), sum(widths))
        return torch.cat([part[:, :width] for part, width in zip(found.unbind(0), widths, strict=True)], dim=1)

    def exchanged(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, after waiting for all ranks. All lists must have the same length."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        found: list[list[int]] = self._gathered(own).tolist()
        return found

    def _gathered(self, x: Tensor) -> Tensor:
        """Return x of all ranks, [ranks, *shape]."""
        out = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._done(self._group._allgather_base(out, x))
        return out.reshape(self.size, *x.shape)

    def _done(self, work: Any) -> None:
        try:
            self._wait(work)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            self.error = self.error or f"another rank has died or was stopped: {reason}"
            raise RuntimeError(self.error) from None

    def _wait(self, work: Any) -> None:
        """Wait until a gloo exchange, which cannot be aborted, ends or `fail` is called."""
        if self.device.type == "cuda":
            work.wait()  # only queues the wait on the stream; NCCL can be aborted
            return
        while not _is_done(work):
            if self.error:
                # The group's destructor would wait for the exchange.
                threading.Thread(target=_outlast, args=(self._group, work), daemon=True).start()
                raise RuntimeError(self.error)


def _is_done(work: Any) -> bool:
    """Wait briefly. Return True if the exchange has ended; raise RuntimeError if it has failed."""
    with suppress(RuntimeError):  # not done yet, or failed
        work.wait(_LOOK)
    if not work.is_completed():
        return False
    work.wait()
    return True


def _outlast(_group: Any, work: Any) -> None:
    """Keep a group alive until its exchange has ended."""
    while not work.is_completed():  # waiting in the library would abort the interpreter when it exits
        time.sleep(_POLL_S)


def join_group(
    name: str, place: tuple[int, int], device: torch.device, given_up: Callable[[], str] | None
) -> TorchRankGroup:
    """Join the group called `name`, a secret of its ranks, and return it when all ranks have joined.

    place: number of this rank, and number of ranks.
    given_up: called while waiting; returns a reason to stop waiting.
    Raises EngineDeadError if a rank does not join.
    """
    path = Path(tempfile.gettempdir(), f"octavo-{name}")
    try:
        store = distributed.FileStore(str(path), place[1])  # type: ignore[attr-defined]
        store.set_timeout(_WAIT)
        _await_all(store, place, given_up)
        group = (_nccl if device.type == "cuda" else _gloo)(store, *place)
        found = TorchRankGroup(group, place, device)
        found.exchanged([place[0]])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineDeadError(f"the ranks of this machine could not connect to each other: {reason}") from None
    finally:
        path.unlink(missing_ok=True)
    return found


def _await_all(store: Any, place: tuple[int, int], given_up: Callable[[], str] | None) -> None:
    """Wait until every rank has found the store. Raises RuntimeError naming a rank that does not join."""
    rank, size = place
    store.set(f"here-{rank}", "")
    end = time.monotonic() + _WAIT.total_seconds()
    for other in range(size):
        while not store.check([f"here-{other}"]):
            if given_up is not None and (reason := given_up()):
                raise RuntimeError(reason)
            if time.monotonic() > end:
                raise RuntimeError(f"rank {other} did not connect within {_WAIT.total_seconds():.0f} s")
            time.sleep(_POLL_S)


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _WAIT
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    env.keep_nccl_on_loopback()
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _WAIT
    return distributed.ProcessGroupNCCL(store, rank, size, options)
