"""Run a model inside your own FastAPI application and stream its answers.

    MODEL=smollm2 uvicorn --app-dir examples fastapi_app:app
    curl -N 'http://127.0.0.1:8000/ask?question=Why+is+the+sky+blue'

FastAPI and uvicorn are installed with Octavo.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from octavo import AsyncLLM, RequestOutputKind, SamplingParams


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncLLM(os.environ.get("MODEL", "smollm2")) as llm:
        app.state.llm = llm
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(request: Request, question: str, max_tokens: int = 64) -> StreamingResponse:
    """Stream the answer as plain text. If the client disconnects, the request ends."""
    llm: AsyncLLM = request.app.state.llm
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)

    async def pieces() -> AsyncIterator[str]:
        async for delta in llm.chat(question, params):
            yield delta.outputs[0].text

    return StreamingResponse(pieces(), media_type="text/plain")
