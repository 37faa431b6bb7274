"""Writes a hybrid of random weights in bfloat16, whose decoding `mixture.py measure` compares with its bytes.

    python benchmarks/hybrid.py qwen35 TOKENIZER FOLDER [--layers 12] [--hidden 1024]
    python benchmarks/mixture.py measure FOLDER --rows 1 4

TOKENIZER is a directory with `tokenizer.json`, whose vocabulary the model gets. Run it with a Python that has torch and
transformers. `qwen35` has gated delta nets with 16 heads of 128, `granite` Mamba 2 with a state of 128, `lfm2` short
convolutions; the other layers have attention, as transformers places them. `qwen3` is a transformer of the same width
and depth, which `hybrid_prompts.py` compares their prompts with.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)


def qwen35(**sizes: int) -> PretrainedConfig:
    return Qwen3_5TextConfig(head_dim=128, tie_word_embeddings=True, **sizes)


def granite(**sizes: int) -> PretrainedConfig:
    layers = sizes["num_hidden_layers"]
    kinds = ["attention" if i % 6 == 5 else "mamba" for i in range(layers)]
    return GraniteMoeHybridConfig(
        layer_types=kinds, mamba_n_heads=sizes["hidden_size"] // 32, mamba_d_head=64, mamba_d_state=128,
        num_local_experts=0, shared_intermediate_size=sizes["intermediate_size"], tie_word_embeddings=True, **sizes,
    )  # fmt: skip


def lfm2(**sizes: int) -> PretrainedConfig:
    kinds = ["full_attention" if i % 3 == 2 else "conv" for i in range(sizes["num_hidden_layers"])]
    return Lfm2Config(layer_types=kinds, block_auto_adjust_ff_dim=False, tie_word_embeddings=True, **sizes)


def qwen3(**sizes: int) -> PretrainedConfig:
    return Qwen3Config(head_dim=128, tie_word_embeddings=True, **sizes)


KINDS: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen35": qwen35,
    "granite": granite,
    "lfm2": lfm2,
    "qwen3": qwen3,
}


def write(kind: str, tokenizer: Path, folder: Path, layers: int, hidden: int) -> None:
    """Write the model; it is either complete or absent, like all models that the benchmarks write."""
    vocab = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    config = KINDS[kind](
        vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=max(hidden // 512, 1), max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(unfinished)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, unfinished / name)
    unfinished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    write(options.kind, options.tokenizer, options.folder, options.layers, options.hidden)


if __name__ == "__main__":
    main()
