"""Traces, as a collector gets them: OTLP over HTTP, decoded from its protobuf."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from octavo.errors import EngineDeadError, UsageError
from octavo.server.config import ServerConfig
from octavo.server.observability.tracing import start_tracer
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import scripted_app

CHAT = {
    "messages": [{"role": "user", "content": "My secret prompt"}],
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> dict[str, list[Span]]:
        """By name."""
        found: dict[str, list[Span]] = {}
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert attributes(resource.resource)["service.name"] == "octavo"
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found.setdefault(span.name, []).append(span)
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(5)


def attributes(holder: Any) -> dict[str, Any]:
    values = {}
    for item in holder.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        values[item.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return values


def traced(
    tokenizer: Tokenizer,
    script: Script,
    headers: dict[str, str] | None = None,
    path: str = "/v1/chat/completions",
    **changes: Any,
) -> Collector:
    """The collector after one request, by default a chat completion, and the end of the server."""
    with collector() as running:
        config = ServerConfig(otlp_endpoint=running.url)
        with scripted_app(FakeClient(tokenizer, script), tokenizer, config, names=("m",)) as app:
            body = {name: value for name, value in {**CHAT, **changes}.items() if value is not None}
            httpx.post(app.url + path, json=body, headers=headers)
        return running


def test_a_request_and_its_phases(smollm2_tokenizer: Tokenizer) -> None:
    begin = time.time_ns()
    seen = traced(smollm2_tokenizer, Script(["a", "b", "c"], delay_s=0.01, num_cached_tokens=3))
    assert set(seen.paths) == {"/v1/traces"}
    spans = seen.spans()
    assert sorted(spans) == ["chat m", "decode", "prefill", "queue"]
    (request,) = spans["chat m"]
    assert request.kind == Span.SPAN_KIND_SERVER
    assert not request.parent_span_id
    found = attributes(request)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "m"
    assert found["gen_ai.request.max_tokens"] == 8
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.top_p"] == 0.9
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.usage.input_tokens"] > 5
    assert found["gen_ai.usage.cache_read.input_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["http.route"] == "/v1/chat/completions"
    assert found["octavo.request_id"].startswith("req-")
    queue, prefill, decode = (spans[name][0] for name in ("queue", "prefill", "decode"))
    for child in (queue, prefill, decode):
        assert (child.trace_id, child.parent_span_id) == (request.trace_id, request.span_id)
    assert begin <= request.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 1_000_000  # what the engine said
    assert prefill.start_time_unix_nano == queue.end_time_unix_nano
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == 2_000_000
    assert decode.start_time_unix_nano == prefill.end_time_unix_nano
    assert decode.end_time_unix_nano == request.end_time_unix_nano
    assert b"secret" not in b"".join(seen.bodies)


@pytest.mark.parametrize(
    ("path", "changes", "operation"),
    [
        ("/chat/completions", {}, "chat"),
        ("/v1/messages", {}, "chat"),
        ("/v1/completions", {"messages": None, "prompt": "Hi"}, "text_completion"),
    ],
)
def test_the_operation_is_that_of_any_protocol(
    smollm2_tokenizer: Tokenizer, path: str, changes: dict[str, Any], operation: str
) -> None:
    (request,) = traced(smollm2_tokenizer, Script(["a"]), path=path, **changes).spans()[f"{operation} m"]
    assert attributes(request)["gen_ai.operation.name"] == operation


def test_the_callers_trace_goes_on(smollm2_tokenizer: Tokenizer) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
    (request,) = traced(smollm2_tokenizer, Script(["a"]), headers).spans()["chat m"]
    assert request.trace_id.hex() == TRACE_ID
    assert request.parent_span_id.hex() == PARENT_ID
    assert request.trace_state == "vendor=1"


def test_what_the_caller_does_not_sample_is_not_sent(smollm2_tokenizer: Tokenizer) -> None:
    assert not traced(smollm2_tokenizer, Script(["a"]), {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}).spans()


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "00-" + "x" * 5000])
def test_a_malformed_parent_begins_a_new_trace(smollm2_tokenizer: Tokenizer, header: str) -> None:
    (request,) = traced(smollm2_tokenizer, Script(["a"]), {"traceparent": header}).spans()["chat m"]
    assert not request.parent_span_id


def test_a_failed_request_is_an_error(smollm2_tokenizer: Tokenizer) -> None:
    spans = traced(smollm2_tokenizer, Script(["a"], error=EngineDeadError("gone"))).spans()
    (request,) = spans["chat m"]
    assert request.status.code == 2
    assert attributes(request)["error.type"] == "EngineDeadError"
    assert "prefill" in spans


def test_a_refused_request_has_no_phases(smollm2_tokenizer: Tokenizer) -> None:
    spans = traced(smollm2_tokenizer, Script(refusal=UsageError("no"))).spans()
    assert list(spans) == ["chat m"]
    assert attributes(spans["chat m"][0])["error.type"] == "UsageError"


def test_a_collector_that_is_not_there_disturbs_nobody(smollm2_tokenizer: Tokenizer) -> None:
    config = ServerConfig(otlp_endpoint="http://127.0.0.1:9")
    with scripted_app(FakeClient(smollm2_tokenizer, Script(["a"])), smollm2_tokenizer, config) as app:
        begin = time.perf_counter()
        assert httpx.post(app.url + "/v1/chat/completions", json=CHAT).status_code == 200
        assert time.perf_counter() - begin < 8


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", ""])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="otlp_endpoint is"):
        start_tracer(endpoint)


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys, octavo.server.observability.observed_client\n"
        "import octavo.server.observability.tracing as t\n"
        "assert t.start_tracer(None) is None\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from octavo.server.observability.tracing import start_tracer\n"
        "from octavo.errors import UsageError\n"
        "try: start_tracer('http://localhost:4318')\n"
        "except UsageError as error: assert 'octavo[otel]' in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
