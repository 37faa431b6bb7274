"""Options of the server. Flags and documentation are generated from these fields."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from octavo.config import check_integer, option, parse_bytes
from octavo.errors import UsageError

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s|m|h)?", re.ASCII)
_SECONDS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_ORIGIN = re.compile(r"https?://[^/\s]+|\*|localhost")
_DOMAIN = re.compile(r"(?:https?://)?(?:\*|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)")
_MAX_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of a server. Fields are checked on construction; an invalid value raises UsageError."""

    host: str = option("127.0.0.1", "address to listen on; anything but loopback needs --api-key")
    port: int = option(8000, "port to listen on; 0: any free port")
    api_key: tuple[str, ...] = option(
        (),
        "API key that requests must send; may be repeated. "
        "Other users of this machine can see it in the process list; --api-key-file hides it",
    )
    api_key_file: str | None = option(None, "file of API keys, one per line")
    allow_unauthenticated: bool = option(False, "allow listening beyond loopback without an API key")
    protect_health: bool = option(False, "require the API key on the health routes too")
    ssl_certfile: str | None = option(None, "certificate chain in PEM format, to serve https")
    ssl_keyfile: str | None = option(None, "private key of the certificate in PEM format")
    cors_origin: tuple[str, ...] = option(
        (),
        "web origin whose pages may call the server; localhost: any page on this machine; "
        "*: any page; separate several with commas, or repeat the option",
    )
    alias: tuple[str, ...] = option(
        (),
        "additional names for the model in requests, separated by commas; the first is its id if it has no NAME. "
        "With several models, write NAME=ALIAS. May be repeated",
    )
    admin_key: tuple[str, ...] = option(
        (), "API key that may also load and unload adapters; may be repeated. --admin-key-file hides it"
    )
    admin_key_file: str | None = option(None, "file of admin keys, one per line")
    lora_dir: str | None = option(
        None, "folder of adapters that requests can use as model names without loading them first"
    )
    allow_runtime_lora: bool = option(
        False, "let any client load and unload adapters; with --lora-dir, only those in it, except with an admin key"
    )
    lora_quota: int = option(8, "maximum number of adapters that an API key may load at run time")
    lora_quota_bytes: str = option("1GiB", "maximum total size of the files of those adapters")
    max_queue: int = option(128, "maximum waiting sequences, not counting running ones; further requests get 503")
    max_queued_tokens: int | None = option(None, "maximum prompt tokens in the queue; default: eight contexts")
    queue_timeout: float = option(60.0, "maximum time in the queue")
    request_timeout: float = option(600.0, "maximum time of a request")
    max_body_bytes: int | None = option(
        None, "maximum size of a request body; default: 8 MiB, or 64 MiB on routes that take images for a vision model"
    )
    max_image_pixels: int = option(50_000_000, "maximum pixels of an image file, before any scaling")
    max_items_per_request: int = option(16, "maximum number of images, documents and videos in a request")
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "domain from which images may be fetched over https, or over http if written as http://DOMAIN; *: any "
        "public domain; separate several with commas, or repeat the option. Default: none",
    )
    allowed_local_media_path: str | None = option(
        None, "folder of images, documents and videos that requests may use as file:// URLs"
    )
    max_connections: int = option(1000, "maximum number of connections")
    header_timeout: float = option(10.0, "maximum time for a client to send the headers")
    body_timeout: float = option(30.0, "maximum pause while a client sends the body")
    write_timeout: float = option(30.0, "maximum time for a client to leave a stream unread")
    keep_alive: float = option(5.0, "interval between keep-alive comments in a silent stream")
    drain: float = option(30.0, "time for running requests to finish after SIGTERM")
    stall_timeout: float = option(30.0, "restart an engine that has completed no step for this long")
    in_process: bool = option(False, "run the engine in the server's own process, for debugging")
    models_memory: str | None = option(
        None, "memory for all loaded models, such as '16GiB'; idle models are unloaded; default: the free memory"
    )
    sleep_after: float = option(
        0.0, "unload models after this long without a request; the next request reloads its model; 0: never"
    )
    sleep_level: int = option(
        2, "depth of --sleep-after: 1 keeps the weights in main memory and frees GPU memory; 2 frees everything"
    )
    response_store: str | None = option(
        None, "SQLite file that stores the responses of /v1/responses; default: in memory"
    )
    closed_objects: bool = option(
        False,
        "allow only the properties named in the schema in objects of structured answers and tool calls, unless it says "
        "otherwise; closed_objects in a request takes precedence",
    )
    batch_store: str | None = option(
        None, "folder that stores the files and batches of /v1/files and /v1/batches; default: lost at shutdown"
    )
    slot_save_path: str | None = option(
        None, "folder for the prompts that POST /slots/{id}?action=save saves and action=restore loads"
    )
    metrics_prefix: str = option("vllm", "prefix of the metric names")
    log_json: bool = option(False, "write the log as JSON, one object per line")
    otlp_endpoint: str | None = option(None, "send traces to this OTLP/HTTP endpoint (needs octavo[otel])")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), field.default)
        check_integer("port", self.port, 0, 65535)
        check_integer("max_queue", self.max_queue, 0, 1_000_000)
        check_integer("lora_quota", self.lora_quota, 0, 1 << 20)
        parse_bytes("lora_quota_bytes", self.lora_quota_bytes)
        check_integer("sleep_level", self.sleep_level, 1, 2)
        if self.max_body_bytes is not None:
            check_integer("max_body_bytes", self.max_body_bytes, 1, 1 << 31)
        check_integer("max_image_pixels", self.max_image_pixels, 1, 1 << 28)
        check_integer("max_items_per_request", self.max_items_per_request, 0, 1024)
        domains = tuple(name.strip().lower() for text in self.allowed_media_domains for name in text.split(","))
        object.__setattr__(self, "allowed_media_domains", domains)
        for domain in domains:
            if not _DOMAIN.fullmatch(domain):
                raise UsageError(f"allowed_media_domains is {domain!r}; write example.com, http://example.com or *")
        check_integer("max_connections", self.max_connections, 1, 1_000_000)
        if self.max_queued_tokens is not None:
            check_integer("max_queued_tokens", self.max_queued_tokens, 1, 1 << 40)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("ssl_keyfile is given without ssl_certfile; https needs both, or one file with both")
        origins = tuple(origin.strip() for text in self.cors_origin for origin in text.split(","))
        object.__setattr__(self, "cors_origin", origins)
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"cors_origin is {origin!r}; write it as https://example.com, or localhost for the pages of this "
                    "machine, or * for all"
                )
        for text in self.alias:
            if not all(name.strip() for name in text.rpartition("=")[2].split(",")):
                raise UsageError(f"alias is {text!r}and contains an empty name; write a name between commas")
        if self.models_memory is not None:
            parse_bytes("models_memory", self.models_memory)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> ServerConfig:
        """Make a configuration from command-line options. Durations may be strings, and repeated options are lists."""
        durations = {field.name for field in dataclasses.fields(cls) if isinstance(field.default, float)}
        values = dict(options)
        for name, value in options.items():
            if name in durations:
                values[name] = parse_duration(name, value)
            elif isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)

    def body_limit(self, *, with_images: bool) -> int:
        """Return the largest allowed body in bytes.

        with_images: whether the route accepts images
        """
        return self.max_body_bytes or (64 << 20 if with_images else 8 << 20)

    @property
    def models_memory_bytes(self) -> int | None:
        """`models_memory` in bytes."""
        return None if self.models_memory is None else parse_bytes("models_memory", self.models_memory)


_NUMBERS = frozenset({"max_queued_tokens", "max_body_bytes"})  # fields whose default is None


def _check_type(name: str, value: object, default: object) -> None:
    """Check that a field's value has the type of its default. If the default is None, the value may be a string or a
    number, depending on the field.
    """
    if isinstance(default, float):
        _check_seconds(name, value)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False, not {value!r}")
    elif isinstance(default, tuple):
        if not isinstance(value, tuple) or not all(isinstance(item, str) and item.strip() for item in value):
            raise UsageError(f"{name} must be a tuple of non-empty texts")  # the value may be a secret
    elif isinstance(default, str) or (default is None and value is not None and name not in _NUMBERS):
        is_text = isinstance(value, str) and value.strip()
        if not is_text:
            raise UsageError(f"{name} must be a non-empty text, not {value!r}")


def parse_duration(name: str, value: object) -> float:
    """Parse a duration such as `30`, `"30s"`, `"2m"`, `"500ms"` or `"1h"` and return seconds. Raises UsageError."""
    if not isinstance(value, str):
        return _check_seconds(name, value)
    match = _DURATION.fullmatch(value.strip().lower())
    if match is None:
        raise UsageError(f"{name} is {value!r}; write seconds, or a time with its unit, such as 30s, 2m or 500ms")
    return _check_seconds(name, float(match["number"]) * _SECONDS[match["unit"]])


def _check_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{name} must be a time in seconds, not {value!r}")
    low = 0.0 if name in ("drain", "sleep_after") else 0.01
    if not low <= value <= _MAX_SECONDS:
        raise UsageError(f"{name} is {value:g} s; it must be from {low:g} s to {_MAX_SECONDS:g} s")
    return float(value)
