"""What a server is started with. Flags and documentation are made from these fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


def _option(default: Any, help: str) -> Any:  # noqa: A002 - the word that command line parsers use
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve. Every field is checked when the object is made; a wrong one raises UsageError."""

    host: str = _option("127.0.0.1", "address to listen on; anything but loopback needs --api-key")
    port: int = _option(8000, "port to listen on; 0: any free one")
    api_key: tuple[str, ...] = _option((), "key that every request must carry; may be given several times")
    api_key_file: str | None = _option(None, "file with one key a line")
    allow_unauthenticated: bool = _option(False, "listen beyond loopback without a key")
    protect_health: bool = _option(False, "ask for the key on the health routes too")
    ssl_certfile: str | None = _option(None, "certificate chain, PEM: serve https")
    ssl_keyfile: str | None = _option(None, "private key of the certificate, PEM")
    cors_origin: tuple[str, ...] = _option((), "web origin that browsers may call from; may be given several times")
    max_queue: int = _option(128, "most sequences that wait beside those that run; above it requests get 503")
    max_queued_tokens: int | None = _option(None, "most prompt tokens that wait; default: eight contexts")
    queue_timeout: float = _option(60.0, "longest wait for the first token's computation to begin, in seconds")
    request_timeout: float = _option(600.0, "longest run of a request, in seconds")
    max_body_bytes: int = _option(8 << 20, "largest request body")
    max_connections: int = _option(1000, "most connections at once")
    header_timeout: float = _option(10.0, "longest time to send a request's headers, in seconds")
    body_timeout: float = _option(30.0, "longest pause while a request's body is sent, in seconds")
    write_timeout: float = _option(30.0, "longest time that a client may leave a stream unread, in seconds")
    keep_alive: float = _option(5.0, "pause after which a silent stream gets a comment, in seconds")
    drain: float = _option(30.0, "time for running requests to finish after SIGTERM, in seconds")
    stall_timeout: float = _option(30.0, "an engine that makes no step for so long is restarted, in seconds")
    in_process: bool = _option(False, "run the engine in the server's own process, for debugging")
    models_memory: str | None = _option(None, "memory for all loaded models, such as '16GiB'; unloads the least used")
    metrics_prefix: str = _option("vllm", "prefix of the metrics' names")
    log_json: bool = _option(False, "write the log as JSON, one object a line")
    otlp_endpoint: str | None = _option(None, "send traces to this OTLP/HTTP endpoint (needs octavo[otel])")
