"""The request bodies of batches, and the upload form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import python_multipart
from pydantic import Field
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from octavo.batches.lines import ENDPOINTS
from octavo.batches.store import MAX_FILE_BYTES, StoredBatch, new_batch
from octavo.server.config import parse_duration
from octavo.server.errors import ApiError, bad_request, refuse
from octavo.server.http.json_body import RequestModel, Text

_MIN_KEPT_S, _MAX_KEPT_S = 3600, 30 * 24 * 3600
_MAX_WINDOW_S = 7 * 24 * 3600.0
_MAX_FIELD_BYTES = 4096
_MAX_FORM_BYTES = 1 << 20  # besides the file
_CHUNK_S = 30.0  # maximum pause of an upload


class Expiry(RequestModel):
    """When a file expires.

    seconds: time after its creation
    """

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_MIN_KEPT_S, le=_MAX_KEPT_S)]


class BatchRequest(RequestModel):
    """A request to create a batch.

    completion_window: `24h`, or another time up to seven days
    """

    input_file_id: Text
    endpoint: Text
    completion_window: Text = "24h"
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: Expiry | None = None

    def to_batch(self, owner: str) -> StoredBatch:
        """Return the new batch. Raises UsageError."""
        if self.endpoint not in ENDPOINTS:
            raise refuse("endpoint", f"is {self.endpoint!r:.80}; it must be one of {', '.join(ENDPOINTS)}")
        for name, value in (self.metadata or {}).items():
            if len(name) > 64 or len(value) > 512:
                raise refuse("metadata", f"{name!r:.40} is too long: a name may have 64 characters, a value 512")
        seconds = self._window_s()
        batch = new_batch(
            owner,
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            metadata=self.metadata,
            output_expires_s=None if self.output_expires_after is None else self.output_expires_after.seconds,
        )
        batch.times["expires_at"] = int(time.time() + seconds)
        return batch

    def _window_s(self) -> float:
        text = self.completion_window
        if text.endswith("d") and text[:-1].isdecimal():
            seconds = 86400.0 * int(text[:-1]) if len(text) < 4 else 0.0
        else:
            seconds = parse_duration("completion_window", text)
        if not 60.0 <= seconds <= _MAX_WINDOW_S:
            raise refuse("completion_window", f"is {self.completion_window!r:.20}; it must be from 1m to 7d")
        return seconds


class Upload:
    """An uploaded form with a file, which is written to disk as it arrives.

    fields: the form's other fields, by name
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._max_bytes = max_bytes
        self.filename = ""
        self.fields: dict[str, str] = {}
        self._path = path
        self._file: Any = None
        self._has_file = False
        self._name = ""
        self._value = b""
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._size = 0

    async def receive(self, request: Request) -> None:
        """Read the whole form. If this raises ApiError or UsageError, the caller has to remove the file from disk."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            message = "the content type must be multipart/form-data, with a file and a purpose"
            raise ApiError(415, message, code="unsupported_content_type")
        if int(request.headers.get("content-length", "0")) > self._max_bytes + _MAX_FORM_BYTES:
            raise self._too_large()
        parser = python_multipart.MultipartParser(options[b"boundary"], self._callbacks())
        try:
            num_bytes = 0
            async for chunk in _chunks(request):
                num_bytes += len(chunk)
                if num_bytes > self._max_bytes + _MAX_FORM_BYTES:
                    raise self._too_large()
                await anyio.to_thread.run_sync(parser.write, chunk)
            parser.finalize()
        except python_multipart.exceptions.FormParserError as error:
            raise bad_request(f"the form cannot be read: {error}", code="invalid_form") from None
        finally:
            if self._file is not None:
                self._file.close()
        if not self._has_file:
            raise bad_request("the form has no file", "file", "missing_required_parameter")

    def _too_large(self) -> ApiError:
        message = f"the file is larger than {self._max_bytes} bytes; split it into several"
        return ApiError(413, message, code="request_too_large")

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._name, self._value, self._header = "", b"", (b"", b"")

    def _add_header(self, part: int, data: bytes) -> None:
        name, value = self._header
        self._header = (name + data, value) if part == 0 else (name, value + data)
        if len(self._header[0]) + len(self._header[1]) > _MAX_FIELD_BYTES:
            raise bad_request("a header of the form is too long", code="invalid_form")

    def _end_header(self) -> None:
        (name, value), self._header = self._header, (b"", b"")
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self._has_file:
                raise bad_request("the form has several files; send one", "file")
            self._has_file = True
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:256]
            self._file = self._path.open("wb")
        elif len(self.fields) >= 8:
            raise bad_request("the form has too many fields", code="invalid_form")

    def _add(self, data: bytes) -> None:
        if self._name == "file":
            self._size += len(data)
            if self._size > self._max_bytes:
                raise self._too_large()
            self._file.write(data)
            return
        self._value += data
        if len(self._value) > _MAX_FIELD_BYTES:
            raise bad_request(f"the field {self._name!r:.40} is too long", self._name[:40])

    def _end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises ApiError if it pauses for too long."""
    stream = request.stream()
    while True:
        with anyio.move_on_after(_CHUNK_S) as waiting:
            chunk = await anext(stream, None)
        if waiting.cancelled_caught:
            raise ApiError(408, "the file did not arrive in time", code="request_timeout")
        if chunk is None:
            return
        yield chunk


def kept_s(fields: dict[str, str], default: int | None) -> int | None:
    """Return the seconds after which an uploaded file expires. Raises ApiError."""
    anchor = fields.get("expires_after[anchor]", fields.get("expires_after.anchor"))
    text = fields.get("expires_after[seconds]", fields.get("expires_after.seconds"))
    if text is None and anchor is None:
        return default
    if anchor != "created_at" or text is None or not text.isdecimal() or len(text) > 9:
        raise bad_request("expires_after needs the anchor created_at and a number of seconds", "expires_after")
    if not _MIN_KEPT_S <= int(text) <= _MAX_KEPT_S:
        message = f"expires_after.seconds is {text}; it must be from {_MIN_KEPT_S} to {_MAX_KEPT_S}"
        raise bad_request(message, "expires_after")
    return int(text)
