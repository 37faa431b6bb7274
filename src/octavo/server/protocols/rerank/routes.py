"""`/v1/rerank` in Jina's and Cohere's format, and `/v1/score` in vLLM's format: how well texts answer a query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.texts.scoring import ScorePlan, pairs_of, plan_scores, score_options
from octavo.errors import UsageError
from octavo.server.errors import refuse
from octavo.server.generation.prompt import in_thread
from octavo.server.generation.running import PROMPTS_AT_ONCE, compute_vectors
from octavo.server.generation.spec import read_options
from octavo.server.http.access_log import record_of
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answer_schemas import RERANK, SCORE, whole_answer
from octavo.server.protocols.answering import name_ignored, tenant_of
from octavo.server.protocols.rerank.errors import SCORES
from octavo.server.protocols.rerank.request import RerankRequest, ScoreRequest
from octavo.server.server_state import state_of

router = SCORES.router()


@router.post("/rerank", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)  # llama.cpp's names
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/v2/rerank", responses=whole_answer(RERANK))
@router.post("/v1/rerank", responses=whole_answer(RERANK))
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Return the documents ordered by score, best first. Equal scores keep the order of the request."""
    documents = [item if isinstance(item, str) else item.text for item in body.documents]
    async with state_of(request).models.use(body.model) as model:
        scores, head = await run_unless_gone(request, _score(request, body, model, body.query, documents))
    order = sorted(range(len(documents)), key=lambda i: -scores[i])[: body.top_n]
    shown = body.return_documents is not False
    results = [
        {"index": i, "relevance_score": scores[i], **({"document": {"text": documents[i]}} if shown else {})}
        for i in order
    ]
    return name_ignored(body.find_ignored(), record_of(request), JSONResponse({**head, "results": results}))


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", responses=whole_answer(SCORE))
async def score(request: Request, body: ScoreRequest) -> Response:
    """Return the score of each pair, in the order of the request."""
    async with state_of(request).models.use(body.model) as model:
        scores, head = await run_unless_gone(request, _score(request, body, model, body.text_1, body.text_2))
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    content = {**head, "object": "list", "created": int(time.time()), "data": data}
    return name_ignored(body.find_ignored(), record_of(request), JSONResponse(content))


async def _score(
    request: Request,
    body: RerankRequest | ScoreRequest,
    model: ServedModel,
    first: str | Sequence[str],
    second: str | Sequence[str],
) -> tuple[list[float], dict[str, Any]]:
    """Return the scores, and the part of the answer that both formats share."""
    limit = getattr(body, "max_tokens_per_doc", None)
    if limit is not None and body.truncate_prompt_tokens is not None:
        raise refuse("max_tokens_per_doc", "is another name of truncate_prompt_tokens; give one of them")
    truncate_to = body.truncate_prompt_tokens if limit is None else limit
    record = record_of(request)
    record.model = model.name
    pairs = _pairs(body, first, second)
    admission = state_of(request).admission
    num_sequences = min(len(pairs), PROMPTS_AT_ONCE)
    ticket = admission.admit(model, record.request_id, num_sequences=num_sequences, tenant=tenant_of(request))
    try:
        plan = await ticket.wait(partial(_plan, model, pairs, truncate_to, body.instruction))
        record.num_prompt_tokens = plan.num_tokens
        ticket.add_prompt_tokens(plan.num_tokens)
        vectors = await compute_vectors(ticket, model, plan.prompts, read_options(body))
    finally:
        ticket.release()
    usage = {"prompt_tokens": plan.num_tokens, "total_tokens": plan.num_tokens}
    if truncate_to is not None:
        usage["truncated_tokens"] = plan.num_truncated
    return plan.scores(vectors), {"id": record.request_id, "model": model.name, "usage": usage}


def _pairs(
    body: RerankRequest | ScoreRequest, first: str | Sequence[str], second: str | Sequence[str]
) -> list[tuple[str, str]]:
    try:
        return pairs_of(first, second)
    except UsageError as error:
        names = {"data_1": "text_1", "data_2": "text_2"} if isinstance(body, ScoreRequest) else {}
        text = str(error)
        for ours, theirs in names.items():
            text = text.replace(ours, theirs)
        raise UsageError(text, param=names.get(error.param or "", error.param), code=error.code) from None


async def _plan(
    model: ServedModel, pairs: Sequence[tuple[str, str]], truncate_to: int | None, instruction: str | None
) -> ScorePlan:
    """Plan the scoring in a thread, because tokenizing takes a while and other requests must go on."""
    options = score_options(truncate_to, instruction)
    limit = model.info.max_model_len
    num_chars = sum(len(second) for _, second in pairs) + len(pairs[0][0])
    return await in_thread(num_chars, partial(plan_scores, model.info.texts, model.tokenizer, pairs, limit, options))
