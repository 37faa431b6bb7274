"""The JSON that commands write: keys are names for programs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from octavo.backends.cpu import ceilings
from octavo.cli.main import octavo
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.disk_store import open_disk_store
from octavo.server.registry import registered
from tests.support.processes import octavo_here

SHORT = ("--input-len", "4", "--output-len", "4", "--iterations", "1")
# Every command with `--json`, and the rest of its line. MODEL is a tiny one.
COMMANDS = {
    "bench latency": ("MODEL", *SHORT),
    "bench profile": ("MODEL", "--rows", "1", "--prefill", "4", "--context", "4", "--iterations", "1"),
    "bench speculation": ("MODEL", "--turns", "1", "--output-len", "4", "--max-model-len", "256"),
    "bench throughput": ("MODEL", *SHORT, "--num-prompts", "2"),
    "cache list": ("OUT",),
    "compare": ("MODEL", "--window", "32", "--turns", "0"),
    "convert": ("MODEL", "OUT/float.gguf", "--dtype", "f32"),
    "doctor": (),
    "eval": ("MODEL", "--window", "32", "--tokens", "64"),
    "finetune": ("MODEL", "--data", "OUT/data.jsonl", "-o", "OUT/adapter", "--epochs", "1"),
    "list": (),
    "list --all": (),
    "plan": ("MODEL",),
    "ps": (),
    "quantize": ("MODEL", "small.gguf", "--type", "q4_0", "--dry-run"),
    "run": ("MODEL", "ab", "--raw", "--max-tokens", "2", "--logprobs", "2"),
    "show": ("MODEL",),
}


def with_json(name: str, command: click.Command) -> Iterator[str]:
    """The commands at or below one that take `--json`."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from with_json(f"{name} {below}".strip(), command.get_command(context, below) or command)
    elif any("--json" in param.opts for param in command.params):
        yield name


def keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(below)


def test_every_command_with_json_is_here() -> None:
    assert sorted(with_json("", octavo)) == sorted(COMMANDS.keys() - {"list --all"})


@pytest.mark.parametrize("command", COMMANDS)
def test_no_key_has_spaces(command: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ceilings, "ROUNDS", 1)
    monkeypatch.setattr(ceilings, "_SHORT_ROUNDS", 1)
    monkeypatch.setattr(ceilings, "_BEYOND_CACHES", 1 << 20)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    words = [str(tiny) if word == "MODEL" else word.replace("OUT", str(tmp_path)) for word in COMMANDS[command]]
    (tmp_path / "data.jsonl").write_text('{"text": "ab"}\n')
    if command == "cache list":
        store = open_disk_store(tmp_path, CacheIdentity(b"tiny", b"layout"), 1 << 20, "tiny")
        assert store is not None
        store.save(bytes(32), np.zeros(3000, np.uint8))
        store.close()
    with registered("http://127.0.0.1:1", ("tiny",), time.time()):
        result = octavo_here(*command.split(), *words, "--json")
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    assert value or command == "list"
    if command == "ps":
        assert [server["pid"] for server in value] == [os.getpid()]
    # Names of models and of formats are keys too; letters and what such names are made of.
    assert [key for key in keys(value) if not re.fullmatch(r"[\w.:-]+", key)] == []
