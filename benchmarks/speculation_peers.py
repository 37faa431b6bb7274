"""Answers with drafts by Octavo and by llama.cpp's own speculation, on the same prompts of eight kinds, in turns.

    python benchmarks/speculation_peers.py MODEL.gguf [--draft SMALL.gguf] [--llama-cpp PYTHON] [--octavo PYTHON]

PYTHON of llama.cpp has llama-cpp-python or, if it has not, xllamacpp, which is llama.cpp's server in a wheel: its
speculation is llama.cpp's own, but it uses the kernels of the wheel, which reports AVX2 without VNNI. Both answer
greedily: without drafts, with drafts from the prompt (n-grams here, `LlamaPromptLookupDecoding` or `ngram-simple`
there) and, with --draft, with a draft model (there a `LlamaDraftModel` whose tokens are its most likely ones, or
`draft-simple`). Each engine is a separate process, and only one computes at a time. The figures are tokens
per second after the first token, medians over the turns, and the ratio of the best of both. The bar is 1.2 as the
geometric mean; the exit code is 1 below it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BAR = 1.2
WAYS = ("plain", "lookup", "model")


# --- the engines, each in a process that reads a line of JSON and writes one ---


def serve_llama_cpp(options: dict[str, Any]) -> Callable[[str, list[int], int], dict[str, Any]]:
    import llama_cpp
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    def load(path: str, drafter: Any = None) -> Any:
        threads = options["threads"]
        return llama_cpp.Llama(
            path,
            n_ctx=options["context"],
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=drafter,
            verbose=False,
        )

    class Small(LlamaDraftModel):  # type: ignore[misc]
        """The most likely tokens according to a small model, which keeps what it has read of the text."""

        def __init__(self) -> None:
            self._llama = load(options["draft"])

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            small, ids, known = self._llama, input_ids.tolist(), 0
            old = small.input_ids[: small.n_tokens].tolist()
            while known < min(len(old), len(ids) - 1) and old[known] == ids[known]:
                known += 1
            small.n_tokens = known
            drafts, new = [], ids[known:]
            for _ in range(options["num_drafts"]):
                small.eval(new)
                logits = np.ctypeslib.as_array(small._ctx.get_logits(), shape=(small.n_vocab(),))
                drafts.append(int(logits.argmax()))
                new = drafts[-1:]
            return np.array(drafts, dtype=np.intc)

    made: dict[str, Any] = {}

    def answer(way: str, prompt: list[int], count: int) -> dict[str, Any]:
        if way not in made:
            lookup = LlamaPromptLookupDecoding(num_pred_tokens=options["num_drafts"])
            made[way] = load(
                options["model"], {"plain": None, "lookup": lookup}.get(way) if way != "model" else Small()
            )
        began, first, tokens = time.perf_counter(), 0.0, []
        for token in made[way].generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
            first = first or time.perf_counter() - began
            tokens.append(int(token))
            if len(tokens) == count:
                break
        return {"seconds": time.perf_counter() - began - first, "num_tokens": len(tokens)}

    return answer


def serve_llama_server(options: dict[str, Any]) -> Callable[[str, list[int], int], dict[str, Any]]:
    """Return the answering function of xllamacpp."""
    import xllamacpp

    print(xllamacpp.get_system_info(), file=sys.stderr)
    kinds = xllamacpp.common_speculative_type
    made: dict[str, Any] = {}

    def load(way: str) -> Any:
        params = xllamacpp.CommonParams()
        params.model.path = options["model"]
        params.n_ctx, params.n_parallel, params.verbosity, params.warmup = options["context"], 1, -1, False
        drafting = params.speculative
        for own in (params.cpuparams, params.cpuparams_batch, drafting.draft.cpuparams, drafting.draft.cpuparams_batch):
            own.n_threads = options["threads"]
        if way == "lookup":
            drafting.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        if way == "model":
            drafting.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            drafting.draft.mparams.path, drafting.draft.n_max = options["draft"], options["num_drafts"]
        return xllamacpp.Server(params)

    def answer(way: str, prompt: list[int], count: int) -> dict[str, Any]:
        if way not in made:
            made[way] = load(way)
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        found = made[way].handle_completions({**asked, "max_tokens": count})
        if "timings" not in found:
            raise RuntimeError(f"llama.cpp: {found}")
        timings = found["timings"]
        return {"seconds": timings["predicted_ms"] / 1e3, "num_tokens": timings["predicted_n"]}

    return answer


def serve_octavo(options: dict[str, Any]) -> Callable[[str, list[int], int], dict[str, Any]]:
    from octavo import LLM, SamplingParams

    llms: dict[str, Any] = {}

    def answer(way: str, prompt: list[int], count: int) -> dict[str, Any]:
        if way not in llms:
            drafts = {"plain": {"speculation": "off"}, "lookup": {"speculation": "ngram"}}
            drafts["model"] = {"draft_model": options["draft"]}
            llms[way] = LLM(
                options["model"],
                num_threads=options["threads"],
                max_model_len=options["context"],
                enable_prefix_caching=False,
                **drafts[way],
            )
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        output = llms[way].generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        return {"seconds": output.metrics.decode_s, "num_tokens": len(output.outputs[0].token_ids)}

    return answer


def serve(name: str, options: dict[str, Any]) -> None:
    """Answer until standard input ends. The engine's own output goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    has_binding = importlib.util.find_spec("llama_cpp") is not None
    peer = serve_llama_cpp if has_binding else serve_llama_server
    answer = {"octavo": serve_octavo, "llama.cpp": peer}[name](options)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=out, flush=True)


# --- the comparison ---


class Engine:
    """An engine in a separate process."""

    def __init__(self, python: str, name: str, options: dict[str, Any]) -> None:
        self.name = name
        command = [python, __file__, "--serve", name, json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tokens_per_s(self, way: str, prompt: list[int], count: int) -> float:
        """Return the speed after the first token. Raises RuntimeError if the engine has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"way": way, "prompt": prompt, "count": count}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        found = json.loads(line)
        return (found["num_tokens"] - 1) / max(found["seconds"], 1e-9)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def prompts_of(model: str, kinds: list[str] | None) -> dict[str, list[int]]:
    from octavo.bench.speculation_texts import PROMPTS
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(Path(model)))
    return {kind: tokenizer.encode(text) for kind, text in PROMPTS.items() if kinds is None or kind in kinds}


def rows_of(figures: dict[tuple[str, str, str], list[float]], kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind: the medians by engine and way, and the ratio of the best."""
    for kind in kinds:
        medians = {(name, way): statistics.median(all_) for (name, way, k), all_ in figures.items() if k == kind}
        best = {name: max(value for (n, _), value in medians.items() if n == name) for name, _ in medians}
        row = {"kind": kind, **{f"{name} {way}": value for (name, way), value in medians.items()}}
        yield {**row, "ratio": best["octavo"] / best["llama.cpp"] if len(best) > 1 else math.nan}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--draft", help="a GGUF file of a small model with the same vocabulary")
    parser.add_argument("--octavo", metavar="PYTHON", default=sys.executable, help="a Python with octavo")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python with llama-cpp-python or xllamacpp")
    parser.add_argument("--kind", action="append", help="only this kind of text; may be given several times")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--num-drafts", type=int, default=10, help="of llama.cpp in one step, its own default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    given = parser.parse_args()
    prompts = prompts_of(given.model, given.kind)
    context = max(map(len, prompts.values())) + given.tokens + 32
    options = {"model": given.model, "draft": given.draft, "threads": given.threads, "context": context}
    options["num_drafts"] = given.num_drafts
    engines = [Engine(given.octavo, "octavo", options)]
    if given.llama_cpp:
        engines.append(Engine(given.llama_cpp, "llama.cpp", options))
    ways = WAYS if given.draft else WAYS[:2]
    figures: dict[tuple[str, str, str], list[float]] = {}
    try:
        for turn in range(given.turns + 1):  # the first warms up
            for kind, prompt in prompts.items():
                for way in ways:
                    for engine in engines if turn % 2 else engines[::-1]:
                        found = engine.tokens_per_s(way, prompt, given.tokens)
                        if turn:
                            figures.setdefault((engine.name, way, kind), []).append(found)
    finally:
        for engine in engines:
            engine.close()
    return report(list(rows_of(figures, list(prompts))), given.json)


def report(rows: list[dict[str, Any]], file: str | None) -> int:
    from report import commit, machine, table

    columns = {name: name for name in rows[0]}
    print(f"{machine()}, commit {commit()}; tokens/s after the first, ratio of the best")
    print(table(columns, [{k: v if isinstance(v, str) else round(v, 2) for k, v in row.items()} for row in rows]))
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean of the ratios: {mean:.2f}; bar: {BAR}")
    if file is not None:
        with open(file, "w", encoding="utf-8") as out:
            json.dump({"machine": machine(), "commit": commit(), "rows": rows, "mean": mean}, out, indent=1)
    return int(mean < BAR)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
