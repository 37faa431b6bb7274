"""`octavo batch` as a process: all kinds of lines, an end by force, and a server of its own choice."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import COMMAND, Terminal, octavo, octavo_here

LINES = [
    {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "abc"}]}},
    {"prompt": "abcd", "max_tokens": 3},
    {"custom_id": "wrong", "url": "/v1/chat/completions", "body": {"messages": "text"}},
    {"input": "abcd"},
    {"custom_id": "r", "url": "/v1/responses", "body": {"input": "abc", "max_output_tokens": 4}},
]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records(path: Path) -> dict[str, dict[str, Any]]:
    """The results by id, each of which appears once."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({record["custom_id"] for record in found}) == len(found)
    return {record["custom_id"]: record for record in found}


def test_each_line_gets_its_answer_or_its_error(smollm2_path: Path, tmp_path: Path) -> None:
    source, output, errors = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    arguments = ("batch", source, output, "-m", smollm2_path, "--errors", errors, "--max-tokens", "5")
    result = octavo(*arguments)
    assert (result.returncode, result.stdout) == (6, "")
    assert "4 of 5 lines answered" in result.stderr
    assert f"1 lines failed; see {errors} for the errors" in result.stderr
    answers = records(output)
    assert answers.keys() == {"chat", "line-2", "line-4", "r"}
    bodies = {name: record["response"]["body"] for name, record in answers.items()}
    assert all(record["response"]["status_code"] == 200 for record in answers.values())
    assert bodies["chat"]["usage"]["completion_tokens"] <= 5  # of --max-tokens
    assert bodies["line-2"]["usage"]["completion_tokens"] <= 3  # its own
    assert len(bodies["line-4"]["data"][0]["embedding"]) > 1
    assert records(errors)["wrong"]["response"]["status_code"] == 400
    again = octavo(*arguments)
    assert again.returncode == 6
    assert records(output) == answers
    write(source, [*LINES[:2], {**LINES[2], "body": LINES[0]["body"]}, *LINES[3:]])
    mended = octavo(*arguments, "--retry-failed")
    assert mended.returncode == 0
    assert records(output).keys() == {*answers, "wrong"}
    assert errors.read_bytes() == b""


def test_a_command_that_was_killed_goes_on_with_the_same_answers(smollm2_path: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"{number} and", "max_tokens": 8} for number in range(24)]
    source, whole, output = write(tmp_path / "in.jsonl", lines), tmp_path / "whole", tmp_path / "out"
    command = ("batch", source, output, "-m", smollm2_path, "--rows", "2", "--max-model-len", "64")
    process = subprocess.Popen([*COMMAND, *map(str, command)], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert process.poll() is None
            os.sched_yield()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    num_before = output.read_bytes().count(b"\n")
    assert num_before < 24
    assert octavo(*command).returncode == 0
    assert octavo("batch", source, whole, *command[3:]).returncode == 0

    def texts(path: Path) -> dict[str, str]:
        return {name: each["response"]["body"]["choices"][0]["text"] for name, each in records(path).items()}

    assert len(texts(output)) == 24
    assert texts(output) == texts(whole)  # although they are drawn: the seeds are made of the ids


def test_the_bar_shows_lines_speed_and_the_time_left(smollm2_path: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": f"{number} and", "max_tokens": 64} for number in range(400)])
    arguments = ("batch", source, tmp_path / "out", "-m", smollm2_path, "--rows", "2")
    with Terminal(*arguments, env={"COLUMNS": "120"}) as terminal:
        terminal.wait_for(" tokens/s ")
        terminal.wait_for("0:0")  # the time left comes behind the speed
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.output)
        assert re.search(r"in\.jsonl .*\d+/400 [\d,]+ tokens/s +0:0\d", shown), shown


@pytest.fixture
def server(smollm2_path: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [*COMMAND, "serve", str(smollm2_path), "--port", "0", "--api-key", "secret"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("export OPENAI_BASE_URL="):
                yield line.removeprefix("export OPENAI_BASE_URL=").strip()
                break
    finally:
        process.terminate()
        process.wait()


def test_a_running_server_answers_and_csv_is_ordered(server: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out"
    source.write_text("word\n" + "".join(f"{'abcdefgh'[number % 8]}\n" for number in range(12)))
    arguments = ("batch", source, output, "--url", server, "--template", "Say {word}", "--max-tokens", "3", "--ordered")
    refused = octavo(*arguments, env={"OPENAI_API_KEY": ""})
    assert refused.returncode == 6
    assert {each["response"]["status_code"] for each in records(output).values()} == {401}
    result = octavo(*arguments, "--retry-failed", env={"OPENAI_API_KEY": "secret"})
    assert result.returncode == 0, result.stderr
    assert list(records(output)) == [f"row-{number}" for number in range(1, 13)]


def test_the_words_of_vllm(tiny: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", LINES[1:2]), tmp_path / "out.jsonl"
    result = octavo("run-batch", "-i", source, "-o", output, "--model", tiny)
    assert result.returncode == 0, result.stderr
    assert list(records(output)) == ["line-1"]


@pytest.mark.parametrize(
    ("lines", "arguments", "part"),
    [
        ([LINES[0], LINES[1], LINES[0]], (), "lines 1 and 3 have the custom_id 'chat'"),
        (LINES[:1], ("--column", "text"), "has no columns"),
        (LINES[:1], ("--url", "http://localhost:1", "-m", "x"), "leave one out"),
        (LINES[:1], ("--url", "http://127.0.0.1:1"), "no server answers"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_model_is_loaded(
    tmp_path: Path, lines: list[dict[str, Any]], arguments: tuple[str, ...], part: str
) -> None:
    result = octavo("batch", write(tmp_path / "in", lines), tmp_path / "out", *arguments)
    assert result.returncode == 2
    assert part in result.stderr


def test_a_server_that_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.batch._HEALTH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, and reads none
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = octavo_here("batch", write(tmp_path / "in", LINES[:1]), tmp_path / "out", "--url", url)
    assert result.returncode == 2
    assert "but sent nothing for 0.2 s; restart it" in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = octavo("batch", tmp_path / "absent.jsonl", tmp_path / "out")
    assert result.returncode == 2
    assert "no such file" in result.stderr
