"""The protocol between a measuring script and an engine in a separate process: one JSON line each way.

A module of `peers` defines an `Engine` and calls `serve(engine)`; a measuring script starts it with `Peer`.
The engine's own output goes to standard error, so that it cannot disturb the lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from agreement import Agreement, Reference
from numpy.typing import NDArray


class PeerError(Exception):
    """An engine could not execute a command."""


class LoadOptions(NamedTuple):
    """The options with which an engine is loaded."""

    model: str
    """A GGUF file, or the result of `convert.py` for it."""
    threads: int
    context: int
    """Maximum tokens of one prompt and its answer."""
    sequences: int
    """Maximum number of sequences at once."""
    quantization: str | None = None
    """How an unquantized checkpoint is quantized while it is loaded. Only for octavo."""
    kv_dtype: str = "float16"
    """Number type of the cache. `int8` (with scales) is only for octavo and for llama.cpp, which calls it q8_0."""


class Generated(NamedTuple):
    """The tokens that an engine generated for prompts submitted together, and the time that it took."""

    first_s: float
    """Seconds until every prompt had its first token."""
    steps_s: float
    """Seconds for all further tokens."""
    tokens: list[list[int]]
    """New tokens of each prompt, without the prompt itself."""


class Engine(Protocol):
    """The interface of a peer module. No cache may keep any part of a prompt for the next one."""

    version: str
    """After `load`: the name, the version, and everything else that determines the speed."""

    def load(self, options: LoadOptions) -> None:
        """Load the model."""

    def decode(self, prompt: list[int], count: int) -> Generated:
        """Run one prompt, then `count` single-token steps, greedily and past any end of text."""

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        """Run several equally long prompts at the same time, like `decode`."""


class ReferenceEngine(Engine, Protocol):
    """An engine whose accuracy is measured too."""

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Return the logits [tokens, vocabulary] after each token, from an empty cache, as one prompt."""


class OwnEngine(Engine, Protocol):
    """An engine with measures that only Octavo provides."""

    def cache_bytes(self, tokens: int) -> int:
        """Return the size in bytes of the cache for this many tokens."""

    def shared_prefix(self, first: list[int], second: list[int]) -> tuple[float, float]:
        """Return the seconds until the first token of one prompt, then of another with the same beginning."""

    def host_time(self, prompts: list[list[int]], count: int) -> float:
        """Return the seconds without a native step in the median of `count` decode steps of all prompts together."""


def peak_resident_bytes() -> int:
    """Return the peak resident set of this process so far, including mapped file pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise PeerError("/proc/self/status has no VmHWM")


def _checked(generated: Generated, prompts: int, count: int) -> dict[str, Any]:
    """Return the answer to a command that generates. Raises PeerError if the number of tokens is wrong."""
    lengths = [len(tokens) for tokens in generated.tokens]
    if lengths != [count + 1] * prompts:
        raise PeerError(f"asked for {count + 1} tokens after each of {prompts} prompts, generated {lengths}")
    return generated._asdict()


def answer_to(engine: Any, command: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's answer to a command. Raises PeerError for an unknown command."""
    start = time.perf_counter()
    if command == "memory":
        return {"peak_bytes": peak_resident_bytes()}
    if command == "agreement":
        reference = Reference.open(Path(values["folder"]))
        parts = [reference.agreement(at, engine.logits(row[:-1].tolist())) for at, row in enumerate(reference.tokens)]
        return Agreement.joined(parts).summary()
    if command == "load":
        engine.load(LoadOptions(**values))
        return {"seconds": time.perf_counter() - start, "version": engine.version}
    method = getattr(engine, command, None)
    if command.startswith("_") or method is None:
        raise PeerError(f"unknown command {command!r}")
    result = method(**values)
    if command == "decode":
        return _checked(result, 1, values["count"])
    if command == "many":
        return _checked(result, len(values["prompts"]), values["count"])
    return {"result": result}


def serve(engine: Engine) -> None:
    """Answer commands from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        values = json.loads(line)
        try:
            answer = answer_to(engine, values.pop("command"), values)
        except Exception as error:  # the measuring script reports it and goes on with the other engines
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Peer:
    """A running peer.

    The Python of its environment runs the module of `peers` with its name: `llama_cpp` for `llama.cpp`.
    """

    def __init__(self, name: str, python: str, log: Path) -> None:
        self.name = name
        module = name.replace(".", "_")
        here = Path(__file__).resolve().parent
        if not (here / "peers" / f"{module}.py").exists():
            raise PeerError(f"no module peers/{module}.py for a peer named {name!r}")
        # A module, not a script: a peer named as its library would be imported in the library's place.
        paths = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
        self._started = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", f"peers.{module}"],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._log = log
        self.process_id = self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started

    def ask(self, command: str, **values: object) -> dict[str, Any]:
        """Return the answer to one command. Raises PeerError with the engine's own message."""
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
        """End the process, which frees its memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
