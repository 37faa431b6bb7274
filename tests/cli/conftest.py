"""Tiny models for commands, in files that every test of this folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_gguf import tiny_gguf

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and no chat template; its context is 64 tokens."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    return path


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes conversations; its vocabulary has the letters a to d."""
    path = tmp_path_factory.mktemp("model") / "tiny-chat.gguf"
    path.write_bytes(tiny_gguf({"tokenizer.chat_template": TEMPLATE}))
    return path
