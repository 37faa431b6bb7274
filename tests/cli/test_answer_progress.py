"""The progress of a long prompt at a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from octavo.cli import terminal
from octavo.engine.loading import progress_bar
from tests.support.processes import octavo_here
from tests.support.tiny_gguf import tiny_gguf

NUM_TOKENS = 4_000


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_file_is_read_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class Bar(progress_bar.ProgressBar):
        """Shown at once. The screen changes ten times a second only: its numbers are taken here."""

        def update(self, what: str, done: int, total: int) -> None:
            super().update(what, done, total)
            if what == "reading the prompt":
                assert total == NUM_TOKENS
                counts.append(done)

    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(terminal, "_POLL_S", 0.001)
    monkeypatch.setattr(terminal, "ProgressBar", Bar)
    model, file, screen = tmp_path / "tiny.gguf", tmp_path / "long.txt", FakeTerminal()
    model.write_bytes(tiny_gguf({"llama.context_length": 1 << 13}))
    file.write_text("ab" * (NUM_TOKENS - 1))
    options = ("--raw", "--max-tokens", "2", "--max-num-batched-tokens", "64")
    result = octavo_here("run", model, "c", "-f", file, *options, stderr=screen)
    assert result.returncode == 0, screen.getvalue()
    assert counts == sorted(counts)
    assert len({count for count in counts if 0 < count < NUM_TOKENS}) > 2
    assert f"/{NUM_TOKENS}" in screen.getvalue()
