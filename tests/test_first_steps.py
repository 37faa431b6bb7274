"""docs/first-steps.md is what the commands show; the snippets of README run as they are typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import octavo, octavo_here
from tests.support.server import running_server
from tools.record_first_steps import PAGE, blocks, comparable, plain_text

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_each_command_is_on_the_page() -> None:
    shown = PAGE.read_text()
    for block in blocks():
        assert block.words in shown
        for line in block.lines:
            if line.typed.isprintable():
                assert line.typed in shown


def test_the_check_leaves_out_times_and_keeps_words() -> None:
    page = "$ octavo doctor\nmemory   5.86 GiB available\n```\nready 8.09 s  now\n"
    other = "$ octavo doctor\nmemory   17 GiB available\n```\nready 0.20 s  now\n"
    assert comparable(page) == comparable(other)
    assert comparable(page) != comparable(other.replace("now", "later"))


def test_the_terminal_shows_what_a_line_became() -> None:
    assert plain_text("\x1b[1mold\rnew\x1b[0m\r\n$ ") == "new\n$ "


@pytest.mark.slow
def test_the_page_is_what_the_commands_show(smollm2_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "record_first_steps.py", "--check", "--models", smollm2_path.parent.parent],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
def test_the_first_command_answers_as_readme_says() -> None:
    [block] = snippets("text")
    command, _, answer = block.partition("\n")
    typed = re.fullmatch(r'\$ octavo run --seed (\d+) "(.*)"', command)
    assert typed is not None
    assert octavo("run", "--seed", typed[1], typed[2]).stdout.strip() == answer.strip()


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
def test_the_snippet_for_python_answers() -> None:
    [code] = [code for code in snippets("python") if "from octavo" in code]
    output = run_python(code)
    assert output.startswith(" Paris")
    assert len(output.split()) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
def test_the_snippet_for_a_server_answers() -> None:
    pytest.importorskip("openai")
    [code] = [code for code in snippets("python") if "openai" in code]
    with running_server() as server:
        answer = run_python(code, OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="none")
    assert "scatter" in answer.lower(), answer


COMMANDS = [line for block in snippets("sh") for line in block.splitlines() if "octavo " in line]

# Commands that need no other model than the default one, and what they print.
RUNNABLE = {
    "octavo run smollm2": r"\w+",
    "octavo run --schema": r'"name": *"',
    "octavo list": r"smollm2 +9\d\.\d MiB",
    "octavo ps": r"PID|No server",
    "octavo plan MODEL": r"KV cache",
    "octavo show MODEL": r"architecture +llama",
    "octavo doctor": r"instruction sets",
    "octavo quantize MODEL": r"bits per weight",
    "octavo bench latency": r"time_to_first_token_s",
}


@pytest.mark.slow
@pytest.mark.parametrize("start", RUNNABLE)
def test_commands_of_readme_run_as_typed(start: str, smollm2_path: Path, tmp_path: Path) -> None:
    """MODEL is the default model; what follows a prompt that asks for much is limited by the file of options."""
    [line] = [line for line in COMMANDS if line.startswith(start)]
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    (tmp_path / "person.json").write_text(json.dumps(schema))
    for name in ("notes.txt", "text.txt"):
        (tmp_path / name).write_text("The meeting moved to Friday at ten, because the room is taken. " * 20)
    (tmp_path / "config.toml").write_text("[run]\nmax_tokens = 60\nseed = 1\n")
    typed = line.split("#")[0].replace("MODEL", str(smollm2_path))
    script = f'octavo() {{ "{sys.executable}" -m octavo --config "{tmp_path}/config.toml" "$@"; }}\n{typed}'
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert re.search(RUNNABLE[start], result.stdout), result.stdout


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_in_readme_exists(line: str) -> None:
    """Its name and its options; most of them need a model that is not here."""
    words = line.split("#")[0].split()
    words = words[words.index("octavo") :]
    help_text = octavo_here(words[1], "--help-all" if words[1] == "run" else "--help")
    assert help_text.returncode == 0, help_text.stderr
    for word in words[2:]:
        if word.startswith("--"):
            assert word in help_text.stdout
