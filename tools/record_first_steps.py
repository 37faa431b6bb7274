#!/usr/bin/env python3
"""Record docs/first-steps.md: run each command at a terminal, with the real model, and write down what it prints.

    python tools/record_first_steps.py           write the page
    python tools/record_first_steps.py --check   compare the page with a new recording

The home folder is a new one, so the first command downloads the model (94 MiB). With `--models FOLDER` it uses the
models of an existing cache instead, which allows checks without a network. The check ignores what differs between
machines: figures with units, times, identifiers, and the values that `octavo doctor` prints.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import os
import platform
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "first-steps.md"
HOME = "/home/you"  # the home folder as the page shows it
PROMPT = "$ "
COLUMNS, LINES = 110, 50
LIMIT_S = 120.0  # per command, including the download
PORT = 8123


@dataclass(frozen=True, slots=True)
class Line:
    """A line to type, and the text at the end of the screen that shows that the command is done."""

    typed: str
    until: str = "\n" + PROMPT


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the page: some text, then the output of one terminal."""

    words: str
    lines: tuple[Line, ...]
    terminal: int = 0


CTRL_D = "\x04"
CHAT_PROMPT = "\n>>> "
CURL = (
    f"curl -s http://127.0.0.1:{PORT}/v1/chat/completions -H 'content-type: application/json' "
    """-d '{"messages": [{"role": "user", "content": "Name a fruit."}], "seed": 1, "max_tokens": 40}'; echo"""
)
PYTHON = (
    "from octavo import LLM, SamplingParams",
    'with LLM("smollm2") as llm:',
    '    [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))',
    "    print(output.outputs[0].text)",
)


def blocks() -> list[Block]:
    """Return the page's parts, in order."""
    script = (Line("python - <<'END'", "\n> "), *(Line(text, "\n> ") for text in PYTHON), Line("END"))
    return [
        Block("Check this machine and the settings Octavo will use.", (Line("octavo doctor"),)),
        Block(
            "Get a first answer. The first command that needs the model downloads it. "
            "A seed makes the answer repeatable.",
            (Line('octavo run --seed 1 "Why is the sky blue?"'),),
        ),
        Block(
            "Pipe text in to use it as context.",
            (Line('echo "Meeting moved to Friday at ten." | octavo run --seed 1 "When is the meeting?"'),),
        ),
        Block(
            "Have a conversation. Ctrl-D ends it.",
            (
                Line("octavo chat --seed 1", CHAT_PROMPT),
                Line("Say hello in French.", CHAT_PROMPT),
                Line("/set max_tokens 60", CHAT_PROMPT),
                Line("Tell me about Paris.", CHAT_PROMPT),
                Line(CTRL_D),
            ),
        ),
        Block(
            "List the downloaded models and show what a model file contains.",
            (Line("octavo list"), Line("octavo show smollm2")),
        ),
        Block("Use it from Python.", script),
        Block(
            "Start a server in a second terminal.",
            (Line(f"octavo serve --port {PORT}", "OPENAI_BASE_URL"),),
            terminal=1,
        ),
        Block("Any OpenAI client can talk to it.", (Line(CURL), Line("octavo ps"), Line("octavo stop 8123"))),
    ]


class Terminal:
    """A shell in its own terminal, without colours and cursor movements (TERM=dumb)."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._read(PROMPT)

    def enter(self, line: Line) -> str:
        """Type the line and return what the screen shows, without the text that marks the end."""
        os.write(self._master, (line.typed if line.typed == CTRL_D else line.typed + "\n").encode())
        return self._read(line.until)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGHUP)
            self._process.wait(10)
        os.close(self._master)

    def _read(self, until: str) -> str:
        """Read until `until` appears: at the end of the output if it is a prompt, otherwise anywhere."""
        seen, end = "", time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            ready, _, _ = select.select([self._master], [], [], 0.3)
            if ready:
                seen += os.read(self._master, 65536).decode(errors="replace")
                continue
            text = plain_text(seen)
            if text.endswith(until):
                return text.removesuffix(until)
            if not until.endswith(" ") and until in text:
                return text
        raise TimeoutError(f"{until!r} did not come within {LIMIT_S:.0f} s after {plain_text(seen)!r}")


def plain_text(raw: str) -> str:
    """Remove escape sequences; a carriage return starts its line again."""
    text = re.sub(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])", "", raw).replace("\r\n", "\n")
    lines = [re.sub(r"^.*\r(?=.)", "", line).replace("\r", "") for line in text.split("\n")]
    return "\n".join(lines)


def record(models: Path | None) -> str:
    """Run the commands now and return the page."""
    with tempfile.TemporaryDirectory(prefix="first-steps-") as folder:
        home = Path(folder).resolve()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO", "XDG"))},
            "HOME": str(home),
            "TERM": "dumb",
            "PS1": PROMPT,
            "PS2": "> ",
            "LC_ALL": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        if models is not None:
            cache = home / ".cache" / "octavo"
            cache.mkdir(parents=True)
            (cache / "models").symlink_to(models.resolve())
        return "\n".join(_page(environment, home)).replace(str(home), HOME)


def _page(environment: dict[str, str], home: Path) -> Iterator[str]:
    terminals = [Terminal(environment, home) for _ in range(2)]
    yield (
        "# The first five minutes\n\n"
        "<!-- Written by tools/record_first_steps.py. Do not edit: change the script and run it. -->\n\n"
        "This page is a real terminal session, word for word. Octavo was installed as the README describes. "
        "The terminal had no colours and no progress bars (`TERM=dumb`). The home folder was new; this page calls it "
        f"`{HOME}`. The machine: {platform.system()} on {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. Times and sizes differ from machine to machine. The answers do not, because "
        "each uses a seed or the most likely token. `python tools/record_first_steps.py --check` checks this page.\n"
    )
    try:
        for block in blocks():
            prompt, shown = PROMPT, ""
            for line in block.lines:
                shown += prompt + terminals[block.terminal].enter(line)
                prompt = line.until
            yield f"{block.words}\n\n```text\n{shown.rstrip()}\n```\n"
    finally:
        for terminal in terminals:
            terminal.close()


def comparable(page: str) -> list[str]:
    """Return the lines of a page that must be the same on every machine."""
    lines: list[str] = []
    in_doctor = False
    for line in page.splitlines():
        if not line or line.startswith("stopping"):  # a progress bar leaves lines that depend on timing
            continue
        if line.startswith(PROMPT) or line.startswith("```"):
            in_doctor = line == PROMPT + "octavo doctor"
        elif in_doctor:
            line = re.sub(r"(?<=\S)\s{2,}.*", "", line)
        line = re.sub(r"The machine: .*?Times", "Times", line)
        line = re.sub(r"chatcmpl-[\w-]+", "ID", line)
        line = re.sub(r"\bfp_\w+", "FINGERPRINT", line)
        line = re.sub(r'"created":\d+', '"created":N', line)
        line = re.sub(r"\b\d+ \w+ ago|just now", "RECENTLY", line)
        line = re.sub(r"^\d+( +http\S+ .*) \d+$", r"PID\1 N", line)
        line = re.sub(r"^stopped \d+", "stopped PID", line)
        line = re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\b", "TIME", line)
        line = re.sub(r"\b[\d,]+ (blocks|tokens of cache|threads)", r"N \1", line)
        line = re.sub(r"\b[\d,.]+ ?(ms|s|GB/s|[KMG]iB|tokens/s|tok/s)\b", r"N \1", line)
        lines.append(re.sub(r"\s{2,}", "  ", line))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--models", type=Path, help="models folder of a cache, instead of a download")
    options = parser.parse_args()
    page = record(options.models)
    if not options.check:
        PAGE.write_text(page)
        return 0
    difference = list(difflib.unified_diff(comparable(PAGE.read_text()), comparable(page), "page", "now", lineterm=""))
    print("\n".join(difference) or f"{PAGE.name} is what the commands show")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
