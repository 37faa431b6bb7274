"""Runs the lines of a batch through Ray Data: each actor has an engine, and results are written to one journal."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

import numpy as np

from octavo.batches.lines import BatchLine, LineError, LineResult, failed
from octavo.batches.runner import BatchRunner
from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.server.line_engine import line_engine
from octavo.server.models.model_loader import NoReport

T = TypeVar("T")

_LINES_PER_BLOCK = 64  # at most these are lost of each actor if a run is killed


class AnswerLines:
    """Answers the lines of a block, for `map_batches`, from the columns number, custom_id, url and body (JSON)."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Load the model. Raises the errors of loading a model.

        options: fields of `EngineConfig`.
        """
        # Its loop never stops, as the engine's process has to be listened to.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="octavo-lines").start()
        self._stack = AsyncExitStack()
        config = EngineConfig.resolve(model, dict(options))
        place = line_engine(model, config, NoReport())
        self._call, self._width = self._wait(self._stack.enter_async_context(place))

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Return a column `result` with the JSON of each line's outcome, in order of completion."""
        columns = (block[name].tolist() for name in ("number", "custom_id", "url", "body"))
        lines = [
            BatchLine(int(number), custom_id, url, json.loads(body))
            for number, custom_id, url, body in zip(*columns, strict=True)
        ]
        results: list[str] = []
        runner = BatchRunner(self._call, self._width, lambda result: results.append(_to_json(result)))
        self._wait(runner.run(lines))
        return {"result": np.array(results, dtype=object)}

    def close(self) -> None:
        """Stop the engine. A Ray actor does not need this, because its engine ends with its process."""
        self._wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def answer_lines(
    lines: Iterable[BatchLine | LineError],
    put: Callable[[LineResult], None],
    model: str,
    options: Mapping[str, Any],
    *,
    num_actors: int | None,
    num_cpus: int | None,
) -> None:
    """Pass the result of each line to `put`, in the order in which blocks of lines are completed.

    num_actors: None means one per node.
    num_cpus: CPUs per actor; None means all CPUs of the smallest node.

    Raises UsageError if ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs ray: pip install 'octavo[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # RAY_ADDRESS names a cluster
    nodes = [int(node["Resources"].get("CPU", 0)) for node in cast(Any, ray).nodes() if node["Alive"]]
    cpus = num_cpus or min((count for count in nodes if count), default=1)
    rows = []
    for line in lines:
        if isinstance(line, LineError):
            put(failed(line, line.code, f"line {line.number}: {line.message}"))
        else:
            body = json.dumps(line.body)
            rows.append({"number": line.number, "custom_id": line.custom_id, "url": line.url, "body": body})
    if not rows:
        return
    actors = num_actors or len([count for count in nodes if count >= cpus]) or 1
    blocks = min(max(-(-len(rows) // _LINES_PER_BLOCK), actors), len(rows))
    questions = ray.data.from_items(rows, override_num_blocks=blocks)
    answers = questions.map_batches(
        AnswerLines,
        fn_constructor_kwargs={"model": model, "options": {"num_threads": cpus, **options}},
        batch_size=_LINES_PER_BLOCK,
        num_cpus=cpus,
        concurrency=actors,
    )
    for row in answers.iter_rows():
        put(_from_json(row["result"]))


def _to_json(result: LineResult) -> str:
    values = {name: getattr(result, name) for name in LineResult.__slots__}
    return json.dumps({**values, "body": result.body.decode(), "usage": dict(result.usage)})


def _from_json(text: str) -> LineResult:
    values = json.loads(text)
    return LineResult(**{**values, "body": values["body"].encode()})
