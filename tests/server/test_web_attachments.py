"""Attachments of the chat page as chips, and the text of PDF files."""

from __future__ import annotations

import pytest
from playwright.sync_api import FilePayload, Page, expect

from tests.support.chat_page import app, ask_to_the_end, chromium, engine, page
from tests.support.pdf_files import text_pdf

__all__ = ["app", "chromium", "engine", "page"]  # fixtures

NOTES: FilePayload = {"name": "a.md", "mimeType": "text/plain", "buffer": b"Some\n```\ncode\n```\n"}


def attach(page: Page, name: str, content: bytes, kind: str = "text/plain") -> None:
    page.set_input_files("#files", {"name": name, "mimeType": kind, "buffer": content})


def test_text_files_are_chips(page: Page) -> None:
    page.fill("#prompt", "Explain:")
    page.set_input_files("#files", NOTES)
    chip = page.locator("#chips .chip")
    expect(chip).to_have_text("a.md18 B")
    expect(page.locator("#prompt")).to_have_value("Explain:")
    attach(page, "b.txt", b"More" * 1000)
    expect(chip).to_have_text(["a.md18 B", "b.txt4 KiB"])
    page.get_by_label("Remove b.txt").click()
    expect(chip).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as request:
        page.click("#send")
    sent = request.value.post_data_json["messages"][0]["content"]
    assert sent == "Explain:\n\na.md:\n\n````md\nSome\n```\ncode\n```\n````"
    expect(chip).to_have_count(0)
    shown = page.locator(".message.user .file")
    expect(shown.locator("summary")).to_have_text("a.md18 B")
    expect(shown.locator("code")).to_be_hidden()
    shown.locator("summary").click()
    expect(shown.locator("code")).to_have_text("Some\n```\ncode\n```")
    expect(page.locator(".message.user .typed")).to_have_text("Explain:")
    page.reload()
    expect(shown.locator("summary")).to_have_text("a.md18 B")


def test_a_file_alone_is_a_message_and_stays_with_it(page: Page) -> None:
    expect(page.locator("#send")).to_be_disabled()
    page.set_input_files("#files", NOTES)
    page.click("#send")
    expect(page.locator(".stats")).to_be_attached()
    expect(page).to_have_title("a.md · Octavo")
    page.hover(".message.user")
    page.click(".message.user [data-action=edit]")
    page.keyboard.type("Why?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .typed")).to_have_text("Why?")
    expect(page.locator(".message.user .file summary")).to_have_text("a.md18 B")
    page.hover(".message.user")
    page.click(".message.user [data-action=branch]")
    expect(page.locator("#chips .chip")).to_have_text("a.md18 B")
    expect(page.locator("#prompt")).to_have_value("Why?")


def test_attachments_that_were_not_sent_wait_in_their_chat(page: Page) -> None:
    ask_to_the_end(page, "One")
    page.set_input_files("#files", NOTES)
    expect(page.locator("#chips .chip")).to_have_count(1)
    page.click("#new-chat")
    expect(page.locator("#chips .chip")).to_have_count(0)
    page.click("#conversations .open")
    expect(page.locator("#chips .chip")).to_have_text("a.md18 B")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("b.bin", b"\xff\x00", "b.bin is not a UTF-8 text file."),
        ("c.txt", b"x" * 600_000, "c.txt is too large (586 KiB). The limit is 512 KiB."),
        ("d.pdf", b"%PDF-1.4 nothing", "d.pdf is not a readable PDF file."),
        ("e.pdf", text_pdf(["", ""]), "e.pdf contains no text. It may be a scan."),
        (
            "f.pdf",
            text_pdf(["word " * 200 + "\nword"] * 560),
            "The text of f.pdf is too large (551 KiB). The limit is 512 KiB.",
        ),
    ],
)
def test_files_that_cannot_be_attached(page: Page, name: str, content: bytes, problem: str) -> None:
    attach(page, name, content)
    expect(page.locator("#problem")).to_have_text(problem)
    expect(page.locator("#chips .chip")).to_have_count(0)


def test_the_text_of_a_pdf_reaches_the_model(page: Page) -> None:
    attach(page, "paper.pdf", text_pdf(["The first page.\nIts end.", "", "The last page."]), "application/pdf")
    expect(page.locator("#chips .chip")).to_have_text("paper.pdf3 pages")
    page.fill("#prompt", "Summarize:")
    with page.expect_request("**/v1/chat/completions") as request:
        page.click("#send")
    sent = request.value.post_data_json["messages"][0]["content"]
    assert sent == "Summarize:\n\npaper.pdf:\n\n```\nThe first page.\nIts end.\n\nThe last page.\n```"
    expect(page.locator(".message.user .file summary")).to_have_text("paper.pdf3 pages")
