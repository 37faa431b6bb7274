"""The chat page in a real browser, over an engine that answers by script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from octavo.errors import EngineDeadError, OverloadedError
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import watched_page
from tests.support.chat_page import answers, app, ask, ask_to_the_end, chromium, engine, page, wait_on, words
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import ScriptedApp, scripted_app
from tests.support.server import RunningServer

__all__ = ["app", "chromium", "engine", "page"]  # fixtures

MARKDOWN = """Some **bold** and `code`.

```python
print("<b>hi</b>")
```

1. one
2. two

| a | b |
|---|--:|
| 1 | 2 |
"""


def test_an_answer_streams_as_markdown(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words(MARKDOWN), delay_s=0.02, never_ends=True)
    ask(page, "Show me")
    expect(page.locator("#stop")).to_be_visible()
    expect(answers(page).locator("td")).to_have_count(2)
    expect(page.locator("#live")).to_contain_text("tokens/s")
    page.keyboard.press("Escape")
    engine.script = Script(words(MARKDOWN), delay_s=0.02)
    page.click("[data-action=again]")
    expect(page.locator(".message.assistant .stats")).to_contain_text("tokens/s")
    assert answers(page).locator("pre code").inner_text() == 'print("<b>hi</b>")'
    assert answers(page).locator(".code-head span").inner_text() == "python"
    assert answers(page).locator("ol > li").all_inner_texts() == ["one", "two"]
    assert answers(page).locator("td").all_inner_texts() == ["1", "2"]
    assert re.fullmatch(r"\d+ tokens[\d,]+ tokens/sfirst token .+", page.locator(".stats").text_content() or "")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page).to_have_title("Show me · Octavo")


def test_the_rate_of_an_answer_in_one_burst_is_the_servers(page: Page, engine: FakeClient) -> None:
    engine.script = Script([("All of it at once.", list(range(100, 161)))])
    ask_to_the_end(page)
    expect(page.locator(".stats")).to_contain_text("61 tokens20,000 tokens/s")  # 60 after the first, in 0.003 s


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_keeps_what_is_there_and_frees_the_engine(page: Page, engine: FakeClient, way: str) -> None:
    engine.script = Script(["Once", " upon"], never_ends=True)
    ask(page)
    expect(answers(page)).to_have_text("Once upon")
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .stats")).to_contain_text("stopped")
    wait_on(page, lambda: engine.streams[-1].was_aborted)
    engine.script = Script(words("And more."))
    ask_to_the_end(page, "Go on")
    assert answers(page).all_inner_texts() == ["Once upon", "And more."]


def test_a_reload_keeps_the_conversation(page: Page, engine: FakeClient) -> None:
    ask_to_the_end(page, "First")
    engine.script = Script(["Half", " an"], never_ends=True)
    ask(page, "Second")
    expect(answers(page).last).to_have_text("Half an")
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    assert answers(page).all_inner_texts() == ["A short answer.", "Half an"]
    expect(page.locator("#conversations .current .open")).to_have_text("First")
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#conversations .open")
    expect(page.locator(".message")).to_have_count(4)
    page.hover("#conversations li")
    page.click("#conversations .remove")
    expect(page.locator("#conversations li")).to_have_count(0)
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


# What a browser may do: the connections of a page go before the page is told that it goes.
LOSE_CONNECTIONS_FIRST = """
const realFetch = window.fetch;
window.fetch = async (...request) => {
  const response = await realFetch(...request);
  if (!response.headers.get("Content-Type").startsWith("text/event-stream")) return response;
  const reader = response.body.getReader();
  const body = new ReadableStream({
    start: (controller) => addEventListener("beforeunload", () => controller.error(new TypeError("network error"))),
    pull: async (controller) => controller.enqueue((await reader.read()).value),
  });
  return new Response(body, response);
};
"""


def test_leaving_in_mid_stream_is_no_error(page: Page, engine: FakeClient) -> None:
    page.add_init_script(LOSE_CONNECTIONS_FIRST)
    page.reload()
    engine.script = Script(["Half", " an"], never_ends=True)
    ask(page)
    expect(answers(page)).to_have_text("Half an")
    page.reload()
    expect(answers(page)).to_have_text("Half an")
    expect(page.locator(".failure")).to_have_count(0)
    expect(page.locator(".message.assistant .stats")).to_contain_text("stopped")


def test_export(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words(MARKDOWN))
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    ask_to_the_end(page, "Show: me?")
    page.click("#export-menu summary")
    with page.expect_download() as download:
        page.click("#export-json")
    assert download.value.suggested_filename == "octavo-show-me.json"
    exported = json.loads(Path(download.value.path()).read_text())
    assert exported["system"] == "Be brief."
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    assert exported["messages"][1]["content"] == MARKDOWN
    page.click("#export-menu summary")
    with page.expect_download() as download:
        page.click("#export-markdown")
    text = Path(download.value.path()).read_text()
    assert text.startswith("# Show: me?\n\n> **System:** Be brief.\n\n## You\n\nShow: me?\n\n## scripted\n\n")
    assert MARKDOWN in text


def test_settings_reach_the_request_and_stay(page: Page) -> None:
    page.keyboard.press("Control+,")
    expect(page.locator("#system")).to_be_focused()
    page.fill("#system", "You are terse.")
    for name, value in {
        "temperature": "0.3",
        "top_k": "7",
        "max_tokens": "20",
        "seed": "5",
        "stop_text": "END",
    }.items():
        page.fill(f"#{name}", value)
    page.fill("#top_p", "3")
    ask(page)
    expect(page.locator("#problem")).to_have_text("Top p in the settings is 3; it must be from 0.01 to 1.")
    expect(page.locator("#top_p")).to_be_focused()
    expect(page.locator(".field .problem")).to_have_text("It must be from 0.01 to 1.")  # where the panel hides the rest
    assert page.input_value("#prompt") == "Hello"
    page.fill("#top_p", "")
    page.fill("#top_k", "1.5")
    page.click("#send")
    expect(page.locator("#problem")).to_have_text("Top k in the settings is 1.5; it must be a whole number.")
    expect(page.locator(".field .problem")).to_have_text("It must be a whole number.")
    expect(page.locator(".message")).to_have_count(0)
    page.fill("#top_k", "7")
    expect(page.locator(".field .problem")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page)
    body = request.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Hello"}]
    assert (body["temperature"], body["top_k"], body["max_tokens"], body["seed"]) == (0.3, 7, 20, 5)
    assert body["stop"] == ["END"]
    assert "top_p" not in body
    expect(page.locator(".stats")).to_be_attached()
    page.reload()
    assert page.input_value("#temperature") == "0.3"
    assert page.input_value("#system") == "You are terse."


def test_the_settings_show_the_models_defaults(page: Page, engine: FakeClient) -> None:
    assert page.get_attribute("#temperature", "placeholder") == "0.2"
    assert page.get_attribute("#top_k", "placeholder") == "0"
    expect(page.locator("#defaults")).to_contain_text("recommended by the authors of scripted")
    ask_to_the_end(page)
    params = engine.requests[-1].params
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.max_tokens) == (0.2, None)


def test_an_answer_without_end_ends_and_says_so(page: Page, engine: FakeClient) -> None:
    page.keyboard.press("Control+,")
    page.fill("#max_tokens", "1")
    engine.script = Script(["word "], finish_reason="length")
    ask_to_the_end(page)
    expect(page.locator(".stats")).to_contain_text("cut off at Max tokens (1)")
    page.fill("#max_tokens", "")
    engine.script = Script(["word "] * 4200, never_ends=True)
    ask_to_the_end(page)
    expect(page.locator(".stats").last).to_contain_text(
        "cut off at 4,096 tokens; raise Max tokens in the settings for more"
    )
    assert not page.locator("#stop").is_visible()


def test_editing_and_answering_again(page: Page, engine: FakeClient) -> None:
    ask_to_the_end(page, "One")
    ask_to_the_end(page, "Two")
    engine.script = Script(words("Another answer."))
    page.click(".message.assistant >> nth=1 >> [data-action=again]")
    expect(answers(page).last).to_have_text("Another answer.")
    expect(page.locator(".message")).to_have_count(4)
    page.hover(".message.user >> nth=0")
    page.click(".message.user >> nth=0 >> [data-action=edit]")
    page.keyboard.press("Escape")
    expect(page.locator(".message")).to_have_count(4)
    page.hover(".message.user >> nth=0")
    page.click(".message.user >> nth=0 >> [data-action=edit]")
    page.keyboard.press("Control+A")
    page.keyboard.type("Three")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".message.user .body")).to_have_text("Three")
    expect(answers(page)).to_have_text("Another answer.")


def test_copying(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words(MARKDOWN))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask_to_the_end(page)
    page.click("[data-action=copy-code]")
    expect(page.locator("[data-action=copy-code]")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>hi</b>")'
    page.click(".message.assistant [data-action=copy]")
    page.wait_for_function("navigator.clipboard.readText().then((text) => text.includes('**bold**'))")


def test_only_the_keyboard(page: Page) -> None:
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.className") == "skip-link":
            break
    expect(page.locator(".skip-link")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .body")).to_have_text("Two\nlines")
    expect(page.locator(".stats")).to_be_attached()
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "theme":
            break
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Control+,")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()


def test_a_busy_server_is_explained_and_tried_again(page: Page, engine: FakeClient) -> None:
    engine.script = Script(refusal=OverloadedError("full", code="server_overloaded", retry_after_s=7))
    ask(page)
    expect(page.locator(".failure span")).to_have_text("The server is busy. Try again in 7 s.")
    engine.script = Script(words("Now it works."))
    page.click(".failure button")
    expect(answers(page)).to_have_text("Now it works.")
    expect(page.locator(".failure")).to_have_count(0)


def test_an_error_in_the_middle_keeps_what_came_before(page: Page, engine: FakeClient) -> None:
    engine.script = Script(["Once", " upon"], error=EngineDeadError("gone"), delay_s=0.05)
    ask(page)
    expect(page.locator(".failure")).to_contain_text("the engine stopped while this request was running")
    expect(answers(page)).to_have_text("Once upon")


def test_a_truncation_is_told(page: Page) -> None:
    ask(page, "word " * 5000)
    note = r"This chat is longer than the model's context: [\d,]+ tokens were left out, "
    told = page.locator(".truncation")
    expect(told).to_have_text(re.compile(note + "from the middle of your message."))
    ask(page, "word " * 10)
    oldest = "the oldest messages first, then the middle of your last message."
    expect(told.last).to_have_text(re.compile(note + oldest))
    page.reload()
    expect(told).to_have_count(2)


def test_a_long_prompt_shows_how_far_it_is(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words("A short answer."), delay_s=60, prompt_steps=(512, 2048))
    ask(page, "word " * 3000)
    reading = page.locator(".waiting")
    expect(reading).to_have_text(re.compile(r"Reading the prompt: 2,048 of 3,0\d\d tokens"))
    assert 0.6 < reading.locator("progress").evaluate("bar => bar.position") < 0.7
    page.keyboard.press("Control+Shift+O")
    page.click("#conversations .open")
    expect(reading).to_contain_text("2,048 of")  # also after another chat was open
    page.keyboard.press("Escape")
    expect(reading).to_have_count(0)
    engine.script = Script(words("A short answer."), prompt_steps=(512, 2048))
    page.click("[data-action=again]")
    expect(answers(page)).to_have_text("A short answer.")
    expect(reading).to_have_count(0)


def test_the_progress_of_a_short_prompt_is_not_shown(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words("A short answer."), delay_s=60, num_cached_tokens=2800, prompt_steps=(2900,))
    with page.expect_response("**/v1/chat/completions"):
        ask(page, "word " * 3000)  # all but 200 tokens are in the cache
    page.wait_for_timeout(300)  # timed: it would have appeared
    expect(page.locator(".waiting i")).to_have_count(3)


REQUIRED = "This server requires an API key. Enter it in the settings."
REFUSED = "The server does not accept this API key. Check it in the settings."


def test_a_key_is_asked_for(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    engine = FakeClient(smollm2_tokenizer)
    config = ServerConfig(api_key=("sesame",))
    with scripted_app(engine, smollm2_tokenizer, config) as app, watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#loading")).to_have_text(REQUIRED)
        expect(page.locator("#api-key")).to_be_focused()
        expect(page.locator("#key-problem")).to_have_text(REQUIRED)
        page.keyboard.type("Sesame")
        expect(page.locator("#key-problem")).to_be_hidden()
        page.keyboard.press("Enter")
        expect(page.locator("#loading")).to_have_text(REFUSED)
        expect(page.locator("#key-problem")).to_have_text(REFUSED)
        page.fill("#api-key", "")
        page.keyboard.type("sesame")
        page.keyboard.press("Tab")
        expect(page.locator("#model")).to_have_value("scripted")
        expect(page.locator("#loading")).to_be_hidden()
        expect(page.locator("#key-problem")).to_be_hidden()
        ask_to_the_end(page)
        page.reload()
        expect(page.locator("#model")).to_have_value("scripted")
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_question_refused_for_its_key_is_answered_with_the_right_one(
    chromium: Browser, smollm2_tokenizer: Tokenizer
) -> None:
    engine = FakeClient(smollm2_tokenizer, Script(words("A short answer.")))
    config = ServerConfig(api_key=("sesame",))
    with scripted_app(engine, smollm2_tokenizer, config) as app, watched_page(chromium, app.url) as page:
        page.goto("/")
        expect(page.locator("#key-problem")).to_be_visible()
        page.click("#close-settings")
        ask(page, "One")
        expect(page.locator(".failure span")).to_have_text(REQUIRED)
        expect(page.locator("#api-key")).to_be_focused()
        page.click("#close-settings")
        ask(page, "Two")
        expect(page.locator(".failure")).to_have_count(2)
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        expect(answers(page)).to_have_text(["A short answer."])
        expect(page.locator(".failure")).to_have_count(0)
        expect(page.locator(".message.user .body")).to_have_text(["One", "Two"])


def test_light_and_dark(chromium: Browser, app: ScriptedApp) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with watched_page(chromium, app.url, color_scheme="dark") as page:
        page.goto("/")
        assert page.evaluate(background) == "rgb(25, 24, 22)"
        page.click("#theme")
        assert page.evaluate(background) == "rgb(251, 250, 247)"
        page.goto("/dashboard")
        assert page.evaluate(background) == "rgb(251, 250, 247)"


def test_all_text_can_be_read(page: Page) -> None:
    """WCAG 2.2, contrast of at least 4.5 to 1."""
    contrasts = page.evaluate(
        """() => ["light", "dark"].flatMap((theme) => {
          document.documentElement.dataset.theme = theme;
          const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          const luminance = (name) => {
            canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
            canvas.fillRect(0, 0, 1, 1);
            const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
              .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
          };
          const pairs = [["--accent-ink", "--accent"], ["--danger", "--danger-wash"], ["--ink", "--accent-wash"]];
          for (const text of ["--ink", "--ink-soft", "--ink-faint", "--accent"]) {
            for (const ground of ["--paper", "--raised", "--sunken"]) pairs.push([text, ground]);
          }
          for (const part of ["keyword", "string", "number", "name", "attribute"]) {
            pairs.push([`--code-${part}`, "--sunken"]);
          }
          return pairs.map(([text, ground]) => {
            const [low, high] = [luminance(text), luminance(ground)].sort((a, b) => a - b);
            return [theme, text, ground, (high + 0.05) / (low + 0.05)];
          });
        })"""
    )
    assert [pair for pair in contrasts if pair[3] < 4.5] == []


def test_everything_has_a_name(page: Page) -> None:
    ask_to_the_end(page)
    page.click("#open-settings")
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, summary, a")]
          .filter((node) => !node.getAttribute("aria-label") && !node.textContent.trim() && !node.labels?.length)
          .map((node) => node.outerHTML)"""
    )
    assert nameless == []


def test_on_a_phone(chromium: Browser, app: ScriptedApp, engine: FakeClient) -> None:
    engine.script = Script(words(MARKDOWN + "\n" + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n"))
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with watched_page(chromium, app.url, **phone) as page:
        page.goto("/")
        ask_to_the_end(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("document.getElementById('scroll').scrollWidth") <= 360
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#open-sidebar")
        expect(page.locator("#sidebar")).to_be_visible()
        page.tap("#conversations .open")
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#open-settings")
        expect(page.locator("#temperature")).to_be_visible()


def test_with_a_real_model(chromium: Browser, server: RunningServer) -> None:
    with watched_page(chromium, server.url) as page:
        page.goto("/")
        expect(page.locator("#model")).to_have_value("smollm2")
        page.click("#open-settings")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "24")
        ask(page, "Name three colours.")
        expect(page.locator(".stats")).to_contain_text("tokens/s")
        assert answers(page).inner_text().strip()
        page.goto("/dashboard")
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator(".card >> nth=2 >> .value")).to_contain_text("% of")


def test_drafts_survive_a_reload(page: Page) -> None:
    page.fill("#prompt", "Not sent")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("Not sent")
    page.keyboard.press("Enter")
    expect(page.locator(".stats")).to_be_attached()
    page.fill("#prompt", "A second one")
    page.click("#new-chat")
    expect(page.locator("#prompt")).to_have_value("")
    page.click("#conversations .open")
    expect(page.locator("#prompt")).to_have_value("A second one")


def test_titles_can_be_changed_searched_and_are_dated(page: Page) -> None:
    ask_to_the_end(page, "Apples")
    page.click("#new-chat")
    ask_to_the_end(page, "Pears")
    page.hover("#conversations .current")
    page.click("#conversations .current .rename")
    page.keyboard.type("Fruit <b>")
    page.keyboard.press("Enter")
    expect(page).to_have_title("Fruit <b> · Octavo")
    page.reload()
    assert page.locator("#conversations .open").all_inner_texts() == ["Fruit <b>", "Apples"]
    assert re.fullmatch(r"\d\d:\d\d( [AP]M)?", page.locator("#conversations time").first.text_content() or "")
    page.fill("#search", "PEAR")  # of the messages
    expect(page.locator("#conversations .open")).to_have_text(["Fruit <b>"])
    page.fill("#search", "apple")
    expect(page.locator("#conversations .open")).to_have_text(["Apples"])
    page.fill("#search", "")
    expect(page.locator("#conversations .open")).to_have_count(2)


def test_a_branch_leaves_the_conversation_as_it_is(page: Page) -> None:
    ask_to_the_end(page, "One")
    ask_to_the_end(page, "Two")
    page.hover(".message.user >> nth=1")
    page.click(".message.user >> nth=1 >> [data-action=branch]")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator("#prompt")).to_have_value("Two")
    ask_to_the_end(page, "Three")
    assert page.locator("#conversations .open").all_inner_texts() == ["One (branch)", "One"]
    page.click("#conversations .open >> nth=1")
    expect(page.locator(".message.user .body")).to_have_text(["One", "Two"])
