"""The dashboard in a real browser."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.browser import browser, watched_page
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import scripted_app
from tests.support.server import RunningServer
from tests.support.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


def read_until(url: str, is_seen: threading.Event) -> None:
    """An answer that runs until it was looked at."""
    body = {**CHAT, "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
        for _ in answer.iter_bytes():
            if is_seen.is_set():
                return


def test_it_shows_what_runs_now(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    engine = FakeClient(smollm2_tokenizer, Script([" word"] * 20, delay_s=0.01), max_model_len=4096)
    with scripted_app(engine, smollm2_tokenizer) as app, watched_page(chromium, app.url) as page:
        for _ in range(3):
            httpx.post(app.url + "/v1/chat/completions", json=CHAT)
        page.goto("/dashboard")
        requests = page.locator(".card").first
        expect(page.locator("#state")).to_have_text("Ready")
        expect(requests.locator(".value")).to_have_text("0of 16 running")
        engine.script = Script([" word"] * 2000, delay_s=0.1)
        is_seen = threading.Event()
        senders = [threading.Thread(target=read_until, args=(app.url, is_seen), daemon=True) for _ in range(2)]
        for sender in senders:
            sender.start()
        try:
            expect(requests.locator(".value")).to_have_text("2of 16 running")
            # Two streams of ten tokens a second, on a machine that may be busy.
            rate = re.compile(r"^([5-9]|1\d|2[0-5])(\.\d)?tokens/s$")
            expect(page.locator(".card >> nth=1 >> .value")).to_have_text(rate)
            expect(page.locator(".card >> nth=4 >> .value")).to_contain_text("ms median")
            assert page.locator(".card >> nth=0 >> path.line").count() == 2
            expect(page.locator("#totals div", has_text="Answers").locator("dd")).to_have_text("3")
        finally:
            is_seen.set()
        for sender in senders:
            sender.join(60)
        expect(requests.locator(".value")).to_have_text("0of 16 running")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_asks_for_the_key(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    config = ServerConfig(api_key=("sesame",))
    engine = FakeClient(smollm2_tokenizer)
    with scripted_app(engine, smollm2_tokenizer, config) as app, watched_page(chromium, app.url) as page:
        page.goto("/dashboard")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator("#key-form")).to_be_hidden()


def test_a_server_that_is_gone_is_said(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    engine = FakeClient(smollm2_tokenizer)
    with scripted_app(engine, smollm2_tokenizer) as app, watched_page(chromium, app.url) as page:
        page.goto("/dashboard")
        expect(page.locator("#state")).to_have_text("Ready")
        page.context.set_offline(True)
        expect(page.locator("#state")).to_have_text("Unreachable")
        page.context.set_offline(False)
        expect(page.locator("#state")).to_have_text("Ready")


def test_quantiles(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    with scripted_app(FakeClient(smollm2_tokenizer), smollm2_tokenizer) as app, watched_page(chromium, app.url) as page:
        page.goto("/dashboard")
        found = page.evaluate(
            """async () => {
              const { quantile } = await import("/web/charts.js");
              const histogram = (...counts) => ({ bounds: [1, 2, 4], counts });
              return [
                quantile(histogram(0, 0, 0, 0), 0.5), quantile(histogram(10, 0, 0, 0), 0.5),
                quantile(histogram(5, 5, 0, 0), 0.75), quantile(histogram(0, 0, 0, 7), 0.99),
                quantile(histogram(0, 0, 4, 0), 1),
              ];
            }"""
        )
    assert found == [None, 0.5, 1.5, 4, 4]


def test_the_data_costs_the_engine_nothing(smollm2_tokenizer: Tokenizer) -> None:
    engine = FakeClient(smollm2_tokenizer)

    async def asked() -> dict[str, object]:
        raise AssertionError("the dashboard asked the engine")

    engine.metrics = asked  # type: ignore[method-assign]
    with scripted_app(engine, smollm2_tokenizer) as app:
        data = httpx.get(app.url + "/dashboard/data").json()
    (model,) = data["models"]
    assert (model["name"], model["state"], model["max_num_seqs"]) == ("scripted", "ready", 16)
    assert len(model["time_to_first_token"]["counts"]) == len(model["time_to_first_token"]["bounds"]) + 1


def test_it_shows_the_last_15_minutes_at_once(chromium: Browser, smollm2_tokenizer: Tokenizer) -> None:
    with scripted_app(FakeClient(smollm2_tokenizer), smollm2_tokenizer) as app, watched_page(chromium, app.url) as page:
        now = httpx.get(app.url + "/dashboard/data").json()
        for age in range(1000, 0, -5):
            model = {**now["models"][0], "num_running": 3, "num_generated_tokens": 20 * (1000 - age)}
            sample = {"time_s": now["time_s"] - age, "uptime_s": 2000 - age, "models": [model]}
            app.state.history.add(sample)
        app.state.started_at -= 2000
        data = httpx.get(app.url + "/dashboard/data?history=true").json()
        assert len(data["history"]) == 180
        assert "history" not in httpx.get(app.url + "/dashboard/data").json()
        page.goto("/dashboard")
        tokens = page.locator(".card >> nth=1")
        expect(tokens.locator(".axis span").first).to_have_text("15 min ago")
        assert len((tokens.locator("path.line.s1").get_attribute("d") or "").split("L")) > 170
        assert tokens.locator(".top").inner_text() == "20 tokens/s"


def test_a_server_keeps_the_series(server: RunningServer) -> None:
    def two_samples() -> Any:
        history = httpx.get(server.url + "/dashboard/data?history=true").json()["history"]
        return history if len(history) >= 2 else None

    samples = wait_until(two_samples, seconds=30)
    assert 4 < samples[1]["time_s"] - samples[0]["time_s"] < 15
