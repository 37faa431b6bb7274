"""The chats of the page: deleted and brought back, versions and branches, answers in the background, import, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from tests.support.browser import watched_page
from tests.support.chat_page import answers, app, ask, ask_to_the_end, chromium, engine, page, wait_on, words
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import ScriptedApp

__all__ = ["app", "chromium", "engine", "page"]  # fixtures


def delete(page: Page, title: str) -> None:
    page.hover(f"#conversations li:has-text('{title}')")
    page.click(f"#conversations li:has-text('{title}') .remove")


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .open").all_inner_texts()


def ask_without_end(page: Page, engine: FakeClient, text: str) -> None:
    engine.script = Script(["Half", " an"], never_ends=True)
    ask(page, text)
    expect(answers(page).last).to_have_text("Half an")


def test_a_deletion_can_be_undone(page: Page) -> None:
    ask_to_the_end(page, "Apples")
    page.fill("#prompt", "A draft")
    page.click("#new-chat")
    ask_to_the_end(page, "Pears")
    delete(page, "Apples")
    expect(page.locator("#undo span")).to_have_text("Deleted “Apples”")
    assert titles(page) == ["Pears"]
    page.click("#undo-deletion")
    expect(page.locator("#undo")).to_be_hidden()
    assert titles(page) == ["Pears", "Apples"]
    expect(page.locator(".message.user .body")).to_have_text(["Pears"])
    delete(page, "Pears")
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#undo-deletion")
    expect(page.locator(".message.user .body")).to_have_text(["Pears"])  # it was open, so it is open again
    page.click("#conversations li:has-text('Apples') .open")
    expect(page.locator("#prompt")).to_have_value("A draft")
    delete(page, "Apples")
    page.click("#dismiss-undo")
    expect(page.locator("#undo")).to_be_hidden()
    page.reload()
    assert titles(page) == ["Pears"]


def test_a_deletion_while_the_model_answers(page: Page, engine: FakeClient) -> None:
    ask_without_end(page, engine, "Apples")
    delete(page, "Apples")
    wait_on(page, lambda: engine.streams[-1].was_aborted)
    expect(page.locator("#conversations li")).to_have_count(0)
    page.reload()  # nothing has saved it again
    expect(page.locator("#conversations li")).to_have_count(0)
    expect(page.locator("#no-conversations")).to_have_text("No chats yet.")


@pytest.mark.parametrize("way", ["shortcut", "button", "other chat"])
def test_an_answer_goes_on_while_another_chat_is_open(page: Page, engine: FakeClient, way: str) -> None:
    ask_to_the_end(page, "Apples")
    page.click("#new-chat")
    ask_without_end(page, engine, "Pears")
    if way == "shortcut":
        page.keyboard.press("Control+Shift+O")
    else:
        page.click("#new-chat" if way == "button" else "#conversations li:has-text('Apples') .open")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#conversations li:has-text('Pears') .busy")).to_be_visible()
    engine.script = Script(words("Another answer."))
    ask_to_the_end(page, "Meanwhile")
    assert not engine.streams[-2].was_aborted
    page.click("#conversations li:has-text('Pears') .open")
    expect(page.locator("#stop")).to_be_visible()
    expect(answers(page)).to_have_text("Half an")
    page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .stats")).to_contain_text("stopped")
    expect(page.locator(".busy")).to_have_count(0)
    wait_on(page, lambda: engine.streams[-2].was_aborted)


def test_an_answer_that_ends_in_the_background_is_there(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words("The whole of a slow answer."), delay_s=0.1)
    ask(page, "Pears")
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".busy")).to_be_visible()
    expect(page.locator(".busy")).to_have_count(0)
    page.click("#conversations .open")
    expect(answers(page)).to_have_text("The whole of a slow answer.")
    expect(page.locator(".stats")).not_to_contain_text("stopped")


def test_versions_of_an_answer(page: Page, engine: FakeClient) -> None:
    ask_to_the_end(page, "One")
    expect(page.locator(".versions")).to_have_count(0)
    ask_to_the_end(page, "Two")
    first = page.locator(".message.assistant").first
    engine.script = Script(words("Another answer."))
    first.locator("[data-action=again]").click()
    expect(answers(page)).to_have_text(["Another answer."])
    expect(first.locator(".versions")).to_have_text("2/2")
    ask_to_the_end(page, "Three")
    page.reload()
    first.locator("[data-action=previous]").click()
    expect(first.locator(".versions")).to_have_text("1/2")
    expect(first.locator("[data-action=next]")).to_be_focused()  # the other one has nothing to show
    expect(first.locator("[data-action=previous]")).to_be_disabled()
    expect(page.locator(".message.user .body")).to_have_text(["One", "Two"])
    expect(answers(page).first).to_have_text("A short answer.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .body")).to_have_text(["One", "Three"])
    with page.expect_request("**/v1/chat/completions") as request:
        ask_to_the_end(page, "Four")
    sent = [message["content"] for message in request.value.post_data_json["messages"]]
    assert sent == ["One", "Another answer.", "Three", "Another answer.", "Four"]


def test_versions_of_a_question(page: Page) -> None:
    ask_to_the_end(page, "One")
    user = page.locator(".message.user")
    user.hover()
    user.locator("[data-action=edit]").click()
    page.keyboard.press("Control+A")
    page.keyboard.type("Three")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .stats")).to_be_attached()
    expect(user.locator(".versions")).to_have_text("2/2")
    user.hover()
    user.locator("[data-action=previous]").click()
    expect(user.locator(".body")).to_have_text("One")
    expect(answers(page)).to_have_text("A short answer.")


def test_an_answer_that_failed_is_no_version(page: Page, engine: FakeClient) -> None:
    ask_to_the_end(page, "One")
    engine.script = Script(["Never"], refusal=None, never_ends=True)
    page.click("[data-action=again]")
    expect(answers(page)).to_have_text("Never")
    page.keyboard.press("Escape")
    expect(page.locator(".versions")).to_have_text("2/2")  # what it had written stays
    page.click(".message.assistant [data-action=previous]")
    expect(answers(page)).to_have_text("A short answer.")


def test_branches_have_titles_of_their_own(page: Page) -> None:
    ask_to_the_end(page, "One")
    ask_to_the_end(page, "Two")
    for expected in ("One (branch)", "One (branch 2)", "One (branch 3)"):
        page.hover(".message.user >> nth=1")
        page.click(".message.user >> nth=1 >> [data-action=branch]")
        expect(page).to_have_title(f"{expected} · Octavo")
        ask_to_the_end(page, "Three")
    assert titles(page) == ["One (branch 3)", "One (branch 2)", "One (branch)", "One"]


def test_an_empty_search_says_so(page: Page) -> None:
    expect(page.locator("#no-conversations")).to_have_text("No chats yet.")
    ask_to_the_end(page, "Apples")
    expect(page.locator("#no-conversations")).to_be_hidden()
    page.keyboard.press("Control+K")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("<b>pears")
    expect(page.locator("#no-conversations")).to_have_text("No chats match “<b>pears”.")
    page.fill("#search", "apple")
    expect(page.locator("#no-conversations")).to_be_hidden()


def test_the_list_of_shortcuts(page: Page, engine: FakeClient) -> None:
    ask_without_end(page, engine, "Apples")
    page.keyboard.press("Control+/")
    expect(page.locator("#shortcuts")).to_be_visible()
    for shortcut in ("New chatCtrl Shift O", "Stop the answerEsc", "SettingsCtrl ,", "Search the chatsCtrl K"):
        expect(page.locator("#shortcuts dl")).to_contain_text(shortcut)
    page.keyboard.press("Control+Shift+O")  # not while the list is open
    page.keyboard.press("Escape")
    expect(page.locator("#shortcuts")).to_be_hidden()
    expect(page.locator("#stop")).to_be_visible()  # Escape has closed the list alone
    page.click("#open-shortcuts")
    page.click("#close-shortcuts")
    expect(page.locator("#shortcuts")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()


def test_prompt_presets(page: Page) -> None:
    page.keyboard.press("Control+,")
    expect(page.locator("#preset option")).to_have_text(
        ["Custom", "Concise", "Programmer", "Proofreader", "Summarizer", "Translator"]
    )
    page.select_option("#preset", "Proofreader")
    expect(page.locator("#system")).to_have_value("""Correct the spelling, grammar and punctuation of the text. \
Keep its meaning and tone. Reply with the corrected text only.""")
    expect(page.locator("#delete-preset")).to_be_disabled()
    page.fill("#system", "Rhyme.")
    expect(page.locator("#preset")).to_have_value("")
    page.click("#save-preset")
    page.keyboard.type("Poet <b>")
    page.keyboard.press("Enter")
    expect(page.locator("#preset")).to_have_value("Poet <b>")
    page.reload()
    page.keyboard.press("Control+,")
    page.select_option("#preset", "Poet <b>")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page)
    assert request.value.post_data_json["messages"][0] == {"role": "system", "content": "Rhyme."}
    page.click("#delete-preset")
    expect(page.locator("#preset")).to_have_value("")
    expect(page.locator("#system")).to_have_value("Rhyme.")  # of this chat
    expect(page.locator("#preset option")).to_have_count(6)


def export_all(page: Page) -> dict[str, Any]:
    with page.expect_download() as download:
        page.click("#export-all")
    assert download.value.suggested_filename.startswith("octavo-chats-")
    body: dict[str, Any] = json.loads(Path(download.value.path()).read_text())
    return body


def give(page: Page, name: str, body: object) -> None:
    buffer = body if isinstance(body, bytes) else json.dumps(body).encode()
    file: FilePayload = {"name": name, "mimeType": "application/json", "buffer": buffer}
    page.set_input_files("#import-files", file)


def test_all_chats_move_to_another_browser(page: Page, chromium: Browser, app: ScriptedApp, engine: FakeClient) -> None:
    page.keyboard.press("Control+,")
    page.fill("#system", "Rhyme.")
    page.click("#save-preset")
    page.keyboard.type("Poet")
    page.keyboard.press("Enter")
    page.set_input_files("#files", {"name": "a.md", "mimeType": "text/plain", "buffer": b"Some text"})
    ask_to_the_end(page, "Apples")
    engine.script = Script(words("Another answer."))
    page.click("[data-action=again]")
    expect(page.locator(".versions")).to_have_text("2/2")
    page.click("#new-chat")
    ask_to_the_end(page, "Pears")
    exported = export_all(page)
    expect(page.locator("#library-result")).to_have_text("Exported 2 chats.")
    with watched_page(chromium, app.url) as other:
        other.goto("/")
        other.keyboard.press("Control+,")
        give(other, "chats.json", exported)
        expect(other.locator("#library-result")).to_have_text("Imported 2 chats from chats.json.")
        assert titles(other) == ["Pears", "Apples"]
        expect(other.locator("#preset option").nth(1)).to_have_text("Poet")
        other.click("#conversations li:has-text('Apples') .open")
        expect(other.locator(".message .file .chip-name")).to_have_text("a.md")
        expect(other.locator(".versions")).to_have_text("2/2")
        assert export_all(other) == exported
        give(other, "chats.json", exported)
        expect(other.locator("#library-result")).to_have_text(
            "Imported 0 chats from chats.json. 2 chats were already here."
        )


def test_what_is_imported_is_checked(page: Page) -> None:
    page.keyboard.press("Control+,")
    for broken in (b"{", b"3", {"conversations": 3}, b"\xff\xfe"):
        give(page, "a.json", broken)
        expect(page.locator("#library-result")).to_have_text("a.json is not a file of exported chats.")
        page.evaluate("document.getElementById('library-result').textContent = ''")
    good = {"role": "user", "content": "Hi"}
    picture = {"name": "x", "url": "https://elsewhere.example/x.png"}
    damaged: list[Any] = [
        3,
        None,
        {"title": "no messages"},
        {"messages": [{"role": "admin", "content": "x"}]},
        {"messages": [{**good, "content": 3}]},
        {"messages": [{**good, "images": [picture]}]},
        {"messages": [{**good, "versions": {"at": 0, "tails": [None, []]}}]},
        {"messages": [{**good, "versions": {"at": 0, "tails": [[good], [good]]}}]},
    ]
    single = {"title": "<b>One", "messages": [good, {"role": "assistant", "content": "Ho", "junk": 1}], "updated": "x"}
    give(page, "b.json", [*damaged, single])
    expect(page.locator("#library-result")).to_have_text(
        "Imported 1 chat from b.json. Skipped 8 entries that are not chats."
    )
    assert titles(page) == ["<b>One"]
    page.click("#conversations .open")
    expect(answers(page)).to_have_text("Ho")


def test_a_newer_copy_of_the_open_chat_is_shown(page: Page) -> None:
    ask_to_the_end(page, "Apples")
    page.keyboard.press("Control+,")
    exported = export_all(page)
    [chat] = exported["conversations"]
    chat["updated"] += 1000
    chat["messages"][1]["content"] = "From elsewhere."
    preset = {"name": "Poet", "text": "Rhyme."}
    give(page, "a.json", {"conversations": [chat], "presets": [preset, {**preset, "text": "Sing."}]})
    expect(answers(page)).to_have_text("From elsewhere.")
    expect(page.locator("#preset option")).to_have_count(7)
    page.fill("#system", "Sing.")
    assert export_all(page)["conversations"][0]["messages"][1]["content"] == "From elsewhere."
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    page.click("#save-preset")
    page.keyboard.type("Singer")
    page.keyboard.press("Enter")
    expect(page.locator("#preset-result")).to_have_text("The browser's storage is full: the preset could not be saved.")
    expect(page.locator("#preset option")).to_have_count(7)
    give(page, "b.json", {"conversations": [], "presets": [{**preset, "name": "Other"}]})
    expect(page.locator("#library-result")).to_have_text(
        "Imported 0 chats from b.json. The browser's storage is full: the presets could not be saved."
    )


def test_a_single_exported_chat_can_be_imported(page: Page) -> None:
    ask_to_the_end(page, "Apples")
    page.click("#export-menu summary")
    with page.expect_download() as download:
        page.click("#export-json")
    page.keyboard.press("Control+,")
    give(page, "apples.json", Path(download.value.path()).read_bytes())
    expect(page.locator("#library-result")).to_have_text("Imported 1 chat from apples.json.")
    assert titles(page) == ["Apples", "Apples"]


def test_a_full_storage_is_told(page: Page) -> None:
    page.evaluate("localStorage.setItem('filler', 'x'.repeat(5 * 1024 * 1024 - 600))")
    ask(page, "word " * 400)
    expect(page.locator("#problem")).to_contain_text("The browser's storage is full")
