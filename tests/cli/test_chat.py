"""`octavo chat` at a terminal and on a pipe."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.cli.word_wrap import WordWrap
from octavo.errors import UsageError
from tests.support.processes import Terminal, octavo, octavo_here

GREEDY = ("--temperature", "0", "--max-tokens", "16", "--stop", "\n")


def test_a_conversation_remembers_until_reset(smollm2_path: Path) -> None:
    question = "What did I say before this?"
    lines = f"{question}\nMy dog is called Rex.\n{question}\n/reset\n{question}\n"
    result = octavo("chat", smollm2_path, *GREEDY, stdin=lines)
    assert result.returncode == 0
    assert result.stderr == ""
    first, *_, later, _, again = result.stdout.split("\n")[:-1]
    assert first == again != later


def test_commands(tiny_chat: Path) -> None:
    lines = "/help\n/system You only say yes.\n/reset\n/nonsense\n\n/system\n/exit\nnot read\n"
    result = octavo_here("chat", tiny_chat, *GREEDY, stdin=lines)
    assert result.returncode == 0
    assert "/clear " in result.stdout
    assert "New conversation with this system message" in result.stdout
    assert "Unknown command /nonsense" in result.stdout
    assert result.stdout.splitlines()[-1] == "New conversation with the model's own system message, if any."


def test_ctrl_c_stops_the_answer_and_not_the_program(smollm2_path: Path) -> None:
    with Terminal("chat", smollm2_path, "--temperature", "0", "--ignore-eos") as terminal:
        terminal.wait_for(">>>")
        terminal.type("Tell a very long story.\r")
        terminal.wait_for("The story")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        terminal.wait_for(">>>")
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-D or /exit to exit)")
        terminal.wait_for(">>>")
        terminal.type("/reset\r")
        terminal.wait_for("New conversation.")
        terminal.wait_for(">>>")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.output


def test_ctrl_c_keeps_the_conversation(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with Terminal("chat", smollm2_path, "--temperature", "0", "--ignore-eos") as terminal:
        terminal.wait_for(">>>")
        for question in ("Tell a very long story.\r", "Go on.\r"):
            terminal.type(question)
            # The second answer depends on where the first was cut: any English text has such a word soon.
            terminal.wait_for("The story" if question[0] == "T" else "e ")
            terminal.type("\x03")
            terminal.wait_for(">>>")
        terminal.type(f"/save {file}\r")
        terminal.wait_for(">>>")
        assert terminal.leave() == 0
    said = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in said if m["role"] != "system"] == ["user", "assistant"] * 2
    assert "Go on." in [m["content"] for m in said]
    assert any(m["role"] == "assistant" and "The story" in m["content"] for m in said)


def test_a_question_beyond_the_context_is_refused(smollm2_path: Path) -> None:
    lines = "word " * 300 + "\n/clear\nSay hi.\n"
    result = octavo_here("chat", smollm2_path, *GREEDY, "--max-model-len", "128", stdin=lines)
    assert result.returncode == 0
    assert "/clear starts a new conversation" in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stdout.splitlines()[-1]) > 1


def test_the_oldest_turns_make_room(smollm2_path: Path) -> None:
    lines = "My dog is Rex. " + "word " * 40 + "\nSay hi.\n" + "word " * 40 + "\nSay hi.\n"
    options = (*GREEDY, "--max-model-len", "150", "--system", "Be brief.")
    result = octavo_here("chat", smollm2_path, *options, stdin=lines)
    assert result.returncode == 0
    assert "the context is full: the oldest turn was dropped" in result.stderr
    assert len(result.stdout.splitlines()) == 4
    refused = octavo_here("chat", smollm2_path, *options, "--no-trim", stdin=lines * 2)
    assert "left out" not in refused.stderr
    assert re.search(r"raise --max-model-len, .*\(/clear starts a new conversation\)", refused.stderr)


def test_blocks_settings_and_files(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = f'"""My dog\nis called Rex."""\n/save {file}\n/set top_k 5\n/set temprature 1\n/set stop "a b" c\n/?\n'
    result = octavo_here("chat", smollm2_path, *GREEDY, "--system", "Be kind.", stdin=lines)
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "My dog\nis called Rex."
    for said in ("top_k is now 5", "did you mean temperature?", "stop is now ('a b', 'c')", "/load FILE"):
        assert said in result.stdout
    question = "What is my dog called?\n"
    alone = octavo_here("chat", smollm2_path, *GREEDY, stdin=question).stdout
    loaded = octavo_here("chat", smollm2_path, *GREEDY, stdin=f"/load {file}\n{question}").stdout
    assert loaded.startswith("The conversation has 3 messages.\n")
    assert alone not in loaded


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature 9", "temperature is 9; it must be"),
        ("/set top_k much", "top_k cannot be 'much'"),
        ("/set logprobs 3", "there is no sampling parameter 'logprobs'"),
        ("/save", "/save needs a file"),
        ("/save /proc/x/y", "/proc/x/y: No such file"),
        ("/save ~nobody-of-that-name/x", "~nobody-of-that-name/x: No such file"),
        ("/save /dev/null", "/dev/null: not a regular file, so it cannot be replaced; write to another name"),
        ("/load /dev/null", "not a conversation"),
        ("/nonsense", "Unknown command /nonsense"),
    ],
)
def test_wrong_commands(line: str, said: str, tiny_chat: Path) -> None:
    assert said in octavo_here("chat", tiny_chat, stdin=line + "\n").stdout


def test_save_keeps_links_and_pipes(tiny_chat: Path, tmp_path: Path) -> None:
    """A link stays one, and the file that it names has the conversation."""
    (tmp_path / "link.json").symlink_to("file.json")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    names = ("link.json", "pipe", "a")
    said = octavo_here("chat", tiny_chat, stdin="".join(f"/save {tmp_path}/{name}\n" for name in names)).stdout
    assert f"Saved 0 messages to {tmp_path}/a" in said  # of links that name each other
    assert "pipe: not a regular file, so it cannot be replaced" in said
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert json.loads((tmp_path / "file.json").read_text()) == {"messages": []}


def test_a_pasted_text_is_one_message_and_history_lasts(smollm2_path: Path, tmp_path: Path) -> None:
    env = {"OCTAVO_CACHE": str(tmp_path)}
    with Terminal("chat", smollm2_path, *GREEDY, env=env) as terminal:
        terminal.wait_for(">>>")
        terminal.type("\x1b[200~first line\nsecond line\x1b[201~")
        terminal.wait_for("second line")
        terminal.type("\r")
        terminal.wait_for(">>>")
        assert terminal.leave() == 0
    with Terminal("chat", smollm2_path, *GREEDY, env=env) as terminal:
        terminal.wait_for(">>>")
        terminal.type("\x1b[A")  # the arrow up
        terminal.wait_for("second line")
        terminal.type("\x03")
        terminal.wait_for(">>>")
        assert terminal.leave() == 0
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["The quick brown fox jumps"], ["The quick", "brown fox", "jumps"]),
        (["The qu", "ick br", "own", " fox", " jumps"], ["The quick", "brown fox", "jumps"]),
        (["a\n\nb c"], ["a", "", "b c"]),
        (["Donaudampfschiff ist lang"], ["Donaudampf", "schiff ist", "lang"]),
        (["```\nfor x in range(100):\n```\none two three"], ["```", "for x in range(100):", "```", "one two", "three"]),
        (["0123456789 x"], ["0123456789", "x"]),
    ],
)
def test_words_are_not_broken(pieces: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    wrap = WordWrap(10)
    for piece in pieces:
        wrap.write(piece)
    wrap.end()
    assert [line.rstrip() for line in capsys.readouterr().out.split("\n")] == lines


def test_a_model_without_template_says_so_at_once(tiny: Path) -> None:
    result = octavo_here("chat", tiny)
    assert result.returncode == 2
    assert "no chat template" in result.stderr


def test_another_answer_another_model_and_what_is_in_use(tiny_chat: Path, tmp_path: Path) -> None:
    other, talk = tmp_path / "other.gguf", tmp_path / "talk.json"
    other.write_bytes(tiny_chat.read_bytes())
    lines = f"/regenerate\n/model\nab\n/show\n/regenerate\n/save {talk}\n/model {tmp_path}/none.gguf\n"
    lines += f"/model {other}\n/model\ncd\n/show\n/set top_k 3\n/clear\n/show\n"
    result = octavo_here("chat", tiny_chat, "--max-tokens", "4", "--seed", "1", "--ignore-eos", stdin=lines)
    assert (result.returncode, result.stderr) == (0, "")
    said = result.stdout.splitlines()
    assert said[:2] == ["There is no message to answer yet.", str(tiny_chat)]
    assert [m["role"] for m in json.loads(talk.read_text())["messages"]] == ["user", "assistant"]
    assert f"{tmp_path}/none.gguf: no such file or directory" in result.stdout
    assert said.count(str(other)) == 1
    assert f"Switched to {other}." in said
    uses = re.findall(r"context +64 tokens, (\d+) in use", result.stdout)
    assert 0 == int(uses[2]) < int(uses[0]) < int(uses[1])  # the conversation went on with the other model
    assert re.search(r"sampling .*top_k 3, .*max_tokens 4", result.stdout)


def test_an_error_within_an_answer_ends_its_style(tiny_chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(outputs=[SimpleNamespace(text="a **bold word")])
        raise UsageError("too long")

    for name, value in (("parts_of", broken), ("has_colour", lambda: True), ("is_terminal", lambda _: True)):
        monkeypatch.setattr(f"octavo.cli.chat.{name}", value)
    result = octavo_here("chat", tiny_chat, stdin="ab\n")
    assert "too long (/clear starts a new conversation)" in result.stderr
    assert re.search("\x1b\\[1m.*word.*\x1b\\[(0|22)?m", result.stdout)


def test_a_template_goes_with_its_model(tiny_chat: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_chat.read_bytes())
    template = "{% for m in messages %}b{% endfor %}"
    options = (*GREEDY[:2], "--max-tokens", "4", "--ignore-eos", "--chat-template", template)
    result = octavo_here("chat", tiny_chat, *options, stdin=f"abab\n/show\n/model {other}\n/show\n")
    uses = re.findall(r"context +64 tokens, (\d+) in use", result.stdout)
    assert int(uses[0]) < int(uses[1])
    assert "system    the model's own, if any" in result.stdout


def test_a_model_that_cannot_chat_does_not_replace_one_that_can(tiny_chat: Path, tiny: Path) -> None:
    result = octavo_here("chat", tiny_chat, *GREEDY, stdin=f"ab\n/model {tiny}\n/model\ncd\n")
    assert result.returncode == 0
    assert "no chat template" in result.stdout
    assert f"\n{tiny_chat}\n" in result.stdout
