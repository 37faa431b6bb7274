"""The access log, with one line per request and without prompts or keys, and the formats of the server's log."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

MAX_CLIENT_CHARS = 256
MAX_LINE_CHARS = 4096

_UNNAMED = ("id", "method", "path", "status")  # the fields at the start of a log line
_QUIET_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/dashboard/data"})

_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:@+=-]{1,128}")

logger = logging.getLogger("octavo.access")


@dataclass(slots=True)
class AccessRecord:
    """The data for a request's line in the log. Endpoints set their figures in `request.state.access`."""

    request_id: str
    method: str
    path: str
    route: str | None = None  # the path's pattern, or None if no route matches
    client: str = ""
    client_request_id: str = ""  # the client's own id, if it differs
    status: int = 0
    model: str | None = None
    is_chat: bool = False
    batch_priority: int | None = None  # for a line of a batch, which takes no place in the queue
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None
    ttft_s: float | None = None
    began_s: float = field(default_factory=time.monotonic)
    duration_s: float = 0.0
    error_code: str | None = None
    is_abandoned: bool = False  # the client left before the end of a stream

    def log(self) -> None:
        """Write the line. Probes arrive every few seconds, so their lines are written only at debug level."""
        is_routine = self.path in _QUIET_PATHS and (self.status < 400 or self.status == 503)
        level = logging.DEBUG if is_routine else logging.INFO
        if not logger.isEnabledFor(level):
            return
        known: dict[str, str | int | float | None] = {
            "id": self.request_id,
            "method": printable(self.method),
            "path": printable(self.path),
            "status": self.status,
            "seconds": round(self.duration_s, 4),
            "ttft": None if self.ttft_s is None else round(self.ttft_s, 4),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": self.num_completion_tokens,
            "model": None if self.model is None else printable(self.model),
            "error": self.error_code,
            "abandoned": "true" if self.is_abandoned else None,
            "client": self.client or None,
            "client_id": printable(self.client_request_id) or None,
        }
        fields = {name: value for name, value in known.items() if value is not None}
        words = (str(value) if name in _UNNAMED else f"{name}={value}" for name, value in fields.items())
        logger.log(level, "%s", " ".join(words), extra={"fields": fields})


def new_request_id() -> str:
    """Return a new id for the answer's header and the log."""
    return f"req-{secrets.token_hex(12)}"


def accepted_request_id(given: Sequence[str]) -> str:
    """Return the client's request id if it sent one that is fit for a header, a path and a log line, else a new id.

    given: the values of all its `X-Request-Id` headers
    """
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else new_request_id()


def record_of(request: Request) -> AccessRecord:
    """Return the record of a request that has passed the guard."""
    return cast(AccessRecord, request.state.access)


def printable(text: str) -> str:
    """Make a client's string safe for a log line: bounded, without spaces, control or non-ASCII characters."""
    if len(text) > MAX_CLIENT_CHARS:
        text = text[: MAX_CLIENT_CHARS - 3] + "..."
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(char if "!" <= char <= "~" else ascii(char)[1:-1] if char != " " else "\\x20" for char in text)


def _one_line(text: str) -> str:
    """Remove control characters and line breaks from the text, and cut it to a maximum length."""
    text = text[:MAX_LINE_CHARS]
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class LineFormatter(logging.Formatter):
    """The log format for people: time, level, logger and message on one line, with an indented traceback below.

    Message and traceback may contain a client's text. It is put on one line or indented, so that it cannot look like
    another line of the log.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = _one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return "\n".join(f"  {_one_line(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """The log format for machines: one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "fields", {"message": record.getMessage()}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(*, as_json: bool, level: int = logging.INFO) -> None:
    """Send the logs of `octavo` and of the web server to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    for name in ("octavo", "uvicorn"):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.propagate = False
        target.setLevel(level)
    # uvicorn's access lines and startup messages contain nothing that ours do not.
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))
    # Warns about every write to a client that has disconnected.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
