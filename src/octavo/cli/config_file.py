"""Default option values from a TOML file, with a table for each command, for example `[serve]`.

    [serve]
    model = ["chat=qwen3:4b"]
    port = 9000
    max_num_seqs = 16

Tables are named after commands and keys after options, with `-` or `_`. An option on the command line overrides the
file, but an invalid value in the file is still an error.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from octavo import env
from octavo.errors import UsageError

_MAX_BYTES = 1 << 20


def defaults(path: Path | None, command: click.Command, commands: Collection[str]) -> dict[str, Any]:
    """Return the values for one of the commands, by option. Raises UsageError.

    path: the file, or None for the user's default file, if it exists
    """
    file = env.config_file() if path is None else path
    if path is None and not file.is_file():
        return {}
    tables = _tables(file)
    if unknown := sorted(set(tables) - set(commands)):
        raise UsageError(f"{file}: {unknown[0]!r} is not a command; use one of: {', '.join(commands)}")
    table = tables.get(command.name or "", {})
    if not isinstance(table, dict):
        raise UsageError(f"{file}: {command.name} must be a table: [{command.name}]")
    known = _keys(command)
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = [key.replace("_", "-") for key in difflib.get_close_matches(name, known, 1)]
            raise UsageError(
                f"{file}: [{command.name}] has no option {key!r}"
                + (f"; did you mean {near[0]}?" if near else f"; `octavo {command.name} --help-all` lists them")
            )
        if isinstance(value, dict):
            raise UsageError(f"{file}: [{command.name}] {key} must be a value or a list, not a table")
        values[known[name]] = value
    _check_types(file, command, values)
    return values


def _check_types(file: Path, command: click.Command, values: dict[str, Any]) -> None:
    """Raise UsageError for a value that its option does not accept."""
    context = click.Context(command, default_map=values)
    for param in command.params:
        if param.name in values:
            try:
                read_value(context, param)
            except click.BadParameter as error:
                raise UsageError(f"{file}: [{command.name}] {param.name}: {error.message}") from None


def read_value(context: click.Context, param: click.Parameter) -> Any:
    """Return the value of an option in the file, parsed as on the command line. Raises click.BadParameter."""
    value, _ = param.consume_value(context, {})
    return param.type_cast_value(context, value)


def _keys(command: click.Command) -> dict[str, str]:
    """Return parameter names by their keys in the file.

    A parameter for several words also has the key without its final s: `model` is a key for `models` of `serve`.
    """
    names = {param.name: param.name for param in command.params if param.name}
    many = [param.name for param in command.params if param.param_type_name == "argument" and param.nargs < 0]
    return {name.removesuffix("s"): name for name in many if name} | names


def _tables(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):  # here, because most users have no such file
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{file}: larger than {_MAX_BYTES >> 20} MiB; not a configuration file")
        tables: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
        return tables
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from error
