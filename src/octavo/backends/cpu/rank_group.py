"""A group of ranks on one machine that compute parts of the same layers and communicate over shared memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from octavo.backends.cpu import _native
from octavo.backends.cpu.compiler import (
    CompileOptions,
    compile,  # noqa: A004 - the backend protocol's name
)
from octavo.backends.cpu.executor import CpuExecutor
from octavo.backends.rank_segments import remove_leftovers
from octavo.errors import EngineDeadError
from octavo.platform import numa, processors

logger = logging.getLogger(__name__)


class CpuRankGroup:
    """Implements `octavo.backends.RankGroup`."""

    def __init__(self, group: _native.CollectiveGroup) -> None:
        self._group = group

    @property
    def error(self) -> str:
        return self._group.error

    @property
    def is_waiting(self) -> bool:
        return self._group.is_waiting

    def fail(self, reason: str) -> None:
        self._group.fail(reason)

    def compile(self, *arguments: Any, **options: Any) -> CpuExecutor:
        """Compile this rank's graph. See `octavo.backends.cpu.compile`."""
        return compile(*arguments, options=CompileOptions(group=self._group), **options)


def join_group(
    name: str, rank: int, size: int, buffer_bytes: int, given_up: Callable[[], str] | None = None
) -> CpuRankGroup:
    """See `octavo.backends.Backend`. The ranks share memory, so they must be on one machine."""
    remove_leftovers()
    node = numa.node_of(processors.allowed_cpus())
    try:
        group = _native.CollectiveGroup(
            name, rank, size, buffer_bytes=buffer_bytes, numa_node=-1 if node is None else node, given_up=given_up
        )
    except RuntimeError as error:
        raise EngineDeadError(f"the ranks of this machine could not connect to each other: {error}") from None
    _note_placement(group, node)
    return CpuRankGroup(group)


def _note_placement(group: _native.CollectiveGroup, node: int | None) -> None:
    if node is None:
        logger.info("this rank runs on several NUMA nodes: its exchange buffers may be in the memory of any of them")
    elif group.placement_error:
        reason = os.strerror(group.placement_error)
        level = logging.WARNING if len(numa.nodes_with_cpus()) > 1 else logging.DEBUG
        logger.log(level, "cannot place this rank's exchange buffers in the memory of NUMA node %d: %s", node, reason)
