"""Commands in README, docs and examples exist, with the options they are written with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from octavo.cli.main import octavo

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "systemd" / "octavo.service"]


def commands(text: str) -> Iterator[str]:
    """Each `octavo` command line of the fenced blocks and of inline code, without prompts, pipes and comments."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    fenced = [body for kind, body in blocks if kind in {"", "sh", "bash", "text", "console"}]
    lines = [line for block in fenced for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    lines += re.findall(r"^ExecStart=\S*/(octavo .*)$", text, re.MULTILINE)
    inline = re.findall(r"`(octavo [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [*lines, *inline]:
        if found := re.match(r"\$?\s*(?:[A-Z_]+=\S+ )*(octavo [a-z].*)", line):
            yield found[1]


def words_of(command: str) -> list[str] | None:
    """The arguments after `octavo`, up to a pipe or a redirection; None for a line that only describes commands."""
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars="|<>&;")
        lexer.whitespace_split = True
        words = list(lexer)[1:]
    except ValueError:  # an open quotation mark: the line is prose
        return None
    for at, word in enumerate(words):
        if set(word) <= set("|<>&;"):
            words = words[:at]
            break
    return [word for word in words if word != "..."]


def problem(words: list[str]) -> str | None:
    """The reason for which click refuses the options of a command."""
    group: click.Command = octavo
    context = click.Context(octavo, info_name="octavo")
    while isinstance(group, click.Group):
        if not words or words[0].startswith("-") or words[0] == "help":
            return None
        found = group.get_command(context, words[0])
        if found is None:
            return f"no command {words[0]!r}"
        group, words = found, words[1:]
    known = {name for option in group.params for name in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "--help-all", "-h", "--debug", "--config"}
    for word in words:
        if word == "--":
            break
        name = word.split("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*|-[a-z]{1,3}", name) and name not in known:
            return f"{group.name} has no option {name}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_the_page_exist(page: Path) -> None:
    found = list(commands(page.read_text()))
    problems = [f"{command}: {reason}" for command in found if (w := words_of(command)) and (reason := problem(w))]
    assert not problems


def test_a_command_that_does_not_exist_is_found() -> None:
    text = "```python\nx = 1\n```\n\n```sh\noctavo dance\noctavo run --dance 'x'\n```\n"
    [unknown, option] = commands(text)
    assert problem(words_of(unknown) or []) == "no command 'dance'"
    assert problem(words_of(option) or []) == "run has no option --dance"
