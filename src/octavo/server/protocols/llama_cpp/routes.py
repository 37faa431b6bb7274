"""Routes of llama.cpp's server: `/completion`, `/infill`, `/apply-template`, `/props` and `/slots`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from anyio.to_thread import run_sync
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.engine.client import ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.errors import OverloadedError
from octavo.generation_request import RequestOptions
from octavo.sampling_params import SamplingParams
from octavo.server.generation.prompt import render_conversation
from octavo.server.generation.spec import ChatSpec
from octavo.server.http.json_body import Text
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.models.model_manager import ModelEntry
from octavo.server.protocols.answer_schemas import (
    LLAMA_COMPLETION,
    LLAMA_PROPS,
    LLAMA_SLOTS,
    streamed_answer,
    whole_answer,
)
from octavo.server.protocols.answering import answer, read_spec
from octavo.server.protocols.conversation import chat_tools
from octavo.server.protocols.llama_cpp.answer import LlamaWriter, generation_settings
from octavo.server.protocols.llama_cpp.errors import LLAMA_CPP
from octavo.server.protocols.llama_cpp.request import (
    FIELD_NAMES,
    MEDIA_MARKER,
    CompletionRequest,
    InfillRequest,
    LlamaRequest,
    named_texts,
    with_tokens,
)
from octavo.server.protocols.openai.chat_request import MAX_MESSAGES, Message, TemplateFields, Tools, chat_messages
from octavo.server.server_state import state_of

B = TypeVar("B", bound=LlamaRequest)

router = LLAMA_CPP.router(FIELD_NAMES)
IMAGE_PATHS = (
    "/completion",
    "/apply-template",
)


class TemplateRequest(TemplateFields):
    """A conversation to render."""

    model: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None

    def to_spec(self) -> ChatSpec:
        """Return the conversation. Raises UsageError for fields that cannot be rendered."""
        return ChatSpec(
            params=SamplingParams(),
            messages=chat_messages(self.messages),
            tools=chat_tools([tool.function.model_dump() for tool in self.tools or ()], "auto"),
            template_arguments=self.template_arguments(self.messages),
        )


@router.post("/completion", responses=streamed_answer(LLAMA_COMPLETION))
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more texts, with server-sent events if `stream` is set."""
    return await answer(request, await _with_token_bias(request, body), LlamaWriter)


@router.post("/infill", responses=streamed_answer(LLAMA_COMPLETION))
async def infill(request: Request, body: InfillRequest) -> Response:
    """Fill the gap between two texts, with models that were trained for it."""
    return await answer(request, await _with_token_bias(request, body), LlamaWriter)


@router.post("/apply-template")
async def apply_template(request: Request, body: TemplateRequest) -> dict[str, str]:
    """Return the text that the chat template renders for a conversation."""
    spec = await run_unless_gone(request, read_spec(request, body.to_spec))
    async with state_of(request).models.use(body.model) as model:
        return {"prompt": await run_unless_gone(request, render_conversation(model, spec))}


@router.get("/props", responses=whole_answer(LLAMA_PROPS))
async def get_props(request: Request, model: str | None = None) -> Response:
    """Return facts about a model, by default the first one, and its default sampling parameters.

    This does not wake a sleeping model.
    """
    entry = await _known_entry(request, model)
    info, texts = entry.info, entry.texts
    assert info is not None
    assert texts is not None
    params = SamplingParams(max_tokens=None).with_defaults(info.sampling_defaults.values)
    settings = generation_settings(params, RequestOptions(), info)
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": info.max_model_len, "params": settings},
            "total_slots": info.max_num_seqs,
            "model_alias": entry.name,
            "model_path": info.path,
            "modalities": {"vision": info.images is not None, "audio": False},
            "media_marker": MEDIA_MARKER,
            "chat_template": texts.chat_template or "",
            "bos_token": texts.bos_token,
            "eos_token": texts.eos_token,
            "build_info": f"octavo {__version__}",
            "is_sleeping": entry.is_sleeping,
            "speculation": _speculation(entry, info),
        }
    )


def _speculation(entry: ModelEntry, info: ModelInfo) -> dict[str, Any]:
    """Return the sources of drafts in use, the maximum number of drafts, and the reason if some or all sources are
    missing.
    """
    metrics = EngineMetrics() if entry.model is None else entry.model.client.status().metrics
    in_use = info.drafts_in_use(metrics)
    failed = "" if all(in_use.values()) else "the draft model has failed; see the log"
    return {
        "sources": [name for name, is_used in in_use.items() if is_used],
        "max_drafts": info.max_drafts,
        "reason": failed or info.no_drafts,
    }


@router.get("/slots", responses=whole_answer(LLAMA_SLOTS))
async def get_slots(request: Request, model: str | None = None, fail_on_no_slot: int | None = None) -> Response:
    """Return a slot for each sequence that can run at once. The engine has no fixed slots, so the first slots are
    listed as busy, one for each running sequence.
    """
    entry = await _known_entry(request, model)
    info, served = entry.info, entry.model
    assert info is not None
    drafts = bool(info.draft_sources)
    num_running = 0 if served is None or entry.is_sleeping else served.client.status().metrics.num_running
    if fail_on_no_slot and num_running >= info.max_num_seqs:
        raise OverloadedError("no slot is free", code="server_overloaded", retry_after_s=1.0)
    return JSONResponse(
        [
            {"id": i, "n_ctx": info.max_model_len, "speculative": drafts, "is_processing": i < num_running}
            for i in range(info.max_num_seqs)
        ]
    )


async def _known_entry(request: Request, name: str | None) -> ModelEntry:
    """Return the model. It is loaded only if it has never been loaded before. Otherwise its properties are already
    known, and it need not be in memory.
    """
    models = state_of(request).models
    entry = models.entry(name)
    if entry.info is None:
        async with models.use(entry.name):
            pass
    return entry


async def _with_token_bias(request: Request, body: B) -> B:
    """Return the body with the texts in its bias replaced by token ids."""
    texts = named_texts(body.logit_bias)
    if not texts:
        return body
    async with state_of(request).models.use(body.model) as model:
        encode = model.tokenizer.encode
        ids = await run_sync(lambda: {text: encode(text, add_special_tokens=False) for text in texts})
    changed: B = body.model_copy(update={"logit_bias": with_tokens(body.logit_bias, ids)})
    return changed
