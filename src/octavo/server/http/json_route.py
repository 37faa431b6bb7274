"""Routes whose body is one JSON object. It is parsed and validated, on another thread if it is large."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.body_limits import BodyLimits
from octavo.server.http.json_body import parse_object, to_bad_request

# A smaller body is parsed and validated within a millisecond or two, and using a thread would be slower.
INLINE_BYTES = 1 << 12
_HUGE_BYTES = 1 << 18

# Several huge bodies at once would compete with the event loop, which would have to wait for all of them.
_HUGE_BODIES = CapacityLimiter(1)


class JsonRoute(APIRoute):
    """A route whose body is one JSON object. It stores `has_large_body` in the request's state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The guard has checked the content type, which some clients may leave out.
        super().__init__(*args, **{**kwargs, "strict_content_type": False})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            # It is JSON whatever type the client sent. FastAPI would not pass on the body of a form.
            headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            strict = _ParsedRequest({**request.scope, "headers": headers}, request.receive)
            state = request.scope["state"]
            body = state.pop("body")  # so that its memory can be freed
            if self.body_field is not None and not self.body_field.field_info.is_required() and not body.strip():
                body = b"{}"
            state["has_large_body"] = is_large = len(body) > INLINE_BYTES
            if is_large:
                limiter = _HUGE_BODIES if len(body) > _HUGE_BYTES else None
                strict.parsed = await run_sync(self._read, body, limiter=limiter)
            else:
                strict.parsed = parse_object(body)
            del body
            return await handler(strict)

        return handle

    @cached_property
    def _model(self) -> type[BaseModel]:
        assert self.body_field is not None
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        return model

    @cached_property
    def _limits(self) -> BodyLimits:
        return BodyLimits.of_model(self._model)

    def _read(self, body: bytes) -> BaseModel:
        """Return the validated body."""
        from octavo.server.http.json_pieces import parse_large_object  # here because it loads the native library

        parsed = parse_large_object(body, self._limits)
        try:
            return self._model.model_validate(parsed)
        except ValidationError as error:
            found = error.errors(include_url=False)
        raise to_bad_request(found, parsed)


class _ParsedRequest(Request):
    """A request whose body is already parsed, because FastAPI hides the errors of its own parsing."""

    parsed: dict[str, Any] | BaseModel

    async def json(self) -> Any:
        return self.parsed

    async def body(self) -> bytes:
        return b"parsed"
