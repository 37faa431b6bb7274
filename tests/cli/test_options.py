"""The options of the commands are the fields of the configurations, with the types of their annotations."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest

from octavo.cli.options import in_flags
from octavo.cli.run import run
from octavo.cli.serve import serve
from octavo.config import EngineConfig
from octavo.server.config import ServerConfig
from tests.support.processes import octavo
from tests.support.tiny_gguf import tiny_gguf


def options_of(command: click.Command) -> dict[str, click.Option]:
    return {option.name or "": option for option in command.params if isinstance(option, click.Option)}


@pytest.mark.parametrize("command", [run, serve])
def test_every_field_of_the_engine_is_an_option(command: click.Command) -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}  # the argument
    assert names <= options_of(command).keys()


def test_every_field_of_the_server_is_an_option() -> None:
    assert {field.name for field in dataclasses.fields(ServerConfig)} <= options_of(serve).keys()


@pytest.mark.parametrize(
    ("name", "kind", "multiple"),
    [
        ("max_model_len", click.INT, False),  # int | None
        ("kv_cache_memory", click.STRING, False),  # int | str | None
        ("kv_dtype", click.STRING, False),  # one of several texts
        ("enable_prefix_caching", click.BOOL, False),
        ("temperature", click.FLOAT, False),
        ("seed", click.INT, False),
        ("stop", click.STRING, True),  # a text, or several
        ("stop_token_ids", click.INT, True),
    ],
)
def test_types_come_from_annotations(name: str, kind: click.ParamType, multiple: bool) -> None:
    option = options_of(run)[name]
    assert (option.type.name, option.multiple) == (kind.name, multiple)


def test_durations_and_repeated_options_of_the_server() -> None:
    options = options_of(serve)
    assert (options["drain"].type.name, options["drain"].multiple) == ("text", False)
    assert (options["api_key"].type.name, options["api_key"].multiple) == ("text", True)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_queue is -1", "--max-queue is -1"),
        ("host is wrong; this host is not", "--host is wrong; this host is not"),
        ("lower max_model_len to 5, or max_num_seqs.", "lower --max-model-len to 5, or --max-num-seqs."),
        ("/tmp/max_model_len.gguf: no file; --max-tokens", "/tmp/max_model_len.gguf: no file; --max-tokens"),
        ("set kv_cache_memory to 7MiB", "set --kv-cache-memory to 7MiB"),
    ],
)
def test_messages_name_flags(message: str, said: str) -> None:
    assert in_flags(message) == said


def test_the_advice_of_a_warning_can_be_typed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf({"llama.context_length": 1 << 20}))
    command = ("run", path, "--raw", "a", "--max-tokens", "1")
    result = octavo(*command, "--kv-cache-memory", "1MiB")
    advice = re.search("For the full length, use (--kv-cache-memory) (\\w+)$", result.stderr.strip())
    assert advice is not None, result.stderr
    assert octavo(*command, *advice.groups()).stderr == ""
