"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.errors import ModelLoadError, UsageError
from octavo.server.http.json_body import Int, RequestModel, Text, quote
from octavo.server.http.json_route import JsonRoute
from octavo.server.models.served_adapters import AdapterGiven
from octavo.server.protocols.answering import tenant_of
from octavo.server.server_state import check_may_change_adapters, state_of

router = APIRouter(route_class=JsonRoute, tags=["Models"])

_Name = Annotated[Text, Field(min_length=1, max_length=256)]


class LoadRequest(RequestModel):
    """Body of a request to load an adapter.

    lora_path: a path on the server, a hub id, or a name in `--lora-dir`
    load_inplace: replace an adapter of the same name
    base_model_name: the adapter's model, if the server has several
    """

    lora_name: _Name
    lora_path: Annotated[Text, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None
    base_model_name: Text | None = None


class UnloadRequest(RequestModel):
    """Body of a request to unload an adapter.

    lora_int_id: ignored
    """

    lora_name: _Name
    lora_int_id: Int | None = None


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(request: Request, body: LoadRequest) -> Response:
    """Load an adapter. Requests can then use its name as their model name. Answers when the adapter is ready."""
    models, is_admin = state_of(request).models, check_may_change_adapters(request)
    if not is_admin:
        models.adapters.check_inside(body.lora_path)
    given = AdapterGiven(body.lora_name, body.lora_path, body.base_model_name)
    owner = None if is_admin else tenant_of(request)
    try:
        await models.load_adapter(given, owner, replaces=bool(body.load_inplace))
    except ModelLoadError as error:
        raise UsageError(str(error), param="lora_path", code="invalid_value") from error
    return PlainTextResponse(f"Success: LoRA adapter {quote(body.lora_name)} added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(request: Request, body: UnloadRequest) -> Response:
    """Remove an adapter. Running requests keep it; later requests can no longer use it."""
    adapters, is_admin = state_of(request).models.adapters, check_may_change_adapters(request)
    if not is_admin and (owner := tenant_of(request)):  # without keys, all clients are the same tenant
        adapters.check_owner(body.lora_name, owner)
    await state_of(request).models.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {quote(body.lora_name)} removed successfully.")
