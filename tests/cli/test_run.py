"""`octavo run` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.run import _summary, _words
from octavo.loader.aliases import ALIASES
from octavo.loader.catalogue import FAMILIES, catalogue
from octavo.outputs import RequestMetrics
from tests.support.processes import COMMAND, Terminal, octavo, octavo_here
from tests.support.tiny_gguf import tiny_gguf

GREEDY = ("--temperature", "0", "--max-tokens", "8")


def test_one_word_is_the_prompt_of_the_default_model(smollm2_path: Path) -> None:
    assert smollm2_path.exists()
    result = octavo("run", "What is gravity?", "--temperature", "0", "--max-tokens", "12")
    assert result.returncode == 0
    # In the reference backend every one of these tokens leads the second by at least 1.5 nats.
    assert result.stdout.startswith("Gravity is a fundamental concept in physics that describes")
    assert result.stderr == ""


def test_json_has_text_ids_and_timings(smollm2_path: Path) -> None:
    result = octavo_here("run", smollm2_path, "Say hello.", *GREEDY, "--json", "--logprobs", "2")
    report = json.loads(result.stdout)
    assert report["finish_reason"] in ("stop", "length")
    assert len(report["token_ids"]) == report["timings"]["num_generated_tokens"] <= 8
    assert report["prompt_token_ids"][:2] == [1, 9690]
    assert len(report["logprobs"]) == len(report["token_ids"])
    assert report["timings"]["load_s"] > 0
    assert report["timings"]["time_to_first_token_s"] > 0
    streamed = octavo_here("run", smollm2_path, "Say hello.", *GREEDY)
    assert streamed.stdout == report["text"] + "\n"


def test_the_same_seed_gives_the_same_answer(tiny: Path) -> None:
    arguments = ("run", tiny, "abcd", "--raw", "--seed", "7", "--max-tokens", "20")
    first, second = octavo_here(*arguments), octavo(*arguments)
    assert first.stdout == second.stdout
    assert first.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "stdin"), [(("-",), "abcd"), ((), "abcd"), (("MODEL", "-"), "ab cd\n"), (("MODEL",), "abcd")]
)
def test_standard_input_is_a_prompt(tiny: Path, arguments: tuple[str, ...], stdin: str) -> None:
    if "MODEL" not in arguments:  # the default model: only that the prompt arrives
        result = octavo_here("run", *arguments, "--temperature", "5", stdin=stdin)
        assert "temperature is 5" in result.stderr
        return
    words = [str(tiny) if word == "MODEL" else word for word in arguments]
    result = octavo_here("run", *words, "--raw", *GREEDY, "--json", stdin=stdin)
    assert json.loads(result.stdout)["prompt"] == stdin


def test_bytes_that_are_no_text_do_no_harm(tiny: Path) -> None:
    result = octavo(
        "run", tiny, "-", "--raw", *GREEDY, "--json", stdin="ab\udcff\udc80", env={"PYTHONIOENCODING": "ascii"}
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["prompt"].startswith("ab")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "the prompt is empty"),
        (("MODEL", ""), 2, "the prompt is empty"),
        (("a", "b", "c"), 2, "quote the prompt"),
        (("x", "--temperature", "9"), 2, "temperature is 9"),
        (("x", "--temperature", "warm"), 2, "Invalid value for '--temperature'"),
        (("x", "--max-tokens", "0"), 2, "--max-tokens is 0"),
        (("x", "--no-such-flag"), 2, "No such option"),
        (("x", "--logprobs", "3"), 2, "--logprobs needs --json"),
        (("x", "--raw", "--system", "y"), 2, "--system needs the chat template"),
        (("MODEL", "ab", "--raw", "--kv-cache-memory", "much"), 2, "--kv-cache-memory is 'much'"),
        (("MODEL", "ab"), 2, "no chat template"),
        (("MODEL", "ab" * 100, "--raw"), 2, "at most 63, to leave room for one new token. Shorten it\n"),
        (("MODEL", "ab" * 30, "--raw", "--max-model-len", "8"), 2, "raise --max-model-len, up to 64 for this model"),
        (("MODEL", "ab", "--raw", "--kv-cache-memory", "9000GiB"), 3, "--kv-cache-memory"),
        (("/nowhere/model.gguf", "x"), 3, "/nowhere/model.gguf"),
        (("smolm2", "x"), 3, "did you mean smollm2"),
        (("smolm2",), 2, "there is no model smolm2; did you mean smollm2?"),
        (("x", "-f", "/nowhere/notes.txt"), 2, "/nowhere/notes.txt: No such file or directory"),
        (("x", "--schema", "SCHEMA", "--regex", "a"), 2, "--schema and --regex exclude each other"),
        (("x", "--schema", "TEXT"), 2, "notes.gguf: not a valid JSON schema"),
        (("x", "--block-size", "4"), 2, "--block-size is 4; it must be 8 or a multiple of 16"),
        (("TEXT", "x"), 3, "notes.gguf"),
        (("STRANGE", "x"), 3, "lama"),
    ],
)
def test_mistakes_get_one_clear_line(
    tiny: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.gguf").write_text("shopping list")
    (tmp_path / "strange.gguf").write_bytes(tiny_gguf({"general.architecture": "lama"}))
    names = {"MODEL": tiny, "TEXT": tmp_path / "notes.gguf", "STRANGE": tmp_path / "strange.gguf"}
    monkeypatch.setenv("OCTAVO_OFFLINE", "1")
    result = octavo_here("run", *(names.get(word, word) for word in arguments))
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_mistake_as_a_process() -> None:
    result = octavo("run", "/nowhere/model.gguf", "x")
    assert result.returncode == 3
    assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    result = octavo_here("run", "/nowhere/model.gguf", "x", "--debug")
    assert result.returncode == 3
    assert "Traceback" in result.stderr


def test_the_prompt_is_missing_at_a_terminal() -> None:
    with Terminal("run") as terminal:
        assert "octavo run [MODEL] PROMPT" in terminal.wait_for("for a conversation: octavo chat")
        assert terminal.wait() == 2
    with Terminal("run", "smollm2") as terminal:
        terminal.wait_for("/help for help")  # a conversation
        terminal.wait_for(">>>")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_parameters_that_leave_no_token_are_exit_code_2(tiny: Path) -> None:
    only_the_end = ("--allowed-token-ids", "1", "--min-tokens", "3", "--max-tokens", "3")
    result = octavo_here("run", tiny, "abcd", "--raw", *only_the_end)
    assert result.returncode == 2
    assert "no token may be chosen" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_context_beyond_the_memory_is_one_error(tiny: Path) -> None:
    result = octavo_here("run", tiny, "abcd", "--raw", "--max-model-len", "100000", "--kv-cache-memory", "1MiB")
    assert result.returncode == 3
    assert "--max-model-len 100000 does not fit" in result.stderr
    assert result.stderr.count("\n") == 1


def test_ctrl_c_ends_it_quietly(smollm2_path: Path) -> None:
    with Terminal("run", smollm2_path, "Tell a very long story.", "--ignore-eos", "--temperature", "0") as terminal:
        terminal.wait_for("a ")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.output
        assert terminal.output.endswith("\n")


def test_an_interrupt_while_loading_is_quiet(smollm2_path: Path) -> None:
    code = """
import importlib, os, signal, sys
compiler = importlib.import_module("octavo.backends.cpu.compiler")
load_matrices = compiler.load_matrices
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return load_matrices(*arguments)
compiler.load_matrices = interrupted
from octavo.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "run", str(smollm2_path), "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_interrupt_while_the_program_is_imported_is_quiet() -> None:
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from octavo.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "")


def test_a_closed_pipe_ends_it_quietly(smollm2_path: Path) -> None:
    command = [*COMMAND, "run", str(smollm2_path), "Tell a very long story.", "--ignore-eos", "--temperature", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--temperature", "5"], "octavo: --temperature is 5; it must be at least 0 and at most 2\n"),
        (["--max-num-seqs", "0"], "octavo: --max-num-seqs is 0; it must be from 1 to"),
        (["--kv-cache-memory", "1Q"], "octavo: --kv-cache-memory is '1Q'; write a size"),
    ],
)
def test_a_wrong_value_is_called_by_its_option(option: list[str], said: str) -> None:
    result = octavo_here("run", *option, "hi")
    assert result.returncode == 2
    assert result.stderr.startswith(said)


def test_texts_before_the_prompt(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("ba")
    options = ("--raw", *GREEDY, "--json")
    piped = octavo_here("run", tiny, "cd", *options, stdin="abcd")
    assert json.loads(piped.stdout)["prompt"] == "abcd\n\ncd"
    files = octavo_here("run", tiny, "cd", "-f", tmp_path / "a.txt", "--file", tmp_path / "b.txt", *options, stdin="dd")
    assert json.loads(files.stdout)["prompt"] == "ab\n\nba\n\ndd\n\ncd"
    only = octavo_here("run", tiny, "-f", tmp_path / "a.txt", *options)
    assert json.loads(only.stdout)["prompt"] == "ab"


def test_a_file_that_is_no_text_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"ab\xff\xfe")
    result = octavo_here("run", tiny, "x", "-f", tmp_path / "picture.png")
    assert (result.returncode, "byte 2 is not UTF-8" in result.stderr) == (2, True)


@pytest.mark.parametrize("prompt", ["-5 + a?", "- fix ab", "--what a", "-7a"])
def test_a_prompt_may_begin_with_a_dash(tiny: Path, prompt: str) -> None:
    for arguments in ((tiny, prompt, "--raw", *GREEDY, "--json"), (tiny, "--raw", *GREEDY, "--json", "--", prompt)):
        assert json.loads(octavo_here("run", *arguments).stdout)["prompt"] == prompt


def test_a_value_may_begin_with_a_dash(tiny: Path) -> None:
    result = octavo_here("run", tiny, "abcd", "--raw", "--stop", "- a", *GREEDY, "--json", "--seed=-5")
    assert json.loads(result.stdout)["prompt"] == "abcd"


def test_constraints(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["ab"]}')
    for constraint, answer in (
        (("--choice", "abab", "--choice", "cdcd"), {"abab", "cdcd"}),
        (("--regex", "(cd){3}"), {"cdcdcd"}),
        (("--grammar", 'start: "ab" "cd"'), {"abcd"}),
    ):
        result = octavo_here("run", tiny, "ab", "--raw", "--temperature", "0", *constraint)
        assert result.stdout.strip() in answer, result.stderr


def test_a_schema(smollm2_path: Path, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["size"],
    }
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    result = octavo_here("run", smollm2_path, "How large?", "--schema", tmp_path / "schema.json", "--seed", "1")
    assert 0 <= json.loads(result.stdout)["size"] <= 999


def test_objects_of_a_schema_may_be_closed(smollm2_path: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"size": {"const": 1}}, "required": ["size"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    constraint = ("--schema", tmp_path / "schema.json", "--closed-objects", "--seed", "1")
    result = octavo_here("run", smollm2_path, "Name many properties.", *constraint)
    assert json.loads(result.stdout) == {"size": 1}, result.stderr


def test_verbose_tells_counts_times_and_rates(tiny: Path) -> None:
    result = octavo_here("run", tiny, "abcd", "--raw", *GREEDY, "--ignore-eos", "--verbose", "--speculation", "off")
    lines = [line.split()[0] for line in result.stderr.splitlines()]
    assert lines == ["load", "prompt", "answer", "total"]
    assert "2 tokens (0 cached)" in result.stderr


def test_verbose_tells_drafts() -> None:
    timings = {
        **asdict(RequestMetrics(num_generated_tokens=31, num_draft_tokens=25, num_accepted_draft_tokens=20)),
        **dict.fromkeys(("load_s", "total_s"), 1.0),
        **dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s"), 5.0),
    }
    assert "drafts  20 of 25 right, 3.00 tokens per step\n" in _summary(timings)


def test_the_sampling_is_the_models(tmp_path: Path) -> None:
    path = tmp_path / "greedy.gguf"
    path.write_bytes(tiny_gguf({"general.sampling.temp": 0.0}))
    run = ("run", path, "abcd", "--raw", "--ignore-eos", "--max-tokens", "12", "--json")
    texts = {json.loads(octavo_here(*run, "--seed", seed).stdout)["text"] for seed in "12345"}
    assert len(texts) == 1
    for explicit in (("--temperature", "1"), ("--generation-config", "none")):
        texts = {json.loads(octavo_here(*run, "--seed", seed, *explicit).stdout)["text"] for seed in "12345"}
        assert len(texts) > 1


def test_the_end_at_a_limit_is_told(tiny: Path) -> None:
    result = octavo_here("run", tiny, "abcd", "--raw", "--temperature", "0", "--ignore-eos")
    assert result.stderr == "octavo: the answer was cut off after 62 tokens: the context of the model is full\n"
    asked = octavo_here("run", tiny, "abcd", "--raw", "--temperature", "0", "--ignore-eos", "--max-tokens", "3")
    assert asked.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("serv",), "serve"),
        (("cht", "x"), "chat"),
        (("Run", "x"), "run"),
        (("rum", "x"), "rm or run"),
        (("prun", "x"), "prune or run"),
    ],
)
def test_a_wrong_command_gets_a_suggestion(arguments: tuple[str, ...], near: str) -> None:
    result = octavo_here(*arguments)
    assert result.returncode == 2
    assert f"Did you mean {near}?" in result.stderr


@pytest.mark.parametrize("arguments", [("-h",), ("run", "-h"), ("serve", "-h")])
def test_h_is_help(arguments: tuple[str, ...]) -> None:
    assert octavo_here(*arguments).stdout == octavo_here(*arguments[:-1], "--help").stdout != ""


@pytest.mark.parametrize(
    ("redirect", "code", "said"),
    [
        (">/dev/full", 1, "octavo: input or output: No space left on device\n"),
        (">&-", 1, "octavo: standard output: is closed\n"),
        ("<&-", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(tiny: Path, redirect: str, code: int, said: str) -> None:
    command = " ".join([*COMMAND, "run", str(tiny), "abcd", "--raw", *GREEDY, redirect])
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (code, said)


def test_an_address_space_that_is_too_small_is_no_internal_error(smollm2_path: Path) -> None:
    for limit in (400_000, 600_000, 900_000):
        command = f"ulimit -v {limit}; " + " ".join([*COMMAND, "run", str(smollm2_path), "hi", *GREEDY])
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert "internal error" not in result.stderr
        assert "Traceback" not in result.stderr
        assert result.returncode in (0, 3)
        if result.returncode:
            assert f"The address space is limited to {limit} KiB (RLIMIT_AS): raise ulimit -v" in result.stderr


def test_a_prompt_cache_is_made_read_and_completed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    file, text = tmp_path / "kept", "abcdefgh" * 10

    def run(prompt: str, *options: str) -> dict[str, Any]:
        result = octavo_here("run", tiny, prompt, "--raw", *GREEDY, "--json", "--prompt-cache", file, *options)
        assert result.returncode == 0, result.stderr
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    first = run(text)
    written = file.read_bytes()
    second = run(text)
    size = len(first["prompt_token_ids"])
    assert first["timings"]["num_cached_tokens"] == 0
    assert second["timings"]["num_cached_tokens"] == (size - 1) // 16 * 16 > 0
    assert second["token_ids"] == first["token_ids"]
    assert file.read_bytes() == written
    # Only the prompt is in it, until all is kept.
    answered = text + first["text"]
    assert run(answered, "--prompt-cache-ro")["timings"]["num_cached_tokens"] <= size // 16 * 16
    assert file.read_bytes() == written
    run(text, "--prompt-cache-all", "--max-tokens", "40", "--ignore-eos")
    assert file.stat().st_size > len(written)
    other = run("cdab" * 12)  # takes its place
    assert other["timings"]["num_cached_tokens"] == 0
    assert run("cdab" * 12)["timings"]["num_cached_tokens"] > 0


def test_wrong_prompt_caches_are_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    (tmp_path / "foreign").write_bytes(b"something else")
    for options, words in (
        (("--prompt-cache-all",), "need --prompt-cache FILE"),
        (("--prompt-cache", tmp_path / "none", "--prompt-cache-ro"), "no such file; leave out --prompt-cache-ro"),
        (("--prompt-cache", tmp_path / "a", "--prompt-cache-ro", "--prompt-cache-all"), "leave one out"),
        (("--prompt-cache", tmp_path / "foreign"), "is not a saved prompt"),
    ):
        result = octavo_here("run", tiny, "abcdefgh" * 24, "--raw", *GREEDY, *options)
        assert result.returncode == 2
        assert words in result.stderr
    kept = octavo_here("run", tiny, "abcdefgh" * 24, "--raw", *GREEDY, "--prompt-cache", tmp_path / "none" / "a")
    assert kept.returncode == 0
    assert "warning: " in kept.stderr
    assert "cannot be saved" in kept.stderr


def test_every_name_of_a_model_is_a_model() -> None:
    for name in (*ALIASES, *FAMILIES, *catalogue(), "Qwen3:0.6B", "hf.co/org/name", "org/name:Q4_K_M", "a.gguf"):
        assert _words((name,), None, None) == (name, []), name
    for prompt in ("hello", "why?", "1/2", "10:30", "summarize", "and so on"):
        assert _words((prompt,), None, None) == (None, [prompt]), prompt


def test_a_folder_of_a_model_has_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", "my model", "135"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").touch()
        assert _words((name,), None, None) == (name, [])
    assert _words(("",), None, None) == (None, [""])


@pytest.mark.parametrize("name", ["qwen9", "qwen3:5b", "llama3", "gemma", "smollm"])
def test_a_near_miss_is_no_prompt(name: str) -> None:
    result = octavo_here("run", name)
    assert result.returncode == 2
    assert f"there is no model {name}; did you mean {name[:4]}" in result.stderr
    marked = octavo_here("run", "-p", name, "--raw", "--system", "x")
    assert "--system needs the chat template" in marked.stderr


def test_the_flags_of_others(tiny: Path) -> None:
    words = octavo_here("run", tiny, "abcd", "--raw", *GREEDY, "--max-tokens", "5", "--max-model-len", "32")
    flags = octavo_here("run", "-m", tiny, "-p", "abcd", "--raw", *GREEDY, "-n", "5", "-c", "32", "-t", "1")
    assert flags.stdout == words.stdout != "\n"
    mixed = octavo_here("run", tiny, "-p", "abcd", "--raw", *GREEDY, "--n-predict", "5", "--ctx-size", "32")
    assert mixed.stdout == words.stdout
    assert "'-ngl' requires an argument" in octavo_here("run", tiny, "abcd", "-ngl").stderr
    twice = octavo_here("run", "-m", tiny, "other", "abcd")
    assert (twice.returncode, "'other' both name the model" in twice.stderr) == (2, True)
    twice = octavo_here("run", "-p", "abcd", tiny, "more")
    assert (twice.returncode, "'more' both give the prompt" in twice.stderr) == (2, True)


def test_more_than_the_machine_or_the_model_has_is_told(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    octavo_here("run", tiny, "abcd", "--raw", "-n", "1", "-t", "999", "-c", "4000")
    assert "num_threads 999 exceeds the" in caplog.text
    assert "max_model_len 4000 exceeds the model's context of 64 tokens" in caplog.text


def test_help_is_a_command() -> None:
    assert octavo_here("help").stdout == octavo_here("--help").stdout
    assert octavo_here("help", "run").stdout == octavo_here("run", "--help").stdout
    assert octavo_here("--debug", "help", "run").stdout == octavo_here("run", "--help").stdout
