"""Progress in the cell of a notebook, with a stand-in for IPython."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.loading import progress_bar
from octavo.engine.loading.progress_bar import ProgressBar
from tests.support.fake_model import use_fake_model


class Cell:
    """The content of a cell, as IPython's `display` and its handle."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(content)

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert display_id
        self.update(content, raw=raw)
        return self


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell, module = Cell(), ModuleType("IPython.display")
    module.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    return cell


def test_a_call_shows_requests_and_tokens_a_second(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_model(monkeypatch)
    with LLM("fake") as llm:
        assert any("<progress" in content["text/html"] for content in cell.shown)  # of loading
        assert not cell.shown[-1]["text/html"]
        llm.generate(["abc", "ab"], SamplingParams(max_tokens=6, ignore_eos=True))
        last = cell.shown[-1]
        assert last["text/plain"].startswith("requests: 2 of 2, ")
        assert last["text/plain"].endswith(" tokens/s")
        assert "<progress value=2 max=2></progress> 2 of 2, " in last["text/html"]
        num_shown = len(cell.shown)
        llm.generate("abc", use_tqdm=False)
        assert len(cell.shown) == num_shown


def test_bars_of_loading_vanish_and_names_are_text(cell: Cell) -> None:
    with ProgressBar(in_bytes=True, transient=True) as bar:
        bar.update("<b>", 0, 0)
        bar.update("<b>", 1 << 20, 2 << 20)
        assert any("&lt;b&gt; <progress" in content["text/html"] for content in cell.shown)
    assert cell.shown[-1] == {"text/plain": "", "text/html": ""}


def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    with ProgressBar() as bar:
        bar.update("requests", 1, 2)
        attributes: dict[str, Any] = vars(bar)
        assert attributes["_cell"] is None
