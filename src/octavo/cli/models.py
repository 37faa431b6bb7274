"""`octavo pull`, `octavo list` and `octavo rm`: manage the models on this machine."""

from __future__ import annotations

import os
from typing import Any

import click

from octavo import env
from octavo.cli.completion import complete_model
from octavo.cli.terminal import find_model, is_terminal, write, write_json, write_table
from octavo.engine.loading.progress_bar import size
from octavo.errors import UsageError


@click.command()
@click.argument("models", shell_complete=complete_model, nargs=-1, required=True, metavar="MODEL...")
@click.option("--revision", help="branch, tag or commit of the repository [default: the newest]")
def pull(*, models: tuple[str, ...], revision: str | None) -> None:
    """Download or update models.

    MODEL is a short name (`octavo list --all`), a hub id such as org/name or org/name:Q4_K_M, or a hub URL.
    """
    for model in models:
        path, _ = find_model(model, {"revision": revision}, refresh=True)
        write(f"{model}: {path}\n")


@click.command("list")
@click.option("--all", "every", is_flag=True, help="list all short names and their repositories instead")
@click.option("--json", "as_json", is_flag=True, help="write JSON")
def list_models(*, every: bool, as_json: bool) -> None:
    """List the models on this machine.

    Shows downloaded models, your own GGUF files that you have used, and names made by `octavo create` or `octavo cp`.
    """
    from octavo.loader.library import age, installed
    from octavo.loader.named_models import every as every_name

    if every:
        return _list_names(as_json)
    models, named = installed(), every_name()
    if as_json:
        own = [{"name": m.name, "bytes": None, "used": None, "path": m.model} for m in named]
        write_json([*own, *[{"name": m.name, "bytes": m.nbytes, "used": m.used, "path": str(m.path)} for m in models]])
    elif not models and not named:
        write("No models yet. `octavo run` downloads smollm2; `octavo list --all` shows the short names.\n")
    else:
        rows = [{"NAME": m.name, "SIZE": "", "USED": "", "PATH": f"made from {m.model}"} for m in named]
        rows += [
            {"NAME": m.name, "SIZE": size(m.nbytes), "USED": age(m.used), "PATH": "" if m.is_own else str(m.path)}
            for m in models
        ]
        write_table(rows, right=("SIZE",))
        write(f"{size(sum(m.nbytes for m in models))} in total\n")
    return None


@click.command()
@click.argument("names", shell_complete=complete_model, nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
def rm(*, names: tuple[str, ...], yes: bool) -> None:
    """Delete downloaded models. NAME is a name from `octavo list`, or a short name.

    Your own files are only removed from the list. Deleting a name made by `octavo create` or `cp` keeps its model.
    """
    import sys

    from octavo.loader.hub import label_of
    from octavo.loader.library import installed, remove
    from octavo.loader.named_models import every as every_name
    from octavo.loader.named_models import find as find_named
    from octavo.loader.named_models import remove as forget

    known = {model.name: model for model in installed()}
    by_path = {str(model.path): model for model in known.values() if model.is_own}
    own = [named for name in names if (named := find_named(name)) is not None]
    chosen: list[Any] = []
    for name in names:
        if find_named(name) is not None:
            continue
        path = os.path.abspath(env.user_path(name))
        model = known.get(name) or known.get(label_of(name) or "") or by_path.get(path)
        if model is None:
            there = [*(named.name for named in every_name()), *known]
            raise UsageError(f"there is no model {name!r}; available: {', '.join(there) or 'none'}")
        chosen.append(model)
    total = size(sum(model.nbytes for model in chosen if not model.is_own))
    if not yes and not all(model.is_own for model in chosen):
        if not is_terminal(sys.stdin):
            raise UsageError(f"deleting {total} needs confirmation: run at a terminal, or give --yes")
        listed = ", ".join(model.name for model in chosen if not model.is_own)
        click.confirm(f"Delete {listed} ({total})?", abort=True, err=True)
    for named in own:
        forget(named.name)
        write(f"deleted the name {named.name}; {named.model} is kept\n")
    for model in chosen:
        remove(model)
        if model.is_own:
            write(f"removed {model.name} from the list; the file is kept\n")
        else:
            write(f"deleted {model.name} ({size(model.nbytes)})\n")


def _list_names(as_json: bool) -> None:
    from octavo.loader.aliases import ALIASES
    from octavo.loader.catalogue import catalogue

    names = {**{name: alias.repository for name, alias in ALIASES.items()}, **catalogue()}
    if as_json:
        return write_json(names)
    write_table([{"NAME": name, "REPOSITORY": repository} for name, repository in names.items()])
    write("Add a type if you like: qwen3:4b-q8_0. The default is Q4_K_M if the repository has it.\n")
    return None
