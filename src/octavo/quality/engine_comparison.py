"""Compares the times and answers of OpenAI-compatible servers, which take turns on the same prompts."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from octavo.backends.quantizers import compute_threads
from octavo.bench import Spread
from octavo.errors import UsageError
from octavo.quality.evaluation import Progress
from octavo.quality.measured_servers import ServerError, ServerProcess, first_model, free_port, stream_completion
from octavo.quality.texts import read_utf8

PAUSE_S = 0.3  # the spinning threads of the engine whose turn is over go to sleep


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to compare.

    program: path of llama.cpp's server, to start it here.
    url: address of a server that is already running.
    """

    name: str
    program: str | None = None
    url: str | None = None

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        """Parse `octavo`, `llama.cpp=PROGRAM` or `NAME=URL`. Raises UsageError."""
        name, found, value = text.partition("=")
        if text == "octavo":
            return cls("octavo")
        if found and name and value.startswith(("http://", "https://")):
            return cls(name, url=value)
        if found and name == "llama.cpp":
            program = shutil.which(value)
            if program is None:
                raise UsageError(f"--engine {text}: {value} is not a program; name llama.cpp's llama-server")
            return cls(name, program=program)
        raise UsageError(f"--engine {text!r} is unknown; give octavo, llama.cpp=PROGRAM or NAME=http://HOST:PORT")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options for all engines.

    max_tokens: limit for each answer.
    threads: threads of each engine that is started here; 0 means one per core.
    """

    turns: int = 3
    max_tokens: int = 200
    threads: int = 0
    context: int = 4096
    api_key: str | None = None


@dataclass(slots=True)
class EngineFigures:
    """Figures over all answers of one engine.

    tokens_per_s: output tokens divided by the total time of a turn's answers, one value per turn.
    ratio: the first engine's tokens_per_s divided by this engine's, for each turn.
    answers: the text for each prompt.
    """

    name: str
    model: str
    ttft_s: Spread
    tpot_s: Spread
    tokens_per_s: Spread
    num_tokens: int
    ratio: Spread | None = None
    answers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Engine:
    """A running engine, with its measurements so far."""

    spec: EngineSpec
    url: str
    model: str
    honours_end: bool = False  # it does not take ignore_eos: its answers may be shorter
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    turns: list[tuple[int, float]] = field(default_factory=list)  # tokens and seconds of each turn
    answers: dict[int, str] = field(default_factory=dict)

    def ask(self, place: int, prompt: str, options: EngineOptions) -> tuple[int, float]:
        """Request one answer, and return its tokens and seconds. Prefix caches are bypassed where possible."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        if self.spec.url is None:
            body |= {"cache_prompt": False} if self.spec.program else {"cache_salt": uuid.uuid4().hex}
        own = body if self.honours_end else body | {"ignore_eos": True}
        try:
            answer = stream_completion(self.url, own, options.api_key)
        except ServerError as error:
            if self.honours_end or error.status not in range(400, 500):
                raise
            self.honours_end = True  # OpenAI itself refuses fields that it does not know
            answer = stream_completion(self.url, body, options.api_key)
        if not answer.times:
            raise ServerError(f"{self.url} ended its answer without any text")
        self.ttft.append(answer.ttft_s)
        self.tpot.append(answer.tpot_s)
        self.answers.setdefault(place, answer.text)
        return answer.num_tokens, answer.seconds

    def figures(self, first: _Engine, options: EngineOptions) -> EngineFigures:
        rates = [tokens / seconds for tokens, seconds in self.turns]
        ratios = [a[0] / a[1] / rate for a, rate in zip(first.turns, rates, strict=True)]
        notes = ["answers end with the end of the text"] if self.honours_end else []
        if self.spec.url is not None and options.turns > 1:
            notes.append("a prefix cache may shorten the times to the first token after the first turn")
        return EngineFigures(
            name=self.spec.name,
            model=self.model,
            ttft_s=Spread.of(self.ttft),
            tpot_s=Spread.of(self.tpot),
            tokens_per_s=Spread.of(rates),
            num_tokens=sum(tokens for tokens, _ in self.turns),
            ratio=None if self is first else Spread.of(ratios),
            answers=[self.answers[i] for i in range(len(self.answers))],
            notes=notes,
        )


def compare_engines(
    specs: Sequence[EngineSpec],
    model: Path | None,
    prompts: Sequence[str],
    options: EngineOptions = EngineOptions(),
    progress: Progress | None = None,
) -> list[EngineFigures]:
    """Send every prompt to every engine in every turn.

    The engines answer a prompt one after another. The engine that answers first changes from prompt to prompt.

    model: model for the engines that are started here; without it, starting them raises UsageError.

    Raises ServerError naming the engine.
    """
    names = [spec.name for spec in specs]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise UsageError(f"two engines are called {twice}; give each its own name")
    total = options.turns * len(prompts) * len(specs)
    with contextlib.ExitStack() as stack:
        engines = [_start(spec, model, options, stack) for spec in specs]
        for engine in engines:  # the first request of a server pays for what is made once
            stream_completion(engine.url, {"model": engine.model, "prompt": "Hello", "max_tokens": 4}, options.api_key)
        done = 0
        for turn in range(options.turns):
            sums = {engine.spec.name: (0, 0.0) for engine in engines}
            for place, prompt in enumerate(prompts):
                shift = (turn + place) % len(engines)
                for engine in engines[shift:] + engines[:shift]:
                    time.sleep(PAUSE_S)
                    tokens, seconds = engine.ask(place, prompt, options)
                    before = sums[engine.spec.name]
                    sums[engine.spec.name] = (before[0] + tokens, before[1] + seconds)
                    done += 1
                    if progress is not None:
                        progress("answers", done, total)
            for engine in engines:
                engine.turns.append(sums[engine.spec.name])
        return [engine.figures(engines[0], options) for engine in engines]


def _start(spec: EngineSpec, model: Path | None, options: EngineOptions, stack: contextlib.ExitStack) -> _Engine:
    if spec.url is not None:
        return _Engine(spec, spec.url, first_model(spec.url, options.api_key))
    if model is None:
        raise UsageError(f"--engine {spec.name} is started here and needs a MODEL")
    port = free_port()
    threads = str(compute_threads(options.threads))  # the same for all: llama.cpp's own choice may be another
    if spec.program is None:
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port), "--num-threads", threads]
        command += ["--max-model-len", str(options.context)]
    else:
        command = [spec.program, "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-np", "1"]
        command += ["-c", str(options.context), "-t", threads, "-tb", threads]
    log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-compare-"))) / "server.log"
    try:
        process = ServerProcess(spec.name, command, port, log)
    except OSError as error:
        raise ServerError(f"{spec.name} cannot be started: {error}") from None
    stack.callback(process.close)
    try:
        process.wait_ready()
    except ServerError as error:
        lines = log.read_text("utf-8", "replace").strip().splitlines() or [""]
        raise ServerError(f"{str(error).partition(';')[0]}: {lines[-1][:300]}") from None
    return _Engine(spec, process.url, first_model(process.url))


def read_prompts(path: Path | None) -> list[str]:
    """Read prompts from a file, separated by lines of three dashes. None uses nine built-in prompts.

    Raises UsageError.
    """
    if path is None:
        text = (resources.files("octavo.quality") / "data" / "prompts.txt").read_text("utf-8")
    else:
        text = read_utf8(path)
    prompts = [part.strip("\n") for part in ("\n" + text + "\n").split("\n---\n")]
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise UsageError(f"{path} has no prompts")
    return prompts
