"""`octavo cache`: manage the prompts kept by `--prompt-cache-dir`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.terminal import is_terminal, write, write_json, write_table
from octavo.engine.loading.progress_bar import size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.engine.kv.disk_store import KeptFolder

_FOLDER = click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")


@click.group()
def cache() -> None:
    """List or delete the prompts that `octavo serve` keeps on disk.

    DIR is the folder of `octavo serve --prompt-cache-dir DIR`.
    """


@cache.command("list")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="write JSON")
def list_kept(*, folder: Path, as_json: bool) -> None:
    """List the models with prompts in DIR: size, last write and folder."""
    from octavo.loader.library import age

    folders = _folders(folder)
    if as_json:
        found = [
            {"model": f.label, "bytes": f.num_bytes, "written": f.written_at, "path": str(f.path)} for f in folders
        ]
        write_json(found)
    elif not folders:
        write(f"No prompts are kept in {folder}.\n")
    else:
        write_table(
            [
                {"MODEL": f.label or "?", "SIZE": size(f.num_bytes), "WRITTEN": age(f.written_at), "PATH": str(f.path)}
                for f in folders
            ]
        )
        write(f"{size(sum(each.num_bytes for each in folders))} in total\n")


@cache.command()
@_FOLDER
@click.option("-y", "--yes", is_flag=True, help="do not ask")
def clear(*, folder: Path, yes: bool) -> None:
    """Delete all prompts in DIR, except those of running models."""
    folders = _folders(folder)
    total = size(sum(each.num_bytes for each in folders))
    if folders and not yes:
        if not is_terminal(sys.stdin):
            raise UsageError(f"deleting {total} needs confirmation: run at a terminal, or give --yes")
        click.confirm(f"Delete the prompts of {len(folders)} models ({total})?", abort=True, err=True)
    for each in folders:
        what = f"{each.label or each.path.name} ({size(each.num_bytes)})"
        write(f"deleted {what}\n" if each.clear() else f"kept {what}: a running model uses it\n")


def _folders(root: Path) -> list[KeptFolder]:
    from octavo.engine.kv.disk_store import KeptFolder

    if not root.is_dir():
        raise UsageError(f"{root} is not a folder; give the folder of --prompt-cache-dir")
    return KeptFolder.all(root)
