"""The API page in a real browser: its form for a key, the protocols, and requests that are sent from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import watched_page
from tests.support.chat_page import chromium, words
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import ScriptedApp, scripted_app

__all__ = ["chromium"]  # a fixture

PROTOCOLS = ["OpenAI", "Anthropic", "Ollama", "llama.cpp", "Text Generation Inference", "Rerank", "Batches"]


@pytest.fixture(scope="module")
def locked(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedApp]:
    client = FakeClient(smollm2_tokenizer, Script(words("A short answer.")))
    with scripted_app(client, smollm2_tokenizer, ServerConfig(api_key=("sesame",))) as running:
        yield running


def send(page: Page, tag: str, path: str) -> None:
    page.click(f"[data-tag='{tag}']")
    page.locator(".opblock", has=page.locator(f"[data-path='{path}']")).locator(".opblock-summary").click()
    page.click(".execute")


def test_behind_a_key_the_page_opens_with_a_form(chromium: Browser, locked: ScriptedApp) -> None:
    with watched_page(chromium, locked.url) as page:
        page.goto("/docs")
        expect(page.locator("#key")).to_be_focused()
        expect(page.locator("#key-form")).to_contain_text("This server requires an API key.")
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator(".swagger-ui")).to_have_count(0)
        page.keyboard.type("Sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_have_text("The server does not accept this API key.")
        page.fill("#key", "sesame")
        page.click("#key-form button")
        expect(page.locator(".opblock-tag").first).to_have_attribute("data-tag", "OpenAI")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#notice")).to_be_hidden()
        page.reload()  # the tab keeps the key
        expect(page.locator(".opblock-tag").first).to_be_visible()


@pytest.mark.parametrize(("tag", "path"), [("OpenAI", "/v1/chat/completions"), ("Anthropic", "/v1/messages")])
def test_a_request_can_be_tried(chromium: Browser, locked: ScriptedApp, tag: str, path: str) -> None:
    with watched_page(chromium, locked.url) as page:
        page.goto("/docs")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        send(page, tag, path)
        expect(page.locator(".live-responses-table .response-col_status").last).to_have_text("200")
        expect(page.locator(".live-responses-table")).to_contain_text("A short answer.")


def test_every_protocol_is_listed(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    with (
        scripted_app(FakeClient(smollm2_tokenizer), smollm2_tokenizer) as app,
        watched_page(chromium, app.url, color_scheme="dark", viewport={"width": 380, "height": 800}) as page,
    ):
        page.goto("/docs")
        expect(page.locator(".opblock-tag").first).to_be_visible()
        tags = [tag.get_attribute("data-tag") for tag in page.locator(".opblock-tag").all()]
        assert tags[: len(PROTOCOLS)] == PROTOCOLS
        expect(page.locator("#key-form")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") == 380
        background = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(background) == "rgb(25, 24, 22)"
        page.click("#theme")
        assert page.evaluate(background) == "rgb(251, 250, 247)"
        assert not page.evaluate("document.documentElement.classList.contains('dark-mode')")
