"""Loading a model for a command."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from octavo import llm
from octavo.cli.terminal import load_model
from octavo.errors import ModelLoadError


def test_garbage_is_not_collected_while_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded objects stay, so that looking through them would only delay the start, and later collections."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"no model")
    made = [[number] for number in range(1000)]
    seen = []

    def make(*_arguments: object, **_options: object) -> None:
        seen.append((gc.isenabled(), gc.get_freeze_count()))
        raise ModelLoadError("damaged")

    monkeypatch.setattr(llm, "LLM", make)
    try:
        with pytest.raises(ModelLoadError, match="damaged"):
            load_model(str(path), {}, will_chat=False)
        assert [enabled for enabled, _ in seen] == [False]
        assert gc.isenabled()
        assert gc.get_freeze_count() > seen[0][1] + len(made)
    finally:
        gc.unfreeze()
