"""The description of a loaded engine for the server: its model, and its metrics as plain values."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from octavo.config import EngineConfig, KVDtype, LoadProgress
from octavo.core.client import ModelInfo
from octavo.engine.request import Request
from octavo.engine.session import Session
from octavo.generation_request import GenerationRequest
from octavo.sampling_params import RequestOutputKind

# A stall: no heartbeat for this time, or no step while work waits and nothing computes.
STALL_S = 1.5
# So is a step that computes for so long. Steps are cut to a fraction of a second, but a machine that has other things
# to do, or a model that is large for it, may make seconds of that, and is nevertheless alive.
SLOW_STEP_S = 10.0


def load(
    config: EngineConfig, progress: LoadProgress, on_round_end: Callable[[], None] | None = None
) -> tuple[Session, ModelInfo]:
    """A session and its description. Raises the errors of `load_engine`.

    The seconds of the phases come from the progress: open (find and read the files), weights, cache.
    """
    times = [time.monotonic()]

    def note(done: int, total: int) -> None:
        times.append(time.monotonic())
        progress(done, total)

    session = Session(config, note, on_round_end)
    start, first, last = times[0], times[min(1, len(times) - 1)], times[-1]
    seconds = {"open": first - start, "weights": last - first, "cache": time.monotonic() - last}
    return session, _model_info(session, config.kv_dtype, seconds)


def _model_info(session: Session, kv_dtype: KVDtype, load_seconds: dict[str, float]) -> ModelInfo:
    loaded = session.model()
    executor, limits = loaded.executor, loaded.engine.limits
    return ModelInfo(
        model=loaded.name,
        path=str(loaded.path),
        architecture=loaded.architecture,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_id=loaded.eos_token_id,
        hidden_size=loaded.hidden_size,
        max_num_seqs=limits.max_num_seqs,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=executor.cache_sizes.token_bytes,
        kv_cache_bytes=limits.num_blocks * executor.cache_sizes.block_bytes(limits.block_size),
        weight_bytes=executor.weight_bytes,
        workspace_bytes=executor.workspace_bytes,
        num_threads=executor.num_threads,
        load_seconds=load_seconds,
    )


def create_request(session: Session, request_id: str, request: GenerationRequest) -> Request:
    """The checked request, with deltas as output. Raises UsageError with param and code."""
    params = request.params.with_output_kind(RequestOutputKind.DELTA)
    return session.model().engine.create_request(request_id, dataclasses.replace(request, params=params))
