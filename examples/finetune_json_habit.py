"""Teach a model a habit with LoRA: to answer with JSON objects that have the keys `answer` and `kind`.

    python examples/finetune_json_habit.py [MODEL]

The data is `json_habit.jsonl` in this folder: 140 short questions with answers. The script trains an adapter, merges it
into a copy of the model, and asks both models questions that are not in the data. It fails if fewer than --least of the
answers show the habit with the adapter, if more than a tenth do without it, or if everything takes longer than
--minutes. Needs torch: pip install 'octavo[train]'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from octavo import LLM, SamplingParams

DATA = Path(__file__).with_name("json_habit.jsonl")
QUESTIONS = [
    "What is the capital of Turkey?",
    "Which city is the capital of Mexico?",
    "What is the opposite of heavy?",
    "Which word means the opposite of tall?",
    "What color is a strawberry?",
    "Tell me the color of a frog.",
    "What do you call a baby wolf?",
    "How much is 9 plus 9?",
    "Who wrote Romeo and Juliet?",
    "Which planet is nearest to the sun?",
    "What is the largest ocean?",
    "How many legs does a spider have?",
]


def octavo(*arguments: object) -> None:
    """Run an Octavo command that prints its progress at the terminal."""
    subprocess.run([sys.executable, "-m", "octavo", *map(str, arguments)], check=True)


def has_habit(answer: str) -> bool:
    """Return True if the answer is an object with both keys and nothing else."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"answer", "kind"}


def share_of_habit(model: str | Path) -> float:
    """Print a model's greedy answers and return the share that shows the habit."""
    with LLM(str(model), max_model_len=512) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48))
    texts = [answer.outputs[0].text for answer in answers]
    for question, text in zip(QUESTIONS, texts, strict=True):
        print(f"  {question}  {text!r:.100}")
    return sum(map(has_habit, texts)) / len(texts)


def teach(options: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Train the adapter and merge it. Return the shares of answers with the habit, without and with the adapter."""
    adapter: Path = options.keep or folder / "adapter"
    training = ("--epochs", options.epochs, "--batch-tokens", 512, "--learning-rate", 5e-4, "--rank", options.rank)
    octavo("finetune", options.model, "--data", DATA, "-o", adapter, *training)
    octavo("convert", options.model, folder / "merged.gguf", "--dtype", "bf16", "--lora", adapter)
    print("without the adapter:")
    without = share_of_habit(options.model)
    print("with the adapter:")
    return without, share_of_habit(folder / "merged.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--least", type=float, default=0.9, help="required share of answers with the habit (0.9)")
    parser.add_argument("--minutes", type=float, default=15, help="time limit for everything (15)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="save the adapter here (not saved)")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            without, found = teach(options, Path(folder))
        except subprocess.CalledProcessError as error:
            sys.exit(f"`{' '.join(error.cmd[1:4])}` failed")  # its own error message is above
    minutes = (time.monotonic() - start) / 60
    print(f"the habit: {without:.0%} of the answers without the adapter, {found:.0%} with it; {minutes:.1f} minutes")
    if found < options.least or without > 0.1:
        sys.exit(f"at least {options.least:.0%} with the adapter and at most 10% without it were required")
    if minutes > options.minutes:
        sys.exit(f"the run took {minutes:.1f} minutes; the limit is --minutes {options.minutes:g}")


if __name__ == "__main__":
    main()
