"""The chat page with an engine that gives scripted answers: fixtures, and the actions of a user.

from tests.support.chat_page import app, ask, chromium, engine, page
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from octavo.loader.generation_config import SamplingDefaults
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import browser, watched_page
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import ScriptedApp, scripted_app
from tests.support.waiting import wait_until


def words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer: Tokenizer) -> FakeClient:
    defaults = SamplingDefaults({"temperature": 0.2}, "recommended by the authors of scripted")
    return FakeClient(smollm2_tokenizer, max_model_len=4096, sampling_defaults=defaults)


@pytest.fixture(scope="module")
def app(engine: FakeClient, smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedApp]:
    with scripted_app(engine, smollm2_tokenizer) as running:
        yield running


@pytest.fixture
def page(chromium: Browser, app: ScriptedApp, engine: FakeClient) -> Iterator[Page]:
    engine.script = Script(words("A short answer."))
    with watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#model")).to_have_value("scripted")
        yield page


def ask(page: Page, text: str = "Hello") -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def wait_on(page: Page, condition: Callable[[], Any]) -> None:
    """Wait like `wait_until`, with turns of the page: it needs them, for example to close a connection."""
    wait_until(lambda: condition() or page.wait_for_timeout(20))  # timed: the page's turn


def ask_to_the_end(page: Page, text: str = "Hello") -> None:
    ask(page, text)
    expect(page.locator(".message.assistant").last.locator(".stats")).to_be_attached()


def answers(page: Page) -> Any:
    return page.locator(".message.assistant .markdown")
