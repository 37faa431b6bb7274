"""An engine with the server's application but without a listener. It answers only the lines of a batch."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from octavo.batches.lines import BatchLine, with_seed
from octavo.batches.runner import SPARE_LINES, Call, LineAnswer
from octavo.config import EngineConfig
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.http.in_memory import BatchCaller, post
from octavo.server.models.model_loader import LoadReport
from octavo.server.models.model_names import served_name
from octavo.server.protocols.answering import start_schema_threads
from octavo.server.server_state import ServerState
from octavo.server.startup import build_state


@asynccontextmanager
async def line_engine(
    model: str, config: EngineConfig, report: LoadReport
) -> AsyncIterator[tuple[Call, Callable[[], int]]]:
    """Load a model. Yield the call that answers a line, and a function that returns the number of lines to run at once.

    model: the model's name as given; lines may use it
    config: contains the path of the model's files

    Raises the same errors as loading.
    """
    logging.getLogger("octavo.access").setLevel(logging.WARNING)
    start_schema_threads()
    state = build_state(ServerConfig(), {served_name(model): config}, report)
    app = create_app(state)
    try:
        await state.models.load(None)
        async with state.models.use(None) as served:
            num_rows = served.info.max_num_seqs

            async def call(line: BatchLine) -> LineAnswer:
                body = json.dumps(with_seed(line, line.custom_id)).encode()
                name = f"req-{secrets.token_hex(12)}"
                return await post(app, line.url, body, caller=BatchCaller("", 0), request_id=name)

            yield call, lambda: num_rows + SPARE_LINES
    finally:
        await _close(state)


async def _close(state: ServerState) -> None:
    await state.sleeper.close()
    await state.responses.close()
    await state.models.close()
