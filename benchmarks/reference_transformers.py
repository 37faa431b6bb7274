"""The reference: transformers in float32 on the dequantized weights of a GGUF file or a directory.

Run with a Python that has torch, transformers and gguf. Writes `tokens.npy` [windows, length + 1] and
`logits.npy` float32 [windows, length, vocabulary] into the folder, for `accuracy.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import repository  # noqa: F401
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.at_load_formulas import FORMULAS


def windows_of(tokens: list[int], count: int, length: int) -> np.ndarray:
    """Return `count` windows of `length` tokens plus the following one, spread evenly over the text."""
    last = len(tokens) - length - 1
    if last < (count - 1) * length:
        raise SystemExit(f"the text has {len(tokens)} tokens: too few for {count} windows of {length}")
    starts = np.linspace(0, last, count).astype(int)
    return np.array([tokens[start : start + length + 1] for start in starts], dtype=np.int32)


def quantize(model: torch.nn.Module, method: str) -> None:
    """Replace the weights of every linear layer except the head by their quantized values, in float32."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = torch.from_numpy(FORMULAS[method](layer.weight.data.numpy()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--quantization", choices=sorted(FORMULAS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = {"pretrained_model_name_or_path": str(options.model)}
    if not options.model.is_dir():
        source = {"pretrained_model_name_or_path": str(options.model.parent), "gguf_file": options.model.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.text)
    tokens = windows_of(tokenizer.encode(text, add_special_tokens=False), options.windows, options.length)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    if options.quantization:
        quantize(model, options.quantization)
    options.folder.mkdir(parents=True, exist_ok=True)
    unfinished = options.folder / "logits.unfinished.npy"
    shape = (options.windows, options.length, model.config.vocab_size)
    logits = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float32, shape=shape)
    with torch.inference_mode():
        for index, window in enumerate(tokens):
            logits[index] = model(torch.tensor(window[None, :-1], dtype=torch.long)).logits[0].numpy()
    logits.flush()
    np.save(options.folder / "tokens.npy", tokens)
    unfinished.rename(options.folder / "logits.npy")


if __name__ == "__main__":
    main()
