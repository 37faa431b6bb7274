"""Removes layers of a model, heals what is left by distillation, and says how much of the lost perplexity came back.

    python examples/heal_pruned_model.py MODEL.gguf TEXT --layers 2 --minutes 20

TEXT is for calibration and training. The perplexity is that of the text that comes with Octavo, which is none of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def octavo(*arguments: object) -> str:
    """The output of a command of Octavo; its progress goes to the terminal."""
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def perplexity(model: Path, tokens: int) -> float:
    report = json.loads(octavo("eval", model, "--tokens", tokens, "--json"))
    return float(report["perplexity"]["perplexity"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--pieces", type=int, default=256, help="of 256 tokens, for training")
    parser.add_argument("--tokens", type=int, default=8192, help="of the perplexity")
    parser.add_argument("--keep", type=Path, help="where the healed model goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pruned, healed = Path(name) / "pruned.gguf", options.keep or Path(name) / "healed.gguf"
        print(octavo("prune", options.model, pruned, "--layers", options.layers, "--calibration", options.text), end="")
        whole, lost = (perplexity(path, options.tokens) for path in (options.model, pruned))
        print(f"perplexity {whole:.3f}, without the layers {lost:.3f}", flush=True)
        training = ("--data", options.text, "--minutes", options.minutes, "--rate", options.rate)
        more = ("--max-pieces", options.pieces, "--force")
        print(octavo("distill", options.model, pruned, healed, *training, *more), end="")
        found = perplexity(healed, options.tokens)
    print(f"healed {found:.3f}: {(lost - found) / (lost - whole):.0%} of the lost perplexity came back")


if __name__ == "__main__":
    main()
