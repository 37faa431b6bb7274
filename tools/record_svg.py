#!/usr/bin/env python3
"""Record a command at a terminal as docs/plots/run.svg, an animated picture for the README.

    python tools/record_svg.py [--models FOLDER]

The command runs once, in a terminal of its own. Each piece of output appears in the picture at the time when it
appeared on the screen, except that long waits, such as the one for the start, are shortened to a second.
"""

from __future__ import annotations

import argparse
import codecs
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.record_first_steps import plain_text  # noqa: E402

RECORDING = ROOT / "docs" / "plots" / "run.svg"
COMMAND = ("octavo", "run", "--seed", "1", "Why is the sky blue?")
COLUMNS, LINE_HEIGHT, CHARACTER = 84, 20, 8.4
TYPING_S, LONGEST_WAIT_S = 0.05, 1.0

STYLE = """
rect { fill: #0f172a }
text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #e2e8f0; white-space: pre; opacity: 0;
  animation: show 1ms linear forwards }
.prompt { fill: #4ade80; opacity: 1; animation: none }
@keyframes show { to { opacity: 1 } }
"""
Piece = tuple[float, str]


def record(environment: dict[str, str]) -> list[Piece]:
    """Return (seconds since the start, text) for each piece of output. Raises RuntimeError if the command fails."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / COMMAND[0]), *COMMAND[1:]],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    start, pieces = time.monotonic(), []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # the other end has closed
            break
        if not data:
            break
        pieces.append((time.monotonic() - start, plain_text(decoder.decode(data))))
    os.close(master)
    if process.wait(10) != 0:
        raise RuntimeError("".join(text for _, text in pieces))
    return pieces


def shortened(pieces: list[Piece], start: float) -> list[Piece]:
    """Return the pieces from `start` on, with no wait longer than a second."""
    found, shown, before = [], start, 0.0
    for at, text in pieces:
        shown += min(at - before, LONGEST_WAIT_S)
        before = at
        found.append((shown, text))
    return found


def placed(pieces: list[Piece]) -> list[tuple[float, int, int, str]]:
    """Return (seconds, line, column, word) for each word, wrapped at the terminal's width."""
    found, line, column = [], 0, 0
    for at, text in pieces:
        for word in re.findall(r"\n|[^\s]+|[^\S\n]+", text):
            if word == "\n":
                line, column = line + 1, 0
                continue
            if column + len(word) > COLUMNS:
                line, column = line + 1, 0
                if word.isspace():
                    continue
            found.append((at, line, column, word))
            column += len(word)
    return [place for place in found if not place[3].isspace()]


def draw(pieces: list[Piece]) -> str:
    """Return the animated picture of a session: the typed command, followed by its output."""
    typed = " ".join(f'"{word}"' if " " in word else word for word in COMMAND)
    words = [(at * TYPING_S, 0, 2 + at, character) for at, character in enumerate(typed) if character != " "]
    after = shortened(pieces, len(typed) * TYPING_S)
    words += [(at, line + 1, column, word) for at, line, column, word in placed(after)]
    height = (max(line for _, line, _, _ in words) + 2) * LINE_HEIGHT
    width = int((COLUMNS + 3) * CHARACTER)
    texts = "\n".join(
        f'<text x="{12 + column * CHARACTER:.1f}" y="{24 + line * LINE_HEIGHT}" style="animation-delay:{at:.2f}s">'
        f"{escape(word)}</text>"
        for at, line, column, word in words
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(typed, quote=True)} and its answer">\n<style>{STYLE}</style>\n'
        f'<rect width="100%" height="100%" rx="8"/>\n<text class="prompt" x="12" y="24">$</text>\n{texts}\n</svg>\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder of downloaded models [default: this user's]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": str(COLUMNS)}
        if chosen.models is not None:
            environment["OCTAVO_CACHE"] = folder
            (Path(folder) / "models").symlink_to(chosen.models.resolve())
        pieces = record(environment)
    RECORDING.write_text(draw(pieces))
    return 0


if __name__ == "__main__":
    sys.exit(main())
