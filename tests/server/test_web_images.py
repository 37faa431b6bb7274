"""Images on the chat page: chosen, pasted and dropped, shown, and sent again with each turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import browser, watched_page
from tests.support.fake_client import FakeClient, Script
from tests.support.pictures import encoded, noise
from tests.support.scripted_app import scripted_app
from tests.support.seeing import base64_of, seeing, seeing_client

PNG = encoded(noise(96, 64), "PNG")
FILE: FilePayload = {"name": "a <b>.png", "mimeType": "image/png", "buffer": PNG}
# Gives the field files as a paste or a drop does.
GIVE = """([kind, text]) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
  const target = document.getElementById("prompt");
  const options = { bubbles: true, cancelable: true };
  target.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: data })
    : new DragEvent("drop", { ...options, dataTransfer: data }));
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def engine(smollm2_tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(seeing(smollm2_tokenizer), Script(["Yes."]), max_model_len=4096, **seeing_client())


@pytest.fixture
def page(chromium: Browser, engine: FakeClient) -> Iterator[Page]:
    with scripted_app(engine, engine.tokenizer) as app, watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#model")).to_have_value("scripted")
        yield page


def test_images_are_attached_shown_and_sent_again(page: Page, engine: FakeClient) -> None:
    expect(page.locator("#attach")).to_have_attribute("title", "Attach images, PDFs or text files")
    page.set_input_files("#files", FILE)
    page.evaluate(GIVE, ["paste", base64_of(PNG)])
    page.evaluate(GIVE, ["drop", base64_of(PNG)])
    previews = page.locator("#chips img")
    expect(previews).to_have_count(3)
    expect(page.locator("#chips .chip-name").first).to_have_text("a <b>.png")
    page.click("#chips li:nth-child(2) button")
    expect(previews).to_have_count(2)
    page.fill("#prompt", "What is this?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .stats").last).to_be_attached()
    expect(previews).to_have_count(0)
    shown = page.locator(".message.user .images img")
    expect(shown).to_have_count(2)
    assert shown.first.evaluate("image => image.naturalWidth") == 96
    assert len(engine.requests[-1].prompt.spans) == 2
    page.fill("#prompt", "And?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .stats")).to_have_count(2)
    assert len(engine.requests[-1].prompt.spans) == 2
    page.reload()
    expect(shown).to_have_count(2)


def test_an_image_alone_is_a_message(page: Page, engine: FakeClient) -> None:
    expect(page.locator("#send")).to_be_disabled()
    page.set_input_files("#files", FILE)
    page.click("#send")
    expect(page.locator(".message.assistant .stats")).to_be_attached()
    assert len(engine.requests[-1].prompt.spans) == 1


def test_a_model_that_only_reads_takes_no_images(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    client = FakeClient(smollm2_tokenizer)
    with scripted_app(client, smollm2_tokenizer) as app, watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#attach")).to_have_attribute("title", "Attach PDFs or text files")
        page.set_input_files("#files", FILE)
        expect(page.locator("#problem")).to_have_text("a <b>.png is an image, and this model reads only text.")
        expect(page.locator("#chips img")).to_have_count(0)
