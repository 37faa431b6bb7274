"""Remove layers from a model, distil what is left, and report how much of the lost perplexity came back.

    python examples/heal_pruned_model.py MODEL.gguf TEXT

TEXT is used for calibration and training. Perplexity is measured on --judge, or on Octavo's own text, which is not part
of TEXT. Nothing is reused from earlier runs, not even the teacher's tokens, and all of the work counts towards the time
limit. The script fails if it takes longer than --minutes, or if less than --least of the lost perplexity comes back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_STEP_TOKENS = 1024  # per training step


def octavo(cache: Path, *arguments: object) -> str:
    """Run an Octavo command and return its output. Its progress appears at the terminal."""
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    environment = os.environ | {"OCTAVO_CACHE": str(cache)}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def perplexity(cache: Path, model: Path, options: argparse.Namespace) -> float:
    text = () if options.judge is None else ("--text", options.judge)
    report = json.loads(octavo(cache, "eval", model, "--tokens", options.tokens, *text, "--json"))
    return float(report["perplexity"]["perplexity"])


def heal(options: argparse.Namespace, folder: Path) -> float:
    """Prune, distil and evaluate. Return the share of the lost perplexity that came back."""
    cache, pruned = folder / "cache", folder / "pruned.gguf"
    healed: Path = options.keep or folder / "healed.gguf"
    removal = ("--layers", options.layers, "--calibration", options.text)
    print(octavo(cache, "prune", options.model, pruned, *removal), end="", flush=True)
    whole, lost = (perplexity(cache, path, options) for path in (options.model, pruned))
    print(f"perplexity {whole:.3f}, without the layers {lost:.3f}", flush=True)
    if lost <= whole:
        sys.exit("removing the layers did not cost any perplexity: there is nothing to heal")
    training = ("--data", options.text, "--minutes", options.training_minutes, "--steps", options.steps)
    more = ("--rate", options.rate, "--max-pieces", options.pieces, "--length", options.length, "--force")
    more += ("--batch", max(_STEP_TOKENS // options.length, 1))
    print(octavo(cache, "distill", options.model, pruned, healed, *training, *more), end="", flush=True)
    found = perplexity(cache, healed, options)
    share = (lost - found) / (lost - whole)
    print(f"healed {found:.3f}: {share:.1%} of the lost perplexity came back", flush=True)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--layers", type=int, default=2, help="number of layers to remove (2)")
    parser.add_argument("--training-minutes", type=float, default=15, help="time for the training alone (15)")
    parser.add_argument("--steps", type=int, default=1000, help="most training steps (1000)")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate (2e-4)")
    parser.add_argument("--pieces", type=int, default=960, help="pieces of text to train on (960)")
    parser.add_argument("--length", type=int, default=512, help="tokens per piece (512)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to measure perplexity on (8192)")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="text to measure perplexity on (built in)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="save the healed model here (not saved)")
    parser.add_argument("--minutes", type=float, default=20, help="time limit for the whole run (20)")
    parser.add_argument(
        "--least", type=float, default=0.5, help="share of the lost perplexity that must come back (0.5)"
    )
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        try:
            share = heal(options, Path(name))
        except subprocess.CalledProcessError as error:
            sys.exit(f"`{' '.join(error.cmd[1:4])}` failed")  # its own error message is above
    minutes, used = (time.monotonic() - start) / 60, os.times()
    processor = (used.user + used.system + used.children_user + used.children_system) / 60
    print(f"the whole run took {minutes:.1f} minutes, and {processor:.1f} minutes of processor time")
    if share < options.least:
        sys.exit(f"{share:.1%} came back; --least requires {options.least:.0%}; train longer or on more text")
    if minutes > options.minutes:
        sys.exit(f"the run took {minutes:.1f} minutes; the limit is --minutes {options.minutes:g}; train for less time")


if __name__ == "__main__":
    main()
