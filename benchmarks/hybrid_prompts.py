"""Compare prompts of hybrids with a transformer of the same size, all with random bfloat16 weights.

    python benchmarks/hybrid_prompts.py TOKENIZER FOLDER [--tokens 512] [--turns 5] [--threads 2] [--layers 12]

TOKENIZER is a directory with `tokenizer.json`. The models of `hybrid.py` and a plain Qwen 3 of the same width and depth
are written to FOLDER unless they are there. A line has the least time of a prompt over all turns, which alternate
between the models, and the speed over the transformer's: tokens a second times the parameters of the layers, so that a
model with more of them is not charged for it. Run it with a Python that has torch and transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from hybrid import KINDS, write
from report import commit, machine, table

from octavo.bench import profile
from octavo.loader.checkpoint import open_checkpoint

PLAIN = "qwen3"
COLUMNS = {"model": "model", "parameters of layers, M": "millions", "prompt, ms": "ms", "over the transformer": "ratio"}


def layer_parameters(folder: Path) -> int:
    """Count the numbers in all matrices of the layers: a prompt computes the output head for one token only."""
    checkpoint = open_checkpoint(folder)
    try:
        sizes = {name: checkpoint.weights.info(name).shape for name in checkpoint.weights}
    finally:
        checkpoint.close()
    return sum(shape[0] * shape[1] for name, shape in sizes.items() if len(shape) == 2 and name.startswith("layers."))


def prompt_seconds(folder: Path, tokens: int, threads: int) -> float:
    """Return the time of one prompt."""
    report = profile(str(folder), (), (tokens,), iterations=16, num_threads=threads)
    return min(step.seconds for step in report.steps)


def lines(parameters: Mapping[str, int], seconds: Mapping[str, float]) -> list[dict[str, object]]:
    """Return the rows of the table, the transformer first."""
    speed = {kind: parameters[kind] / seconds[kind] for kind in parameters}
    return [
        {
            "model": kind,
            "millions": parameters[kind] / 1e6,
            "ms": 1e3 * seconds[kind],
            "ratio": speed[kind] / speed[PLAIN],
        }
        for kind in sorted(parameters, key=lambda kind: kind != PLAIN)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    for name, default in (("tokens", 512), ("turns", 5), ("threads", 2), ("layers", 12), ("hidden", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folders = {kind: options.folder / kind for kind in KINDS}
    for kind, folder in folders.items():
        if not folder.exists():
            write(kind, options.tokenizer, folder, options.layers, options.hidden)
    seconds = dict.fromkeys(folders, float("inf"))
    for _ in range(options.turns):
        for kind, folder in folders.items():
            seconds[kind] = min(seconds[kind], prompt_seconds(folder, options.tokens, options.threads))
    print(json.dumps({"commit": commit(), "machine": machine(), "tokens": options.tokens}))
    print(table(COLUMNS, lines({kind: layer_parameters(folder) for kind, folder in folders.items()}, seconds)))


if __name__ == "__main__":
    main()
