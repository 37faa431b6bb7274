"""Answer many prompts with Ray Data. If it is stopped and run again, it skips the prompts that have an answer.

    pip install 'octavo[ray]'
    python examples/ray_batch.py prompts.jsonl answers/ --model smollm2 --num-cpus 4 --actors 2

Each line of prompts.jsonl has an `id` and a `prompt` (a text, or a list of messages). The script writes files to the
answer folder whose lines have the same id, `generated_text` and `error`. A run that is killed may leave half a line;
the next run answers that prompt again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from octavo.ray.data import Generate


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.rstrip().endswith("}"):
                yield json.loads(line)


def answer(prompts: Path, answers: Path, *, batch_size: int, num_cpus: int, actors: int, **options: Any) -> int:
    """Answer all prompts that have no answer yet and return their number. `Generate` receives the options."""
    answers.mkdir(parents=True, exist_ok=True)
    done = {row["id"] for path in answers.glob("*.json*") for row in lines_of(path)}
    rows = [row for row in lines_of(prompts) if row["id"] not in done]
    if rows:
        data = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // batch_size))
        data = data.map_batches(
            Generate,
            fn_constructor_kwargs={"num_threads": num_cpus, **options},
            batch_size=batch_size,
            num_cpus=num_cpus,
            concurrency=actors,
        )
        # Each block is written as soon as it is done. Writers reserve no CPUs, because actors may occupy all of them.
        data.write_json(str(answers), ray_remote_args={"num_cpus": 0}, concurrency=1)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--num-cpus", type=int, default=4, help="CPUs per actor")
    parser.add_argument("--actors", type=int, default=1)
    options = vars(parser.parse_args())
    print(f"{answer(**options)} prompts answered")


if __name__ == "__main__":
    main()
