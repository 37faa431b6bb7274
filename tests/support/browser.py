"""The installed headless Chromium, driven by playwright; pages may load nothing from elsewhere.

with browser() as chromium, watched_page(chromium, url) as page:
    page.goto(url)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

# A container has neither what the sandbox needs nor much shared memory.
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
_TIMEOUT_MS = 30_000  # on a machine with other work
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser. Close it before the module ends: while it runs, no event loop can be started in this thread."""
    executable = next(filter(None, map(shutil.which, _NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=_ARGUMENTS)
        yield chromium
        chromium.close()


@contextmanager
def watched_page(chromium: Browser, url: str, **context: Any) -> Iterator[Page]:
    """Open a page in a fresh profile. On exit, check that no other server was contacted and no error occurred."""
    faults: list[str] = []
    addresses: list[str] = []
    profile = chromium.new_context(base_url=url, accept_downloads=True, **context)
    profile.set_default_timeout(_TIMEOUT_MS)
    expect.set_options(timeout=_TIMEOUT_MS)

    def on_console(message: ConsoleMessage) -> None:
        # Answers with an error status are the tests' own; everything else, broken policies too, is a fault.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            faults.append(message.text)

    def on_request(request: Request) -> None:
        addresses.append(request.url)

    profile.on("console", on_console)
    profile.on("request", on_request)
    profile.on("weberror", lambda error: faults.append(str(error.error)))
    page = profile.new_page()
    yield page
    profile.close()
    assert not faults
    assert addresses
    assert [address for address in addresses if not address.startswith((url + "/", "blob:" + url, "data:"))] == []
