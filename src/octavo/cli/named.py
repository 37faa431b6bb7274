"""`octavo create` and `octavo cp`: your own names for models and their settings."""

from __future__ import annotations

import os
from pathlib import Path

import click

from octavo import env
from octavo.cli.completion import complete_model
from octavo.cli.terminal import write
from octavo.config import EngineConfig
from octavo.errors import UsageError


@click.command()
@click.argument("name")
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    default="Modelfile",
    show_default=True,
    metavar="FILE",
    help="path of the Modelfile",
)
def create(*, name: str, file: Path) -> None:
    """Create a named model with its own settings from a Modelfile.

    FILE is an Ollama Modelfile with the instructions FROM, PARAMETER, SYSTEM, TEMPLATE (Jinja) and ADAPTER. `run`,
    `chat`, `serve`, `show` and `LLM` accept NAME; `octavo rm` deletes it. Nothing is copied.
    """
    from octavo.loader.modelfile import read_modelfile
    from octavo.loader.named_models import NamedModel, expanded, store

    model, options = read_modelfile(file, name)
    model, options = expanded(model, options)
    _check_model(model)
    try:
        EngineConfig.resolve(model, options)
    except UsageError as error:
        raise UsageError(f"{file}: {str(error).removeprefix('override_generation_config: ')}") from error
    store(NamedModel(name, model, options))
    write(f"Created {name} from {model}. Run it with: octavo run {name}\n")


@click.command()
@click.argument("source", shell_complete=complete_model)
@click.argument("name")
def cp(*, source: str, name: str) -> None:
    """Give a model another name.

    If SOURCE is one of your own names, NAME gets its settings too. Nothing is copied.
    """
    from octavo.loader.aliases import ALIASES
    from octavo.loader.named_models import NamedModel, expanded, store

    model, options = expanded(source, {})
    if model.lower() not in ALIASES and (path := env.user_path(model)).exists():
        model = os.path.abspath(path)
    _check_model(model)
    store(NamedModel(name, model, options))
    write(f"{name} is now a name for {source}\n")


def _check_model(model: str) -> None:
    """Raise UsageError unless this is a file or a known model name. Does not use the network."""
    from octavo.loader.aliases import ALIASES
    from octavo.loader.catalogue import nearest
    from octavo.loader.references import parse

    if model.lower() in ALIASES or env.user_path(model).exists() or parse(model) is not None:
        return
    near = nearest(model, ALIASES)
    raise UsageError(f"{model}: no such file or model{f'; did you mean {near}?' if near else ''}")
