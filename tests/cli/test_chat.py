"""`octavo chat` at a terminal and on a pipe."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.processes import Terminal, octavo, octavo_here
from tests.support.tiny_gguf import tiny_gguf

GREEDY = ("--temperature", "0", "--max-tokens", "16", "--stop", "\n")


def test_a_conversation_remembers_until_reset(smollm2_path: Path) -> None:
    question = "What did I say before this?"
    lines = f"{question}\nMy dog is called Rex.\n{question}\n/reset\n{question}\n"
    result = octavo("chat", smollm2_path, *GREEDY, stdin=lines)
    assert result.returncode == 0
    assert result.stderr == ""
    first, *_, later, _, again = result.stdout.split("\n")[:-1]
    assert first == again != later


def test_commands(smollm2_path: Path) -> None:
    lines = "/help\n/system You only say yes.\n/reset\n/nonsense\n\n/system\n/exit\nnot read\n"
    result = octavo("chat", smollm2_path, *GREEDY, stdin=lines)
    assert result.returncode == 0
    assert "/reset " in result.stdout
    assert "New conversation with this system message" in result.stdout
    assert "There is no command /nonsense" in result.stdout
    assert result.stdout.splitlines()[-1] == "New conversation without a system message."


def test_ctrl_c_stops_the_answer_and_not_the_program(smollm2_path: Path) -> None:
    with Terminal("chat", smollm2_path, "--temperature", "0", "--ignore-eos") as terminal:
        terminal.wait_for(">>> ")
        terminal.type("Tell a very long story.\n")
        terminal.wait_for("story.\r\n")
        terminal.wait_for(" ")
        terminal.type("\x03")
        terminal.wait_for(">>> ")
        time.sleep(0.3)  # readline loses a signal between its prompt and its wait for input
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-D or /exit to exit)")
        terminal.wait_for(">>> ")
        terminal.type("/reset\n")
        terminal.wait_for("New conversation.")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.output


def test_a_conversation_beyond_the_context_goes_on_after_reset(smollm2_path: Path) -> None:
    lines = "word " * 300 + "\n/reset\nSay hi.\n"
    result = octavo("chat", smollm2_path, *GREEDY, "--max-model-len", "128", stdin=lines)
    assert result.returncode == 0
    assert "/reset starts a new conversation" in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stdout.splitlines()[-1]) > 1


def test_a_model_without_template_says_so_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    result = octavo_here("chat", path)
    assert result.returncode == 2
    assert "no chat template" in result.stderr
