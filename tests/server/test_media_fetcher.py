"""Fetched images: the rules of domains, addresses, ports and redirects, on loopback tables without the network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.server.models.media_fetcher import MediaFetcher, is_public

MAX_BYTES = 1000
SEEN: list[dict[str, str]] = []


class Web(BaseHTTPRequestHandler):
    """Answers by path: /ok, /large, /missing, and /to?URL, which redirects there."""

    def do_GET(self) -> None:
        SEEN.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
        status, body = (200, b"picture") if self.path.startswith("/ok") else (404, b"secret of an inner service")
        if self.path == "/large":
            status, body = 200, b"x" * (MAX_BYTES + 1)
        self.send_response(302 if self.path.startswith("/to?") else status)
        if self.path.startswith("/to?"):
            self.send_header("location", self.path.removeprefix("/to?"))
        self.send_header("set-cookie", "a=b")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


HOSTS = {
    "good.example": ["127.0.0.1"],
    "other.example": ["127.0.0.1"],
    "inner.example": ["10.0.0.5"],
    "half.example": ["127.0.0.1", "10.0.0.5"],
    "none.example": [],
}


async def table(host: str, _port: int) -> Sequence[str]:
    if host not in HOSTS:
        raise OSError("no such host")
    return HOSTS[host]


def fetch(port: int, url: str, *domains: str) -> bytes:
    """With a table in place of the resolver, in which 127.0.0.1 stands for the internet."""
    fetcher = MediaFetcher(
        domains or ("http://good.example", "http://half.example", "http://inner.example", "http://none.example"),
        MAX_BYTES,
        resolve=table,
        is_allowed=lambda address: address == "127.0.0.1",
        ports={"http": port, "https": 443},
    )
    return asyncio.run(fetcher.fetch(url, "here"))


@pytest.mark.parametrize("domain", ["http://good.example", "http://*"])
def test_listed_domains_are_fetched(port: int, domain: str) -> None:
    SEEN.clear()
    assert fetch(port, "http://good.example/ok?x=1#part", domain) == b"picture"
    (seen,) = SEEN
    assert (seen["path"], seen["host"]) == ("/ok?x=1", "good.example")
    assert "cookie" not in seen
    assert "authorization" not in seen


def test_redirects_are_checked_again_and_at_most_three(port: int) -> None:
    assert fetch(port, "http://good.example/to?/ok") == b"picture"
    assert fetch(port, "http://good.example/to?/to?/to?/ok") == b"picture"
    for wrong in ("/to?/to?/to?/to?/ok", "/to?http://other.example/ok", "/to?http://inner.example/ok", "/to?file:///x"):
        with pytest.raises(UsageError, match=r"^here: fetching the image failed$"):
            fetch(port, f"http://good.example{wrong}")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/ok",  # not listed
        "http://sub.good.example/ok",
        "http://good.example.evil.example/ok",
        "http://inner.example/ok",  # an address that is not public
        "http://half.example/ok",  # one of two is not
        "http://none.example/ok",
        "http://127.0.0.1/ok",
        "http://user:word@good.example/ok",
        "http://good.example:22/ok",
        "http://good.example/missing",
        "http://good.example/large",
        "https://good.example:80/ok",
        "http:///ok",
        "http://[::1/ok",
    ],
)
def test_all_failures_look_the_same(port: int, url: str) -> None:
    SEEN.clear()
    with pytest.raises(UsageError, match=r"^here: fetching the image failed$") as error:
        fetch(port, url)
    assert (error.value.param, error.value.code) == ("here", "invalid_image_url")
    assert [seen["path"] for seen in SEEN] == [path for path in ("/missing", "/large") if url.endswith(path)]


def test_plain_http_needs_a_domain_that_says_so(port: int) -> None:
    for domains in (("good.example",), ("*",), ("https://good.example",)):
        with pytest.raises(UsageError, match="fetching the image failed"):
            fetch(port, "http://good.example/ok", *domains)


def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(
        UsageError, match=r"is an https URL, but this server fetches no images.*--allowed-media-domains"
    ):
        asyncio.run(MediaFetcher((), MAX_BYTES).fetch("https://good.example/a.png", "here"))


def test_proxies_of_the_environment_are_not_used(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert fetch(port, "http://good.example/ok") == b"picture"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
        ("no address", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public
