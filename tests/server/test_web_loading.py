"""The chat page while models are being loaded, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page, expect

from octavo.errors import ModelLoadError
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import watched_page
from tests.support.chat_page import answers, ask, chromium, words
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import SteppedLoader, scripted_app

__all__ = ["chromium"]  # a fixture


@dataclass
class LoadingPage:
    page: Page
    loader: SteppedLoader

    def expect_note(self, text: str) -> None:
        expect(self.page.locator("#loading span")).to_have_text(text)

    def expect_no_note(self) -> None:
        expect(self.page.locator("#loading")).to_be_hidden()


@pytest.fixture
def opened(chromium: Browser, smollm2_tokenizer: Tokenizer) -> Iterator[LoadingPage]:
    """The page of a server that is still loading the first of its two models."""
    client = FakeClient(smollm2_tokenizer, Script(words("A short answer.")))
    loader = SteppedLoader(smollm2_tokenizer, client)
    with (
        scripted_app(client, smollm2_tokenizer, names=("one", "org/two"), loader=loader) as app,
        watched_page(chromium, app.url) as page,
    ):
        page.goto("/")
        yield LoadingPage(page, loader)
        loader.may_end.set()


def test_a_question_waits_for_the_start_of_the_server(opened: LoadingPage) -> None:
    opened.expect_note("Loading one: packing, 37 %")
    assert opened.page.locator("#loading progress").evaluate("bar => bar.value") == 0.375
    with opened.page.expect_response("**/v1/chat/completions") as refused:
        ask(opened.page)
        expect(opened.page.locator(".waiting")).to_be_visible()
    assert refused.value.status == 503
    expect(opened.page.locator(".failure")).to_have_count(0)
    opened.loader.may_end.set()
    expect(answers(opened.page)).to_have_text("A short answer.")
    opened.expect_no_note()


def test_choosing_another_model_loads_it(opened: LoadingPage) -> None:
    opened.loader.may_end.set()
    opened.expect_no_note()
    ask(opened.page)
    expect(answers(opened.page)).to_have_count(1)
    opened.loader.may_end.clear()
    opened.page.select_option("#model", "org/two")
    opened.expect_note("Loading org/two: packing, 37 %")
    ask(opened.page)
    expect(opened.page.locator(".waiting")).to_be_visible()
    opened.loader.may_end.set()
    expect(answers(opened.page)).to_have_count(2)
    opened.expect_no_note()
    expect(opened.page.locator("#model")).to_have_value("org/two")


def test_a_model_that_cannot_be_loaded_says_why(opened: LoadingPage) -> None:
    opened.loader.may_end.set()
    opened.expect_no_note()
    opened.loader.problem = ModelLoadError("two.gguf: not a model")
    opened.page.select_option("#model", "org/two")
    opened.expect_note("org/two could not be loaded: two.gguf: not a model")
    ask(opened.page)
    expect(opened.page.locator(".failure span")).to_contain_text("the model cannot be loaded")
    opened.page.select_option("#model", "one")
    opened.expect_no_note()
