"""llama.cpp's `/lora-adapters`: the adapters and their scales in requests that name the model itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.errors import ApiError
from octavo.server.http.json_body import parse_value, to_bad_request
from octavo.server.protocols.answer_schemas import LLAMA_ADAPTERS, whole_answer
from octavo.server.protocols.llama_cpp.errors import LLAMA_CPP
from octavo.server.protocols.llama_cpp.request import AdapterScale
from octavo.server.server_state import check_may_change_adapters, state_of

router = LLAMA_CPP.router()

_MAX_SCALES = 1 << 10
_MAX_BYTES = 1 << 17
_SCALES = TypeAdapter(Annotated[list[AdapterScale], Field(max_length=_MAX_SCALES)])


@router.get("/lora-adapters", responses=whole_answer(LLAMA_ADAPTERS))
async def list_adapters(request: Request) -> Response:
    """List all adapters with their numbers.

    scale: the adapter's scale in requests that name the model itself
    """
    adapters = state_of(request).models.adapters
    found: list[dict[str, Any]] = [
        {
            "id": adapter.number,
            "path": adapter.source,
            "name": adapter.name,
            "scale": adapters.scale_of(adapter),
            "task_name": "",
            "prompt_prefix": "",
        }
        for adapter in adapters.entries
    ]
    return JSONResponse(found)


@router.post("/lora-adapters", responses=whole_answer(LLAMA_ADAPTERS))
async def set_scales(request: Request) -> Response:
    """Set these scales, and 0 for all other adapters. At most one adapter of a model may have a nonzero scale."""
    check_may_change_adapters(request)
    body = request.state.body
    if len(body) > _MAX_BYTES:
        message = f"the body has {len(body)} bytes; at most {_MAX_BYTES} are read: send at most {_MAX_SCALES} adapters"
        raise ApiError(413, message, code="request_too_large")
    given = parse_value(body)
    try:
        scales = _SCALES.validate_python(given, strict=True)
    except ValidationError as error:
        raise to_bad_request(error.errors(include_url=False), given) from None
    state_of(request).models.adapters.apply([(each.id, each.scale) for each in scales])
    return await list_adapters(request)
