"""Measure the bars of prompts stored on disk (`--prompt-cache-dir`) in one run.

    python benchmarks/kept_prompts.py [--model smollm2] [--turns 5] [--only PART] [--realtime] [--peer llama.cpp=PYTHON]

Medians of turns, with the page cache warm. Every engine is loaded in a separate process.

- restart: the time to the first token of a prompt of --tokens tokens in a new process without a folder relative to a
  new process with a folder that an earlier process filled, in turns. Bar: 15 for files of 700 MB and more, else 3.
- writing: the time between tokens of a stream while a prompt of --tokens tokens is computed and written,
  relative to the same without a folder; new processes in turns. At most 1.03.
- miss: the time to the first token of prompts of 64 tokens that the filled folder does not contain, compared with
  an engine without a folder in the same process, prompt by prompt; the difference is at most 1 ms.
- off: the time between tokens of an engine without a folder after another engine of its process has written and read
  one, relative to the time before. Without a folder the engine only checks whether it has a store: at most 1.02.
- llama.cpp, with --peer: the time of `llama_state_load_file` and the last token of the same prompt, in its process,
  relative to our time after a restart. At least 1. --model must then be a GGUF file.

The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from compare import ahead, size_of
from protocol import Peer
from report import bar, bar_table, commit, machine

from octavo import LLM, SamplingParams
from octavo.loader.hub import resolve_model
from octavo.outputs import RequestOutput

PARTS = ("restart", "writing", "miss", "off")
LARGE_BYTES = 700_000_000  # of the 1.5B and larger ones
STREAM_TOKENS = 192
MISS_TOKENS, NUM_MISSES = 64, 40


class Subject(NamedTuple):
    """An engine with a `prompt_cache_dir` (None for none) and the number of tokens of a long prompt."""

    model: str
    num_tokens: int
    folder: str | None = None

    def load(self) -> LLM:
        """Load an engine that has answered once. Drafts are off, because they would hide the time of a step."""
        room = {"max_model_len": self.num_tokens + 512, "kv_cache_memory": "1GiB", "speculation": "off"}
        llm = LLM(self.model, prompt_cache_dir=self.folder, **room)  # type: ignore[arg-type]
        answer(llm, [ids(0, 12)], 4)
        return llm


def ids(seed: int, count: int) -> list[int]:
    """Return a prompt that has nothing in common with prompts of other seeds."""
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(count)]


def answer(llm: LLM, prompts: list[list[int]], *num_tokens: int) -> list[RequestOutput]:
    """Answer all prompts at the same time.

    num_tokens: tokens of each answer.
    """
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in num_tokens]
    return llm.generate(prompts, params, use_tqdm=False)


def first_token_s(output: RequestOutput) -> float:
    assert output.metrics is not None
    assert output.metrics.time_to_first_token_s is not None
    return output.metrics.time_to_first_token_s


def token_s(output: RequestOutput) -> float:
    """Return the mean time between its tokens."""
    assert output.metrics is not None
    return output.metrics.decode_s / (len(output.outputs[0].token_ids) - 1)


def in_new_process(work: Callable[..., Any], *given: object) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def in_turns(turns: int, measure: Callable[[Subject], float], off: Subject, on: Callable[[int], Subject]) -> float:
    """Return the median of a measurement with a folder relative to one without, which take turns at going first."""
    ratios = []
    for turn in range(turns):
        pair = (off, on(turn))
        found = {subject: in_new_process(measure, subject) for subject in (pair if turn % 2 else pair[::-1])}
        ratios.append(found[pair[1]] / found[off])
    return statistics.median(ratios)


# --- in a process of its own ---


def long_prompt_s(subject: Subject) -> float:
    """Return the seconds to the first token of the long prompt."""
    with subject.load() as llm:
        [output] = answer(llm, [ids(1, subject.num_tokens)], 1)
        assert output.metrics is not None
        print(f"  {output.metrics.num_loaded_tokens} tokens from disk: {first_token_s(output):.3f} s", flush=True)
        return first_token_s(output)


def stream_token_s(subject: Subject) -> float:
    """Return the seconds between tokens of a stream while a long prompt is computed."""
    with subject.load() as llm:
        stream, _ = answer(llm, [ids(2, 32), ids(3, subject.num_tokens)], STREAM_TOKENS, 1)
        return token_s(stream)


def miss_s(subject: Subject) -> float:
    """Return the median of how many seconds longer new prompts take to their first token."""
    with subject.load() as on, subject._replace(folder=None).load() as off:
        longer = []
        for i in range(NUM_MISSES):
            prompt, found = [ids(100 + i, MISS_TOKENS)], {}
            for llm in (on, off) if i % 2 else (off, on):
                [output] = answer(llm, prompt, 1)
                found[llm] = first_token_s(output)
            longer.append(found[on] - found[off])
        return statistics.median(longer)


def off_ratio(subject: Subject) -> float:
    with subject._replace(folder=None).load() as llm:
        before = token_s(answer(llm, [ids(2, 32)], STREAM_TOKENS)[0])
        with subject.load() as other:
            answer(other, [ids(1, subject.num_tokens), ids(4, MISS_TOKENS)], 1, 1)
        return token_s(answer(llm, [ids(5, 32)], STREAM_TOKENS)[0]) / before


# --- the bars ---


def measure_all(given: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    parts, turns = given.only or PARTS, given.turns
    off = Subject(given.model, given.tokens)
    filled, rows = off._replace(folder=str(root / "filled")), []
    in_new_process(long_prompt_s, filled)
    if "restart" in parts:
        wanted = 15.0 if size_of(resolve_model(given.model)) >= LARGE_BYTES else 3.0
        ratio = in_turns(turns, long_prompt_s, off, lambda _: filled)
        rows.append(bar("first token after a restart: without a folder / with", 1 / ratio, at_least=wanted))
    if "writing" in parts:
        ratio = in_turns(turns, stream_token_s, off, lambda turn: off._replace(folder=str(root / f"new-{turn}")))
        rows.append(bar("time between tokens beside writing / without a folder", ratio, at_most=1.03))
    if "miss" in parts:
        found = [in_new_process(miss_s, filled) for _ in range(turns)]
        rows.append(bar("ms that a miss adds to the first token", statistics.median(found) * 1e3, at_most=1.0))
    if "off" in parts:
        found = [in_new_process(off_ratio, filled) for _ in range(turns)]
        name = "time between tokens, switched off: after kept prompts / before"
        rows.append(bar(name, statistics.median(found), at_most=1.02))
    if given.peer is not None:
        rows.append(measure_peer(given, filled, root))
    return rows


def measure_peer(given: argparse.Namespace, filled: Subject, root: Path) -> dict[str, Any]:
    name, _, python = given.peer.partition("=")
    peer, ratios = Peer(name, python, root / "peer.log"), []
    try:
        threads = machine()["cores"]
        peer.ask("load", model=given.model, threads=threads, context=given.tokens + 512, sequences=1)
        for _ in range(given.turns):
            ours = in_new_process(long_prompt_s, filled)
            theirs = peer.ask("restored", prompt=ids(1, given.tokens), path=str(root / "state.bin"))["result"]
            ratios.append(theirs / ours)
    finally:
        peer.close()
    return bar(f"{name}'s restore / ours", statistics.median(ratios), at_least=1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000, help="of the long prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--peer", metavar="llama.cpp=PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--realtime", action="store_true", help="run at real-time priority (needs root)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-kept-") as name, ahead((), given.realtime):
        rows = measure_all(given, Path(name))  # processes inherit the priority
    print(f"{machine()}, commit {commit()}, {given.model}, a prompt of {given.tokens} tokens, {given.turns} turns")
    print(bar_table(rows))
    return int(any(row["met"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
