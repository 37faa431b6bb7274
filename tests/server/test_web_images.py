"""Images, documents and videos on the chat page: chosen, pasted and dropped, shown, and sent again with each turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import browser, watched_page
from tests.support.fake_client import FakeClient, Script
from tests.support.pdf_files import text_pdf
from tests.support.pictures import encoded, noise
from tests.support.scripted_app import scripted_app
from tests.support.seeing import base64_of, seeing, seeing_client

PNG = encoded(noise(96, 64), "PNG")
FILE: FilePayload = {"name": "a <b>.png", "mimeType": "image/png", "buffer": PNG}
# Gives the field files as a paste or a drop does.
GIVE = """([kind, text, name]) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name ?? `${kind}.png`, { type: name ? "" : "image/png" }));
  const target = document.getElementById("prompt");
  const options = { bubbles: true, cancelable: true };
  target.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: data })
    : new DragEvent("drop", { ...options, dataTransfer: data }));
}"""


PDF: FilePayload = {"name": "a.pdf", "mimeType": "application/pdf", "buffer": text_pdf(["A page.", "Its end."])}


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
    expect(page.locator("#attach")).to_have_attribute("title", "Attach images, PDFs, videos or text files")
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
        expect(page.locator("#problem")).to_have_text("a <b>.png is an image, but this model reads only text.")
        expect(page.locator("#chips img")).to_have_count(0)


def sent(page: Page) -> list[dict[str, Any]]:
    """The parts of the first message of the request that the button sends."""
    with page.expect_request("**/v1/chat/completions") as request:
        page.click("#send")
    expect(page.locator(".message.assistant .stats").last).to_be_attached()
    content: list[dict[str, Any]] = request.value.post_data_json["messages"][0]["content"]
    return content


def test_a_pdf_is_sent_as_pages_and_again_with_each_turn(page: Page, engine: FakeClient) -> None:
    page.set_input_files("#files", PDF)
    expect(page.locator("#chips .chip-size")).to_have_text("2 pages")
    expect(page.get_by_label("Send a.pdf")).to_have_value("pages")
    page.fill("#prompt", "What is this?")
    part, text = sent(page)
    url = f"data:application/pdf;base64,{base64_of(PDF['buffer'])}"
    assert part == {"type": "file", "file": {"filename": "a.pdf", "file_data": url}, "pdf_as": "pages"}
    assert text == {"type": "text", "text": "What is this?"}
    assert len(engine.requests[-1].prompt.spans) == 2
    expect(page.locator(".message.user .chip")).to_have_text("a.pdf2 pages")
    page.fill("#prompt", "And?")
    assert sent(page)[0] == part
    page.reload()
    expect(page.locator(".message.user .chip")).to_have_text("a.pdf2 pages")
    page.hover(".message.user >> nth=0")
    page.click(".message.user >> nth=0 >> [data-action=branch]")
    expect(page.get_by_label("Send a.pdf")).to_have_value("pages")


def test_the_switch_of_a_pdf_sends_its_text(page: Page, engine: FakeClient) -> None:
    page.set_input_files("#files", PDF)
    page.get_by_label("Send a.pdf").select_option("text")
    assert sent(page) == "a.pdf:\n\n```\nA page.\n\nIts end.\n```"  # type: ignore[comparison-overlap]
    assert not engine.requests[-1].prompt.spans


def test_a_scan_has_no_switch(page: Page) -> None:
    page.set_input_files("#files", {**PDF, "buffer": text_pdf([""])})
    expect(page.locator("#chips .chip")).to_have_text("a.pdf1 page")
    expect(page.locator("#chips select")).to_have_count(0)


def test_the_switch_begins_as_the_server_does(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    client = seeing_client(pdf_as="text")
    engine = FakeClient(seeing(smollm2_tokenizer), Script(["Yes."]), max_model_len=4096, **client)
    with scripted_app(engine, engine.tokenizer) as app, watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#model")).to_have_value("scripted")
        page.set_input_files("#files", PDF)
        expect(page.get_by_label("Send a.pdf")).to_have_value("text")
        page.get_by_label("Send a.pdf").select_option("pages")
        assert sent(page)[0]["pdf_as"] == "pages"
        assert len(engine.requests[-1].prompt.spans) == 2


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_videos_are_pasted_and_dropped(page: Page, engine: FakeClient, way: str) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    from tests.support.videos import encoded_video, frames

    film = encoded_video(frames(4, 64, 96), 2, "mp4", "mpeg4")
    page.evaluate(GIVE, [way, base64_of(film), "a.MP4"])
    expect(page.locator("#chips .chip-name")).to_have_text("a.MP4")
    (part,) = sent(page)
    assert part == {"type": "input_video", "input_video": {"url": f"data:video/mp4;base64,{base64_of(film)}"}}
    assert engine.requests[-1].prompt.spans
    page.reload()
    expect(page.locator(".message.user .chip-name")).to_have_text("a.MP4")


def test_a_video_that_cannot_be_attached_or_read_says_why(page: Page) -> None:
    page.evaluate("""() => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(45 << 20)], "b.webm", { type: "video/webm" }));
      const options = { bubbles: true, cancelable: true, dataTransfer: data };
      document.getElementById("prompt").dispatchEvent(new DragEvent("drop", options));
    }""")
    problem = "b.webm was not attached: the images, documents and videos in a message may take at most 44 MiB."
    expect(page.locator("#problem")).to_have_text(problem)
    page.set_input_files("#files", {"name": "c.mov", "mimeType": "", "buffer": b"no film"})
    page.click("#send")
    expect(page.locator(".message.assistant")).to_contain_text("messages[0].content[0].input_video.url")


def test_a_model_that_only_reads_takes_no_videos(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    client = FakeClient(smollm2_tokenizer)
    with scripted_app(client, smollm2_tokenizer) as app, watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#attach")).to_have_attribute("title", "Attach PDFs or text files")
        page.set_input_files("#files", {"name": "a.webm", "mimeType": "video/webm", "buffer": b"x"})
        expect(page.locator("#problem")).to_have_text("a.webm is a video, but this model reads only text.")
