"""The values of the metrics: counts of requests, and the latest figures of engines."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from octavo.core.client import EngineStatus, ModelInfo
from octavo.engine.metrics import EngineMetrics

CancelPhase: TypeAlias = Literal["prefill", "decode"]
CANCEL_PHASES: tuple[CancelPhase, ...] = ("prefill", "decode")  # prefill: before the first token, in the queue or not
FINISHED_REASONS = ("stop", "length", "abort", "error")
UNKNOWN = "other"
REJECTED_REASONS = (
    "server_overloaded",
    "queue_timeout",
    "server_shutting_down",
    "engine_restarting",
    "engine_stalled",
    "model_loading",
    "invalid_request",
    UNKNOWN,
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(slots=True)
class ModelStats:
    """The requests of one model since the server's start, counted when their answers leave the server."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_corrupted: int = 0  # ended because the model computed a value that is not a number
    finished: Counter[str] = field(default_factory=Counter)  # by FINISHED_REASONS, one a choice
    cancelled: Counter[str] = field(default_factory=Counter)  # by CANCEL_PHASES, one a request


@dataclass(slots=True)
class EngineFigures:
    """The latest figures of one engine, and the sums over all of its processes.

    status: None when its model is unloaded.
    """

    status: EngineStatus | None = None
    info: ModelInfo | None = None  # None: it was never ready
    resident_bytes: int = 0  # of its process
    num_restarts: int = 0
    current: EngineMetrics = field(default_factory=EngineMetrics)  # of its process
    totals: EngineMetrics = field(default_factory=EngineMetrics)  # with the counts of the processes before
    _ended: EngineMetrics = field(default_factory=EngineMetrics)  # of the processes before
    _process: tuple[int | None, int] | None = None  # process id and number of restarts; None: none yet

    @property
    def load_progress(self) -> float:
        return self.status.load_progress if self.status is not None else 0.0

    @property
    def num_running(self) -> int:
        """The number of sequences and texts being computed."""
        return self.current.num_running + self.current.num_embedding

    @property
    def num_waiting(self) -> int:
        return self.current.num_waiting + self.current.num_embedding_waiting

    def saw(self, status: EngineStatus, metrics: EngineMetrics) -> None:
        """Takes the latest figures. metrics: those of the status, or newer ones."""
        process = (status.pid, status.num_restarts)
        if process != self._process:
            self._process, self._ended, self.current = process, self.totals, EngineMetrics()
        if metrics.num_steps_total >= self.current.num_steps_total:  # else it was on its way for longer
            self.current, self.totals = metrics, metrics.after(self._ended)
        self.num_restarts += max(status.num_restarts - (self.status.num_restarts if self.status else 0), 0)
        self.status = status

    def left(self) -> None:
        """Notes that the model was unloaded: its counters stay, and its gauges are removed."""
        self.status = self._process = None
        self.resident_bytes = 0


def resident_bytes(pid: int | None) -> int:
    """Physical memory of a process (Linux, proc(5)); 0 if it is gone or unknown."""
    if pid is None:
        return 0
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
