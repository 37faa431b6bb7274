"""Teach a model the habit of `finetune_json_habit.py` with PEFT, then use the adapter with the quantized model.

    python examples/peft_json_habit.py [MODEL]

`octavo convert` writes the model as a folder of float weights, and PEFT trains a LoRA adapter for them. Octavo then
answers questions that are not in the data with the original, quantized model, without and with the adapter. The script
fails if fewer than --least of the answers show the habit with the adapter, if more than a tenth do without it, or if
the training takes longer than --minutes. Needs PEFT and transformers: pip install peft transformers
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from finetune_json_habit import DATA, QUESTIONS, has_habit, octavo
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import LLM, LoRARequest, SamplingParams

NO_LOSS = -100  # torch's label for tokens that are not learnt


def examples_of(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each conversation, with labels for its answer."""
    found = []
    for line in DATA.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt, whole = (
            tokenizer.encode(
                tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=each is not messages),
                add_special_tokens=False,
            )
            for each in (messages[:-1], messages)
        )
        found.append((whole, [NO_LOSS] * len(prompt) + whole[len(prompt) :]))
    return found


def batches_of(examples: list[tuple[list[int], list[int]]], most: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the ids, labels and masks of steps with at most `most` tokens, padded at the end, in a new order each
    epoch.
    """
    order = random.Random(0)
    batch: list[tuple[list[int], list[int]]] = []
    while True:
        for example in order.sample(examples, len(examples)):
            width = max(len(ids) for ids, _ in [*batch, example])
            if batch and width * (len(batch) + 1) > most:
                yield padded(batch)
                batch = []
            batch.append(example)


def padded(batch: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, ...]:
    width = max(len(ids) for ids, _ in batch)
    rows = [
        (ids + [0] * (width - len(ids)), labels + [NO_LOSS] * (width - len(ids)), [i < len(ids) for i in range(width)])
        for ids, labels in batch
    ]
    return tuple(torch.tensor(each) for each in zip(*rows, strict=True))


def train(folder: Path, adapter: Path, options: argparse.Namespace) -> None:
    """Train a PEFT adapter for the model in `folder` and save it."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(factors, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    steps = itertools.islice(batches_of(examples_of(tokenizer), options.tokens), options.steps)
    for number, (ids, labels, mask) in enumerate(steps, 1):
        loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            print(f"step {number} of {options.steps}: loss {loss.item():.2f}")
    model.save_pretrained(adapter)


def shares_of_habit(model: str, adapter: Path) -> list[float]:
    """Print greedy answers. Return the shares that show the habit without and with the adapter."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    greedy, shares = SamplingParams(temperature=0, max_tokens=48), []
    with LLM(model, max_model_len=512, enable_lora=True, max_lora_rank=8) as llm:
        for request in (None, LoRARequest("habit", 1, adapter)):
            print("with the adapter:" if request else "without the adapter:")
            texts = [each.outputs[0].text for each in llm.chat(conversations, greedy, lora_request=request)]
            for question, text in zip(QUESTIONS, texts, strict=True):
                print(f"  {question}  {text!r:.100}")
            shares.append(sum(map(has_habit, texts)) / len(texts))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per step (256)")
    parser.add_argument("--least", type=float, default=0.9, help="required share of answers with the habit (0.9)")
    parser.add_argument("--minutes", type=float, default=5, help="time limit for the training (5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        floats, adapter = Path(folder) / "floats", Path(folder) / "adapter"
        try:
            octavo("convert", options.model, floats, "--to", "safetensors", "--dtype", "f32")
        except subprocess.CalledProcessError as error:
            sys.exit(f"`{' '.join(error.cmd[1:4])}` failed")  # its own error message is above
        start = time.monotonic()
        train(floats, adapter, options)
        minutes = (time.monotonic() - start) / 60
        without, found = shares_of_habit(options.model, adapter)
    print(f"the habit: {without:.0%} of the answers without the adapter, {found:.0%} with it; {minutes:.1f} minutes")
    if found < options.least or without > 0.1:
        sys.exit(f"at least {options.least:.0%} with the adapter and at most 10% without it were required")
    if minutes > options.minutes:
        sys.exit(f"the training took {minutes:.1f} minutes; the limit is --minutes {options.minutes:g}")


if __name__ == "__main__":
    main()
