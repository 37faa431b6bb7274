"""`octavo --install-completion`: Tab completion of commands, options and model names."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from octavo import env
from octavo.errors import ModelWriteError, UsageError

_VARIABLE = env.COMPLETION_VARIABLE
# Where each shell looks for completions, and the next step for the user.
_FILES = {
    "bash": ("~/.local/share/bash-completion/completions/octavo", "it needs the bash-completion package"),
    "zsh": ("~/.zfunc/_octavo", "add `fpath+=~/.zfunc` before `compinit` in ~/.zshrc"),
    "fish": ("~/.config/fish/completions/octavo.fish", ""),
}


def install_completion(command: click.Command, shell: str | None) -> str:
    """Write a shell's completion script and return a message about it. Raises UsageError.

    shell: name of the shell, or None to read it from $SHELL
    """
    name = shell or env.shell()
    found = get_completion_class(name)
    if name not in _FILES or found is None:
        raise UsageError(f"--install-completion: shell {name!r} is not supported; give bash, zsh or fish")
    file, remark = _FILES[name]
    path = env.user_path(file)
    script = found(command, {}, "octavo", _VARIABLE).source()
    from octavo.loader.atomic_file import write_text  # imports numpy, which completion does not need

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, script)
    except OSError as error:
        raise UsageError(f"--install-completion: {path}: {error.strerror}") from error
    except ModelWriteError as error:
        raise UsageError(f"--install-completion: {error}") from error
    return f"Wrote {path}{f'; {remark}' if remark else ''}. New shells complete `octavo`."


def answer_shell(command: click.Command, instruction: str) -> int:
    """Answer a request of the shell's completion script on standard output, and return the exit code."""
    return shell_complete(command, {}, "octavo", _VARIABLE, instruction)


def complete_model(_: click.Context, __: click.Parameter, beginning: str) -> list[CompletionItem]:
    """Return the model names that begin with the typed text, or let the shell complete a file name if there are
    none.
    """
    from octavo.loader.aliases import ALIASES
    from octavo.loader.catalogue import catalogue
    from octavo.loader.library import installed
    from octavo.loader.named_models import every

    names = dict.fromkeys(
        [*(named.name for named in every()), *(model.name for model in installed()), *ALIASES, *catalogue()]
    )
    found = [CompletionItem(name) for name in names if name.startswith(beginning)]
    return found or [CompletionItem(beginning, type="file")]
