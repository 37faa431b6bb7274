"""Measure the bars of adapters (LoRA) in one run, with random adapters of rank 16 on all linear modules.

    python benchmarks/adapters.py [--model 1.5b.gguf] [--turns 5] [--only PART] [--realtime] [--peer NAME=PYTHON]

An engine with adapters and one without are measured in turns in one process. The figures are ratios of medians.

- off: the time between tokens without adapters configured, after the other engine has used adapters, relative to the
  time before. Without adapters the graph has no operations for them, so only noise differs: at most 1.02.
- rows: the time between tokens of one row with an adapter relative to the base, at most 1.08; of four rows with four
  adapters relative to four rows of the base, at most 1.20.
- users: tokens per second of four concurrent users with four adapters, relative to one user after another, at least 3.
- prompts: the time of a prompt of 512 tokens with an adapter relative to the base, at most 1.12.
- loading: seconds to read an adapter in 16-bit floats (37 MB for 1.5B), at most 0.3; and how many milliseconds longer
  the longest pause of a stream is meanwhile than for the stream alone, at most 10.
- llama.cpp, with --peer: seconds of its four users relative to ours, at least 2.5. `xllamacpp` is its server in a
  wheel, used by four users at once; it reports if its kernels use fewer instructions. `llama.cpp` is llama-cpp-python.
  Because the server computes requests with different adapters in separate batches, it answers one user after another,
  with the adapter set before. --model must then be a GGUF file.

The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from compare import ahead
from numpy.typing import NDArray
from protocol import Peer
from report import bar, bar_table, commit, machine

from octavo import LLM, LoRARequest, SamplingParams
from octavo.adapters.peft import CONFIG_NAME, PREFIX, WEIGHTS_NAME
from octavo.finetune.adapter_folder import AdapterDescription
from octavo.finetune.find_modules import ALL_LINEAR, find_modules
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.loader.safetensors_writer import SafeTensor, write_safetensors
from octavo.models import build_graph

PARTS = ("off", "rows", "users", "prompts", "loading")
RANK, USERS = 16, 4
TOKENS, PROMPT_TOKENS = 48, 512
OPTIONS = {"max_model_len": 1024, "speculation": "off", "enable_prefix_caching": False, "kv_cache_memory": "512MiB"}


def save_adapter(model: Path, folder: Path, seed: int) -> int:
    """Write a PEFT folder with random factors in 16-bit floats, and return their size in bytes."""
    with closing(open_checkpoint(model)) as checkpoint:
        graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
        modules = find_modules(checkpoint, graph, [ALL_LINEAR])
    rng, tensors = np.random.default_rng(seed), []
    for module in modules:
        for letter, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
            numbers = (rng.standard_normal(shape, np.float32) * 0.02).astype(np.float16)
            name = f"{PREFIX}{module.name}.lora_{letter}.weight"
            tensors.append(SafeTensor(name, "F16", shape, partial(_bytes_of, numbers)))
    folder.mkdir()
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    description = AdapterDescription(str(model), RANK, RANK, modules)
    (folder / CONFIG_NAME).write_text(json.dumps(description.config()))
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_of(numbers: NDArray[np.float16]) -> list[NDArray[np.uint8]]:
    return [numbers.reshape(-1).view(np.uint8)]


def ids(seed: int, count: int) -> list[int]:
    """Return a prompt that has nothing in common with prompts of other seeds."""
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(count)]


class Measurement:
    """Both engines, and the adapters in `folders`."""

    def __init__(self, model: Path, folders: Sequence[Path], turns: int) -> None:
        self.plain = LLM(str(model), **OPTIONS)  # type: ignore[arg-type]
        self.adapted = LLM(str(model), enable_lora=True, max_loras=USERS, max_lora_rank=RANK, **OPTIONS)  # type: ignore[arg-type]
        self.requests = [LoRARequest(f"a{i}", i + 1, folder) for i, folder in enumerate(folders)]
        self._turns, self._seed = turns, 0
        for llm, requests in ((self.plain, None), (self.adapted, self.requests)):
            self._answer(llm, [ids(i, 8) for i in range(USERS)], 4, requests)

    def close(self) -> None:
        self.plain.close()
        self.adapted.close()

    def off(self) -> list[dict[str, Any]]:
        def plain() -> float:
            return self._token_s(self.plain, 1, None)

        before, after = [], []
        for _ in range(self._turns):
            before.append(plain())
            self._token_s(self.adapted, USERS, self.requests)
            after.append(plain())
        ratio = statistics.median(after) / statistics.median(before)
        return [bar("time between tokens, none configured: after adapters / before", ratio, at_most=1.02)]

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for count, name, limit in ((1, "one row", 1.08), (USERS, "four rows of four adapters", 1.2)):
            ratio = self.in_turns(
                lambda n=count: self._token_s(self.adapted, n, self.requests[:n]),  # type: ignore[misc]
                lambda n=count: self._token_s(self.plain, n, None),  # type: ignore[misc]
            )
            found.append(bar(f"time between tokens, {name} / the base", ratio, at_most=limit))
        return found

    def users(self) -> list[dict[str, Any]]:
        ratio = self.in_turns(lambda: self.users_s(at_once=False), lambda: self.users_s(at_once=True))
        return [bar("tokens/s of four users of four adapters at once / one after another", ratio, at_least=3.0)]

    def prompts(self) -> list[dict[str, Any]]:
        ratio = self.in_turns(
            lambda: self._first_s(self.adapted, self.requests[:1]), lambda: self._first_s(self.plain, None)
        )
        return [bar(f"time of a prompt of {PROMPT_TOKENS} tokens with an adapter / the base", ratio, at_most=1.12)]

    def loading(self) -> list[dict[str, Any]]:
        seconds, stalls = [], []
        for _ in range(self._turns):
            self.adapted.remove_lora(self.requests[0].lora_name)
            start = time.perf_counter()
            self.adapted.add_lora(self.requests[0])
            seconds.append(time.perf_counter() - start)
            alone = self._longest_pause(lambda: None)
            self.adapted.remove_lora(self.requests[0].lora_name)
            stalls.append(self._longest_pause(lambda: self.adapted.add_lora(self.requests[0])) - alone)
        return [
            bar("seconds until an adapter has been read", statistics.median(seconds), at_most=0.3),
            bar("ms by which reading one lengthens the longest pause of a stream", _ms(stalls), at_most=10.0),
        ]

    def users_s(self, *, at_once: bool) -> float:
        """Return the seconds until all users have their answers."""
        start = time.perf_counter()
        if at_once:
            self._answer(self.adapted, self._prompts(USERS, 8), TOKENS, self.requests)
        else:
            for request in self.requests:
                self._answer(self.adapted, self._prompts(1, 8), TOKENS, [request])
        return time.perf_counter() - start

    def _longest_pause(self, beside: Callable[[], object]) -> float:
        """Return the longest time between two tokens of a base-model stream while something else happens."""
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        [prompt], times = self._prompts(1, 8), []
        thread = threading.Thread(target=beside)
        with self.adapted.stream(prompt, params) as stream:
            for _ in stream:
                times.append(time.perf_counter())
                if len(times) == TOKENS // 4:
                    thread.start()
        thread.join()
        return max(np.diff(times[TOKENS // 4 - 1 :]).tolist())

    def in_turns(self, numerator: Callable[[], float], denominator: Callable[[], float]) -> float:
        """Return the ratio of the medians of two measurements, which take turns at going first."""
        pair: tuple[tuple[Callable[[], float], list[float]], ...] = ((numerator, []), (denominator, []))
        for turn in range(self._turns):
            for measure, found in pair if turn % 2 else pair[::-1]:
                found.append(measure())
        return statistics.median(pair[0][1]) / statistics.median(pair[1][1])

    def _token_s(self, llm: LLM, rows: int, requests: Sequence[LoRARequest] | None) -> float:
        """Return the seconds between tokens for this many concurrent requests."""
        outputs = self._answer(llm, self._prompts(rows, 8), TOKENS, requests)
        return max(output.metrics.decode_s for output in outputs) / (TOKENS - 1)

    def _first_s(self, llm: LLM, requests: Sequence[LoRARequest] | None) -> float:
        [output] = self._answer(llm, self._prompts(1, PROMPT_TOKENS), 1, requests)
        return float(output.metrics.prefill_s)

    def _prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        self._seed += count
        return [ids(self._seed + i, num_tokens) for i in range(count)]

    @staticmethod
    def _answer(llm: LLM, prompts: list[list[int]], count: int, requests: Sequence[LoRARequest] | None) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        given = {} if requests is None else {"lora_request": list(requests)}
        return llm.generate(prompts, params, use_tqdm=False, **given)  # type: ignore[arg-type]


def _ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def measure_peer(given: argparse.Namespace, ours: Measurement, root: Path) -> dict[str, Any]:
    """Measure four users with four adapters."""
    name, _, python = given.peer.partition("=")
    model, paths = resolve_model(given.model), []
    for user in range(USERS):
        path = root / f"a{user}.gguf"
        save_gguf(model, path, user)
        paths.append(str(path))
    prompts, peer = [ids(user, 8) for user in range(USERS)], Peer(name, python, root / "peer.log")

    def peer_s() -> float:
        return float(peer.ask("adapted", prompts=prompts, adapters=paths, count=TOKENS - 1)["result"])

    try:
        print(peer.ask("load", model=str(model), threads=machine()["cores"], context=1024, sequences=USERS), flush=True)
        peer_s()
        ratio = ours.in_turns(peer_s, lambda: ours.users_s(at_once=True))
    finally:
        peer.close()
    return bar(f"tokens/s of four users of four adapters / {name}", ratio, at_least=2.5)


def save_gguf(model: Path, path: Path, seed: int) -> None:
    """Write a GGUF adapter with random factors for all matrices in the blocks of a GGUF model, in 16-bit floats."""
    import gguf

    rng = np.random.default_rng(seed)
    with closing(open_checkpoint(model)) as checkpoint:
        writer = gguf.GGUFWriter(path, checkpoint.file.metadata["general.architecture"])
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", RANK)
        for name, tensor in checkpoint.file.tensors.items():
            if len(tensor.shape) == 2 and name.startswith("blk."):
                out_features, in_features = tensor.shape
                for suffix, shape in (("a", (RANK, in_features)), ("b", (out_features, RANK))):
                    numbers = rng.standard_normal(shape, np.float32) * np.float32(0.02)
                    writer.add_tensor(f"{name}.lora_{suffix}", numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure_all(given: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    model, folders = resolve_model(given.model), [root / f"a{i}" for i in range(USERS)]
    nbytes = [save_adapter(model, folder, seed) for seed, folder in enumerate(folders)]
    print(f"adapters of {nbytes[0] / 1e6:.1f} MB", flush=True)
    with closing(Measurement(model, folders, given.turns)) as measurement:
        rows = []
        for part in given.only or PARTS:
            rows += getattr(measurement, part)()
            print(rows[-1], flush=True)
        if given.peer is not None:
            rows.append(measure_peer(given, measurement, root))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--peer", metavar="NAME=PYTHON", help="llama.cpp or xllamacpp, and a Python that has it")
    parser.add_argument("--realtime", action="store_true", help="run at real-time priority (needs root)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-adapters-") as name, ahead((), given.realtime):
        rows = measure_all(given, Path(name))
    print(f"{machine()}, commit {commit()}, {given.model}, rank {RANK}, {given.turns} turns")
    print(bar_table(rows))
    return int(any(row["met"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
