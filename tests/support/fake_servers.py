"""A model hub and a package index on loopback, behaving as well or badly as a test wants."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Behaviour:
    """The behaviour of a server."""

    files: dict[str, bytes] = field(default_factory=dict)
    listed: list[str] | None = None  # names in the listing; default: those of `files`
    refused: dict[str, int] = field(default_factory=dict)  # repository -> status
    revisions: tuple[str, ...] = ("main",)  # all of them are COMMIT
    checksums: dict[str, str] = field(default_factory=dict)  # SHA-256 that the listing tells, by name
    status_of_files: int = 200
    cut_once_at: int | None = None  # bytes after which the first download breaks off
    seconds_per_chunk: float = 0.0
    has_ranges: bool = True  # else every answer is the whole file
    redirect_to: str | None = None  # base of another host that files are taken from
    requests: list[tuple[str, str, dict[str, str]]] = field(
        default_factory=list
    )  # (method, path, headers in lower case)

    def seen(self, method: str) -> list[str]:
        return [path for m, path, _ in self.requests if m == method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    behaviour: Behaviour

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.behaviour.requests.append((self.command, self.path, headers))
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            repository, revision = "/".join(path.split("/")[3:5]), "/".join(path.split("/")[6:])
            if revision and unquote(revision) not in self.behaviour.revisions:
                self._send(b"{}", with_body, status=404, headers={"X-Error-Code": "RevisionNotFound"})
                return
            listing = json.dumps(self._listing(repository)).encode()
            self._send(listing, with_body, status=self.behaviour.refused.get(repository, 200))
        elif path.startswith("/simple/"):
            links = "".join(f'<a href="/files/{name}">{name}</a>' for name in self.behaviour.files)
            self._send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), with_body, kind="text/html")
        else:
            self._send_file(path, with_body)

    def _listing(self, repository: str) -> dict[str, object]:
        names = self.behaviour.files if self.behaviour.listed is None else self.behaviour.listed
        siblings: list[dict[str, object]] = [{"rfilename": name} for name in names]
        for sibling in siblings:
            if (sha256 := self.behaviour.checksums.get(str(sibling["rfilename"]))) is not None:
                sibling["lfs"] = {"size": 1, "sha256": sha256, "pointerSize": 1}
        return {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}

    def _send_file(self, path: str, with_body: bool) -> None:
        name = path.removeprefix("/files/") if path.startswith("/files/") else path.split(f"/{COMMIT}/")[-1]
        if name not in self.behaviour.files:
            self._send(b"{}", with_body, status=404)
            return
        content = self.behaviour.files[name]
        if with_body and self.behaviour.status_of_files != 200:
            self._send(b"{}", with_body, status=self.behaviour.status_of_files)
            return
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        headers["Accept-Ranges"] = "bytes"
        if self.behaviour.redirect_to is not None and not path.startswith("/files/"):
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": headers["ETag"]}
            headers |= {"Location": f"{self.behaviour.redirect_to}/files/{name}"}
            self._send(b"", with_body, status=302, headers=headers)
            return
        start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        piece = content[int(start) : int(last) + 1 if last else None]
        if self.behaviour.has_ranges and (int(start) or last):
            headers["Content-Range"] = f"bytes {start}-{int(start) + len(piece) - 1}/{len(content)}"
            self._send(piece, with_body, status=206, headers=headers, is_file=True)
        else:
            self._send(content, with_body, headers=headers, is_file=True)

    def _send(
        self,
        content: bytes,
        with_body: bool,
        *,
        status: int = 200,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
        is_file: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if not with_body:
            return
        behaviour, limit = self.behaviour, len(content)
        if is_file and behaviour.cut_once_at is not None:
            limit, behaviour.cut_once_at = behaviour.cut_once_at, None
        with contextlib.suppress(ConnectionError):  # clients that are killed are part of the tests
            for at in range(0, limit, 1 << 16):
                self.wfile.write(content[at : min(at + (1 << 16), limit)])
                self.wfile.flush()
                time.sleep(behaviour.seconds_per_chunk if is_file else 0)  # timed: a slow network
        if limit < len(content):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


@contextlib.contextmanager
def serve(behaviour: Behaviour) -> Iterator[str]:
    """Start a server with this behaviour, and return its base address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"behaviour": behaviour}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """Return the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def wheel(name: str, version: str, files: dict[str, bytes]) -> tuple[str, bytes]:
    """Return the file name and content of a wheel with these files."""
    info = f"{name}-{version}.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in everything.items():
            archive.writestr(path, content)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()
