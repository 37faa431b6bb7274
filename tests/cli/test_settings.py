"""Short and full help, the configuration file, completion."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import octavo, octavo_here
from tests.support.server import start_server


def test_the_short_help_has_the_common_options() -> None:
    short, full = octavo_here("run", "-h").stdout, octavo_here("run", "--help-all").stdout
    assert "--temperature" in short
    assert "--pack-cache" not in short
    assert "Engine:" not in short
    assert "--help-all" in short
    assert [line for line in full.splitlines() if line.endswith(":") and line[0] != " "] == [
        "Options:",
        "Engine:",
        "Sampling:",
    ]
    assert "--pack-cache" in full
    assert "Server:" in octavo_here("serve", "--help-all").stdout
    assert "--help-all" not in octavo_here("doctor", "-h").stdout


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "octavo" / "config.toml"
    file.parent.mkdir()
    file.write_text('[run]\ntemperature = 0\nmax-tokens = 3\nstop = ["x"]\n[serve]\nport = 0\nmax_num_seqs = 3\n')
    return file


def test_the_users_own_file(settings: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(settings.parent.parent))
    run = ("run", tiny, "ab", "--raw", "--ignore-eos", "--json")
    assert len(json.loads(octavo_here(*run).stdout)["token_ids"]) == 3
    assert len(json.loads(octavo_here(*run, "--max-tokens", "5").stdout)["token_ids"]) == 5


def test_a_file_that_is_named(settings: Path, tiny: Path) -> None:
    run = ("run", tiny, "ab", "--raw", "--ignore-eos", "--json")
    for words in (("--config", settings, *run), (*run, "--config", settings)):
        assert len(json.loads(octavo_here(*words).stdout)["token_ids"]) == 3


def test_the_server_reads_it(settings: Path, smollm2_path: Path) -> None:
    settings.write_text(settings.read_text() + f'model = "{smollm2_path}"\n')
    server = start_server("--config", settings)
    try:
        server.wait_ready()
        server.wait_for_line("up to 3 sequences")
        assert server.stop() == 0
    finally:
        server.kill()


def test_the_model_of_the_file_is_a_default(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(f'[run]\nmodel = "{tiny}"\n')
    run = ("--raw", "--json", "--max-tokens", "1", "--config", file)
    assert json.loads(octavo_here("run", "ab", *run).stdout)["prompt"] == "ab"
    file.write_text('[run]\nmodel = "other.gguf"\n[serve]\nmodel = "other.gguf"\n')
    for named in ((tiny, "ab"), ("-m", tiny, "ab"), (tiny, "-p", "ab")):
        assert json.loads(octavo_here("run", *named, *run).stdout)["prompt"] == "ab"
    refused = octavo_here("serve", "-m", tiny, "--data-parallel-size", "2", "--in-process", "--config", file)
    assert "with --in-process, which runs one engine" in refused.stderr


def test_words_behind_two_dashes_are_no_options(tiny: Path) -> None:
    answer = octavo_here("run", "--raw", "--json", "--max-tokens", "2", tiny, "--", "--config")
    assert json.loads(answer.stdout)["prompt"] == "--config"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\ntemprature = 1\n", "[run] has no option 'temprature'; did you mean temperature?"),
        ("[run]\nmax_token = 3\n", "[run] has no option 'max_token'; did you mean max-tokens?"),
        ("[run]\nzzz = 1\n", "`octavo run --help-all` lists them"),
        ("[rum]\n", "'rum' is not a command; use one of: run, "),
        ("[run]\ntemperature = 9\n", "temperature is 9"),
        ("[run]\ntemperature = 'warm'\n", "'warm' is not a valid float"),
        ("run = 3\n", "run must be a table"),
        ("[run.stop]\na = 1\n", "must be a value or a list"),
        ("[run\n", "not valid TOML"),
        (None, "No such file"),
    ],
)
def test_wrong_files(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    if text is not None:
        file.write_text(text)
    outcome = octavo_here("run", "smollm2", "Hi", "--config", file)
    assert (outcome.returncode, said in outcome.stderr) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("temperature = 9", ("--temperature", "0"), "temperature is 9"),
        ("temperature = 'warm'", ("--temperature", "0"), "'warm' is not a valid float"),
        ("max_tokens = 0", ("--max-tokens", "1"), "max-tokens is 0"),
        ("kv-cache-memory = 'much'", ("--kv-cache-memory", "16MiB"), "kv-cache-memory is 'much'"),
        ("block-size = 5", ("--block-size", "16"), "block-size is 5"),
    ],
)
def test_wrong_values_are_errors_though_the_command_line_wins(
    text: str, words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(f"[run]\n{text}\n")
    outcome = octavo_here("run", "smollm2", "Hi", "--config", file, *words)
    assert (outcome.returncode, said in outcome.stderr) == (2, True), outcome.stderr
    assert "onfiguration" in outcome.stderr or str(file) in outcome.stderr


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("port = 99999", ("--port", "0"), "port is 99999"),
        ("drain = 'soon'", ("--drain", "1s"), "drain is 'soon'"),
        ("cors-origin = ['example.com']", ("--cors-origin", "*"), "cors-origin is 'example.com'"),
        ("temperature = -1", ("--temp", "0"), "temperature is -1"),
        ("max_num_seqs = 0", ("--max-num-seqs", "1"), "max-num-seqs is 0"),
    ],
)
def test_wrong_values_of_a_server_are_errors_too(text: str, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(f"[serve]\n{text}\n")
    outcome = octavo_here("serve", tmp_path / "nothing.gguf", "--config", file, *words)
    assert (outcome.returncode, said in outcome.stderr) == (2, True), outcome.stderr


def test_values_that_are_right_only_beside_each_other(tiny: Path, tmp_path: Path) -> None:
    """Options that need each other may be divided between the file and the command line."""
    file = tmp_path / "octavo.toml"
    run = ("run", tiny, "ab", "--raw", "--json", "--max-tokens", "1", "--config", file)
    file.write_text("[run]\nmax-num-batched-tokens = 32\nmax-num-seqs = 16\n")
    assert octavo_here(*run, "--max-num-batched-tokens", "64").returncode == 0
    assert octavo_here(*run, "--max-num-seqs", "32").returncode == 0
    file.write_text("[run]\nmax-num-batched-tokens = 32\n")
    assert octavo_here(*run, "--max-num-batched-tokens", "64", "--max-num-seqs", "16").returncode == 0


def test_completion(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "SHELL": "/bin/bash", "OCTAVO_CACHE": str(tmp_path)}
    said = octavo("--install-completion", env=env).stdout
    script = tmp_path / ".local/share/bash-completion/completions/octavo"
    assert str(script) in said
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0

    def completed(words: str) -> list[str]:
        asked = {"_OCTAVO_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return octavo(env={**env, **asked}).stdout.split()

    assert completed("octavo ru") == ["plain,run"]
    assert completed("octavo run qwen3:0") == ["plain,qwen3:0.6b"]
    assert "plain,--max-num-seqs" in completed("octavo serve --max-n")
    assert completed("octavo run ./mod") == ["file,./mod"]
    for shell in ("zsh", "fish"):
        assert octavo("--install-completion", "--shell", shell, env=env).returncode == 0
    assert "give bash, zsh or fish" in octavo("--install-completion", "--shell", "tcsh", env=env).stderr
