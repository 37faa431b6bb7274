"""How a measuring script talks to an engine in a process of its own: one JSON line each way.

A peer script defines an `Engine` and calls `serve(engine)`; a measuring script starts it with `Peer`.
The engine's own output goes to standard error, so that it cannot disturb the lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from agreement import Agreement, Reference
from numpy.typing import NDArray


class PeerError(Exception):
    """An engine could not do what it was asked."""


class Engine(Protocol):
    """What a peer script provides."""

    version: str
    """After `load`: the name, the version, and what else decides the speed."""

    def load(self, model: str, threads: int, context: int) -> None:
        """Load a GGUF file."""

    def prefill(self, tokens: list[int]) -> None:
        """Run a prompt from an empty cache, until the logits of its last token are there."""

    def decode(self, prompt: list[int], count: int) -> tuple[float, float]:
        """Run the prompt, then `count` single-token steps; seconds until the first token, seconds of the steps."""

    def cache_bytes(self, tokens: int) -> int:
        """What the cache of so many tokens takes."""

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """The logits [tokens, vocabulary] after each token, from an empty cache, as one prompt."""


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far, mapped file pages included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise PeerError("/proc/self/status has no VmHWM")


def _answer(engine: Engine, command: str, values: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    if command == "load":
        engine.load(**values)
        return {"seconds": time.perf_counter() - start, "version": engine.version}
    if command == "prefill":
        engine.prefill(values["tokens"])
        return {"seconds": time.perf_counter() - start}
    if command == "decode":
        first, steps = engine.decode(values["prompt"], values["count"])
        return {"first_token_seconds": first, "seconds": steps}
    if command == "agreement":
        reference = Reference.open(Path(values["folder"]))
        parts = [reference.agreement(at, engine.logits(row[:-1].tolist())) for at, row in enumerate(reference.tokens)]
        return Agreement.joined(parts).summary()
    if command == "memory":
        return {"peak_bytes": peak_resident_bytes(), "cache_bytes": engine.cache_bytes(values["tokens"])}
    raise PeerError(f"unknown command {command!r}")


def serve(engine: Engine) -> None:
    """Answer commands from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        values = json.loads(line)
        try:
            answer = _answer(engine, values.pop("command"), values)
        except Exception as error:  # the measuring script reports it and goes on with the other engines
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Peer:
    """A running peer script."""

    def __init__(self, name: str, python: str, log: Path) -> None:
        self.name = name
        script = Path(__file__).with_name(f"peer_{name.replace('.', '_')}.py")
        if not script.exists():
            raise PeerError(f"no script {script} for a peer named {name!r}")
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._log = log
        self.process_id = self._process.pid

    def ask(self, command: str, **values: object) -> dict[str, Any]:
        """The answer to one command. Raises `PeerError` with the engine's own message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended with status {self._process.wait()}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process and give its memory back."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
