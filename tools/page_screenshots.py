"""Take screenshots of the chat page and the dashboard, light, dark and narrow, with an engine that answers from a
script.

    python -m tools.page_screenshots FOLDER

Look at them after changing a page: a test cannot tell whether it is ugly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from playwright.sync_api import Browser, FilePayload, Page, expect

from octavo.errors import OverloadedError
from octavo.loader.generation_config import SamplingDefaults
from octavo.loader.hub import resolve_model
from tests.support.browser import browser, watched_page
from tests.support.chat_page import ask, ask_to_the_end, words
from tests.support.fake_client import FakeClient, Script, read_tokenizer
from tests.support.pdf_files import text_pdf
from tests.support.pictures import encoded, noise
from tests.support.scripted_app import ScriptedApp, SteppedLoader, scripted_app
from tests.support.seeing import seeing, seeing_client
from tests.support.videos import encoded_video, frames

SIZES = {"light": (1200, 800), "dark": (1200, 800), "narrow": (380, 844), "narrow-dark": (380, 844)}
ANSWER = """Two ways to sum the first *n* numbers, and why they agree:

$$\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}$$

```python
def total(n: int) -> int:
    # Gauss: pairs of 1 and n, 2 and n - 1, and so on, each of which sums to n + 1
    return n * (n + 1) // 2
```

1. The **loop** takes $O(n)$ additions.
2. The formula takes one multiplication; see [Gauss](https://example.org).

| n | loop | formula |
|--:|-----:|--------:|
| 10 | 55 | 55 |
| 1,000 | 500,500 | 500,500 |

> A quotation with `code` in it.
"""


def welcome(page: Page, _: FakeClient) -> None:
    expect(page.locator("#model")).to_have_value("scripted")


def conversation(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words("A short answer."))
    ask_to_the_end(page, "Hello! Which of these two files is the better one?")
    engine.script = Script(words(ANSWER))
    ask_to_the_end(page, "Explain this:\n\n```python\nsum(range(1, n + 1))  # the loop\n```")


def end_of_conversation(page: Page, engine: FakeClient) -> None:
    conversation(page, engine)
    engine.script = Script(refusal=OverloadedError("full", code="server_overloaded", retry_after_s=7))
    ask(page, "And for squares?")
    expect(page.locator(".failure")).to_be_visible()


def settings(page: Page, engine: FakeClient) -> None:
    conversation(page, engine)
    page.click("#open-settings")
    page.fill("#system", "You are terse.")
    page.fill("#top_p", "3")
    ask(page)
    expect(page.locator("#problem")).to_be_visible()


def presets(page: Page, _: FakeClient) -> None:
    page.click("#open-settings")
    page.select_option("#preset", "Proofreader")
    page.fill("#system", "Correct the spelling.")
    page.click("#save-preset")
    page.fill("#preset-name", "Spelling")
    page.click("#export-all")
    page.locator("#import").scroll_into_view_if_needed()


def sidebar(page: Page, engine: FakeClient) -> None:
    conversation(page, engine)
    if page.locator("#new-chat").is_visible():
        page.click("#new-chat")
        page.hover("#conversations li")
    if page.locator("#open-sidebar").is_visible():
        page.click("#open-sidebar")
        page.wait_for_timeout(400)
    page.locator("#conversations .remove").first.click()
    page.fill("#search", "Nothing like it")


def attachments(page: Page, engine: FakeClient) -> None:
    notes: FilePayload = {"name": "notes.md", "mimeType": "text/plain", "buffer": b"# Notes\n\nGauss was right."}
    pdf: FilePayload = {"name": "a-paper-with-a-long-name-of-2026.pdf", "mimeType": "", "buffer": text_pdf(["Sums."])}
    page.set_input_files("#files", [notes, pdf])
    expect(page.locator(".chip-size")).to_have_text(["25 B", "1 page"])
    engine.script = Script(words("A short answer."))
    ask_to_the_end(page, "Summarize both files:")
    page.click("[data-action=again]")
    expect(page.locator(".versions")).to_have_text("2/2")
    page.click(".message .file summary")
    page.set_input_files("#files", [notes, pdf])
    expect(page.locator("#chips .chip-size")).to_have_text(["25 B", "1 page"])


def media(page: Page, engine: FakeClient) -> None:
    """Show an image, a PDF as pages and a video, both in an answered question and attached to the next question."""
    image: FilePayload = {"name": "drawing.png", "mimeType": "image/png", "buffer": encoded(noise(96, 64), "PNG")}
    pdf: FilePayload = {"name": "paper.pdf", "mimeType": "application/pdf", "buffer": text_pdf(["Sums.", "Proofs."])}
    film = encoded_video(frames(4, 64, 96), 2, "mp4", "mpeg4")
    files: list[FilePayload] = [image, pdf, {"name": "film.mp4", "mimeType": "video/mp4", "buffer": film}]
    page.set_input_files("#files", files)
    expect(page.locator("#chips li")).to_have_count(3)
    engine.script = Script(words("A short answer."))
    ask_to_the_end(page, "What do these show?")
    page.set_input_files("#files", files)
    expect(page.locator("#chips li")).to_have_count(3)


def truncation(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words("A short answer."))
    ask_to_the_end(page, "Sum these: " + "7 " * 6000)


def reading(page: Page, engine: FakeClient) -> None:
    conversation(page, engine)
    engine.script = Script(words("A short answer."), delay_s=600, prompt_steps=(512, 900))
    ask(page, "Sum these: " + "7 " * 700)
    expect(page.locator(".waiting progress")).to_be_visible()


def shortcuts(page: Page, engine: FakeClient) -> None:
    conversation(page, engine)
    page.keyboard.press("Control+/")


def loading(page: Page, _: FakeClient) -> None:
    page.select_option("#model", "qwen3:4b")
    expect(page.locator("#loading progress")).to_be_visible()


def dashboard(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words(ANSWER))
    page.goto("/dashboard")
    expect(page.locator("#state")).to_have_text("Ready")
    for _ in range(3):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
        httpx.post(page.url.replace("/dashboard", "/v1/chat/completions"), json=body)
    page.wait_for_timeout(2500)


def api(page: Page, _: FakeClient) -> None:
    page.goto("/docs")
    page.click("[data-tag='OpenAI']")
    page.locator(".opblock-summary").nth(1).click()
    page.click(".execute")
    expect(page.locator(".live-responses-table")).to_be_visible()
    page.evaluate("scrollTo(0, 0)")


SCENES: tuple[Callable[[Page, FakeClient], None], ...] = (
    *(
        welcome,
        conversation,
        end_of_conversation,
        settings,
        presets,
        sidebar,
        attachments,
        truncation,
        reading,
        shortcuts,
    ),
    *(dashboard, api),
)


def main(folder: Path) -> None:
    """Capture every scene in every size and theme."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = read_tokenizer(resolve_model("smollm2"))
    engine = FakeClient(
        tokenizer,
        max_model_len=4096,
        sampling_defaults=SamplingDefaults({"temperature": 0.2}, "recommended by the authors of scripted"),
    )
    eyes = FakeClient(seeing(tokenizer), max_model_len=4096, **seeing_client())
    loader = SteppedLoader(tokenizer, engine)
    loader.may_end.set()
    with (
        browser() as chromium,
        scripted_app(engine, tokenizer) as app,
        scripted_app(eyes, eyes.tokenizer) as seeing_app,
        scripted_app(engine, tokenizer, names=("scripted", "qwen3:4b"), loader=loader) as slow_app,
    ):
        for size in SIZES:
            for scene in SCENES:
                take(chromium, app, engine, scene, size, folder)
            take(chromium, seeing_app, eyes, media, size, folder)
        httpx.post(f"{slow_app.url}/v1/models/scripted/load", timeout=30)
        loader.may_end.clear()
        for size in SIZES:
            take(chromium, slow_app, engine, loading, size, folder)
        loader.may_end.set()
    print(f"{len(SIZES) * (len(SCENES) + 2)} screenshots are in {folder}")


def take(
    chromium: Browser,
    app: ScriptedApp,
    engine: FakeClient,
    scene: Callable[[Page, FakeClient], None],
    size: str,
    folder: Path,
) -> None:
    """Capture one screenshot, in a fresh profile."""
    width, height = SIZES[size]
    theme = "dark" if "dark" in size else "light"
    with watched_page(chromium, app.url, color_scheme=theme, viewport={"width": width, "height": height}) as page:
        page.goto("/")
        scene(page, engine)
        page.screenshot(path=folder / f"{scene.__name__}-{size}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
