"""Converts a GGUF file to the formats that some peers of `compare.py` read.

    python benchmarks/convert.py MODEL.gguf... --folder FOLDER

Run it with a Python that has torch, transformers and gguf, and, for CTranslate2, ctranslate2. It writes
`FOLDER/<name of the file>/transformers` (dequantized weights in bfloat16, also for vLLM) and
`FOLDER/<name of the file>/ctranslate2` (int8). Each is complete or absent; existing ones are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def write_transformers(model: Path, folder: Path) -> None:
    """Write a checkpoint in bfloat16, as if it had never been quantized."""
    source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    plain = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    plain.hf_quantizer = None  # it would refuse to save what it has dequantized
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def write_ctranslate2(checkpoint: Path, folder: Path) -> None:
    """Write CTranslate2's own format with int8 weights and one scale per row."""
    from ctranslate2.converters import TransformersConverter  # optional: only this peer needs it

    TransformersConverter(str(checkpoint)).convert(str(folder), quantization="int8")


def make(folder: Path, write: Callable[[Path, Path], None], source: Path) -> None:
    """Write to a temporary name and rename it, so that an interruption leaves nothing that looks complete."""
    if folder.exists():
        print(f"{folder} is there")
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    write(source, unfinished)
    unfinished.rename(folder)
    print(f"{folder} written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    for model in options.models:
        target = options.folder / model.stem
        make(target / "transformers", write_transformers, model)
        if importlib.util.find_spec("ctranslate2"):
            make(target / "ctranslate2", write_ctranslate2, target / "transformers")
        else:
            print(f"{target / 'ctranslate2'} left out: this Python has no ctranslate2")


if __name__ == "__main__":
    main()
