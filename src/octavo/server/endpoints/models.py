"""`/v1/models`: which models there are, what one request may use of them, and loading them by hand."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from octavo.server.model_manager import ModelStatus
from octavo.server.state import state_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models, loaded or not."""
    return {"object": "list", "data": [_card(status) for status in state_of(request).models.statuses()]}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """One model."""
    return _card(state_of(request).models.status(model_id))


@router.post("/v1/models/{model_id:path}/load")
async def load_model(request: Request, model_id: str) -> dict[str, Any]:
    """Loads a model, after unloading others if there is no room; answers when it is ready."""
    models = state_of(request).models
    await models.load(model_id)
    return _card(models.status(model_id))


@router.post("/v1/models/{model_id:path}/unload")
async def unload_model(request: Request, model_id: str) -> dict[str, Any]:
    """Unloads a model after its running requests; the next request for it loads it again."""
    models = state_of(request).models
    await models.unload(model_id)
    return _card(models.status(model_id))


def _card(status: ModelStatus) -> dict[str, Any]:
    """OpenAI's fields, and what else is worth knowing. Sizes in bytes; null where it shows only once it was loaded."""
    info = status.info
    template = status.model.tokenizer.chat_template if status.model is not None else None
    memory = None
    if info is not None:
        memory = {
            "weight_bytes": info.weight_bytes,
            "kv_cache_bytes": info.num_blocks * info.block_size * info.kv_bytes_per_token,
            "workspace_bytes": info.workspace_bytes,
        }
    tool_format = status.model.tool_format if status.model is not None else None
    return {
        "id": status.name,
        "object": "model",
        "created": status.created,
        "owned_by": "octavo",
        "root": status.spec.engine.model,
        "parent": None,
        "max_model_len": info.max_model_len if info is not None else None,
        "state": status.state,
        "reason": str(status.last_error) if status.last_error is not None else None,
        "architecture": info.architecture if info is not None else None,
        "memory": memory,
        "max_num_seqs": status.spec.engine.max_num_seqs,
        "has_chat_template": template is not None if status.model is not None else None,
        "tool_format": tool_format.name if tool_format is not None else None,
    }
