"""The options of the commands are the fields of the configurations, with the types of their annotations."""

from __future__ import annotations

import dataclasses

import click
import pytest

from octavo.cli.run import run
from octavo.cli.serve import serve
from octavo.config import EngineConfig
from octavo.server.config import ServerConfig


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
