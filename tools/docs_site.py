"""An mkdocs hook (`mkdocs.yml`) that generates pages of the documentation site from the code.

`make docs` serves the site on this machine. The command reference comes from click, the options from the configuration
classes, the Python interface from docstrings, HTTP from the OpenAPI document, and the list of files from the first
sentence of each file.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import octavo  # noqa: E402
from octavo.cli.main import octavo as command_line  # noqa: E402
from octavo.config import EngineConfig  # noqa: E402
from octavo.server.app import build_app, route_modules  # noqa: E402
from octavo.server.config import ServerConfig  # noqa: E402
from tools.file_sentences import first_sentence, source_files  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/commands.md": commands(),
        "reference/options.md": options(),
        "reference/python.md": python_interface(),
        "reference/http.md": http_routes(),
        "internals/files.md": files_by_folder(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def commands() -> str:
    """Return the help text of every command."""
    parent = click.Context(command_line, info_name="octavo")
    parts = [
        "# Commands",
        "`octavo COMMAND --help-all` (or `--help`) prints the same text.",
    ]
    for name, command in _flat_commands(command_line, parent, "octavo"):
        context = click.Context(command, info_name=name, max_content_width=96, terminal_width=96)
        context.meta["octavo.full_help"] = True
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


def _flat_commands(group: click.Group, context: click.Context, prefix: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{prefix} {name}", command
        if isinstance(command, click.Group):
            yield from _flat_commands(command, click.Context(command, parent=context), f"{prefix} {name}")


def options() -> str:
    """Return every field of the engine's and the server's configuration, with its default and its help."""
    return (
        "# Options\n\n"
        "Each option is a flag (`--max-model-len`) and a key of a configuration file (`max_model_len`).\n\n"
        f"## Engine\n\nThese are also keywords of `LLM`.\n\n{_fields(EngineConfig)}\n\n"
        f"## Server\n\n{_fields(ServerConfig)}\n"
    )


def _fields(config: Any) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        default = "" if field.default in (None, (), dataclasses.MISSING) else f"`{field.default}`"
        rows.append(f"| `{field.name}` | {default} | {_cell(field.metadata.get('help', ''))} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def python_interface() -> str:
    """Return the public names of the package, documented by mkdocstrings."""
    parts = [
        "# Python interface",
        "The names on this page are stable, with their arguments and fields: a patch release (0.1.1) changes none of "
        "them. Before 1.0 a minor release (0.2) may; what it removes or renames keeps working for one more minor "
        "release, with a warning that names its replacement. Everything else in the package is internal.",
    ]
    for name in octavo.__all__:
        value = getattr(octavo, name)
        if inspect.isclass(value):
            parts.append(f"::: {value.__module__}.{value.__qualname__}\n    options:\n      heading_level: 2")
    return "\n\n".join(parts) + "\n"


def http_routes() -> str:
    """Return every route of the server, from its OpenAPI document."""
    app = build_app(ServerConfig(), route_modules(), lambda *_: None)
    parts = ["# HTTP interface", "A running server has the whole document at `/openapi.json` and shows it at `/docs`."]
    rows = ["| method | path | |", "|---|---|---|"]
    for path, operations in sorted(app.openapi()["paths"].items()):
        for method, operation in operations.items():
            about = (operation.get("description") or operation.get("summary") or "").split("\n\n")[0]
            rows.append(f"| {method.upper()} | `{path}` | {_cell(about)} |")
    return "\n\n".join([*parts, "\n".join(rows)]) + "\n"


def files_by_folder() -> str:
    """Return the first sentence of every source file, by folder."""
    parts, folder = ["# Source files"], ""
    for path in source_files(ROOT):
        if not (about := first_sentence(path)):
            continue
        if path.parent.relative_to(ROOT).as_posix() != folder:
            folder = path.parent.relative_to(ROOT).as_posix()
            parts.append(f"## {folder}\n")
        parts.append(f"- `{path.name}`: {about}")
    return "\n".join(parts) + "\n"
