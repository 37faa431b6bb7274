"""Directories of tiny random encoders and rerankers with tokenizers, as transformers and sentence-transformers save."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from tests.support.tiny_encoders import tiny_encoder

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "Vectors of texts, and scores of pairs!",
    "A",
    "unknown: ① é ß 漢字",
    "the same fox " * 3,
]
_NAMES = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]  # in the order of XLM-RoBERTa
VOCAB_SIZE = 96
_TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "eos_token_id": 3,
}
"""The sizes of decoders with a ChatML vocabulary."""


def wordpiece() -> Tokenizer:
    """Return BERT's tokenizer: lower-case words without accents, their pieces, and a token type for the second text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=_SPECIAL, show_progress=False)
    return _finished(tokenizer, trainer, "[CLS] $A [SEP] $B:1 [SEP]:1")


def unigram() -> Tokenizer:
    """Return XLM-RoBERTa's tokenizer: pieces with a space before each word, and two separators between texts."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=_SPECIAL, unk_token="[UNK]", show_progress=False
    )
    return _finished(tokenizer, trainer, "[CLS] $A [SEP] [SEP] $B [SEP]")


def byte_level(*extra: str) -> Tokenizer:
    """Return ModernBERT's and Qwen's tokenizer, which is byte-level.

    extra: special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if not extra else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290 if extra else VOCAB_SIZE,
        special_tokens=[*_SPECIAL, *extra],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    return _finished(tokenizer, trainer, None if extra else "[CLS] $A [SEP] $B [SEP]")


TOKENIZERS = {
    "bert": wordpiece,
    "nomic-bert": wordpiece,
    "xlm-roberta": unigram,
    "roberta": unigram,
    "modernbert": byte_level,
    "modernbert-biased": byte_level,
    "gemma-embedding": byte_level,
}


def save_encoder(name: str, directory: Path, *, labels: int = 0, **config: Any) -> Path:
    """Save an encoder with its tokenizer.

    labels: number of labels of its classification head.
    config: additional values of config.json.
    """
    tiny_encoder(name, labels=labels).save_pretrained(directory)
    save_tokenizer(name, directory)
    _change(directory / "config.json", **config)
    return directory


def save_tokenizer(name: str, directory: Path) -> None:
    """Save the tokenizer of an encoder."""
    _save_tokenizer(TOKENIZERS[name](), directory, types=TOKENIZERS[name] is wordpiece)


def save_pooling(directory: Path, pooling: str, *, normalize: bool = True, dense: Sequence[nn.Sequential] = ()) -> Path:
    """Save the files of sentence-transformers next to a model.

    dense: modules with a linear and an activation each.
    """
    package = "sentence_transformers.models"
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{package}.Pooling"})
    for layer in dense:
        idx = len(modules)
        modules.append({"idx": idx, "name": str(idx), "path": f"{idx}_Dense", "type": f"{package}.Dense"})
        save_dense(layer, directory / f"{idx}_Dense")
    if normalize:
        idx = len(modules)
        modules.append({"idx": idx, "name": str(idx), "path": f"{idx}_Normalize", "type": f"{package}.Normalize"})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken", "max": "max_tokens"}
    config = {"word_embedding_dimension": 64, f"pooling_mode_{modes[pooling]}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return directory


def save_dense(layer: nn.Sequential, directory: Path) -> None:
    """Save the folder of one module."""
    directory.mkdir(exist_ok=True)
    linear, activation = layer
    assert isinstance(linear, nn.Linear)
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{type(activation).__module__}.{type(activation).__name__}",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({f"linear.{n}": p.detach() for n, p in linear.named_parameters()}, directory / "model.safetensors")


def save_decoder(directory: Path, *, labels: int = 0) -> Path:
    """Save a tiny Qwen3 with a ChatML vocabulary, as a causal model or with a classification head."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **_TINY,
        num_hidden_layers=2,
        head_dim=16,
        tie_word_embeddings=True,
        **({"num_labels": labels} if labels else {}),
    )
    return _save_byte_level(Qwen3ForSequenceClassification(config) if labels else Qwen3ForCausalLM(config), directory)


def save_hybrid(directory: Path) -> Path:
    """Save a tiny LFM2 with attention and convolutions, and a ChatML vocabulary."""
    torch.manual_seed(0)
    config = Lfm2Config(
        **_TINY,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_auto_adjust_ff_dim=False,
    )
    return _save_byte_level(Lfm2ForCausalLM(config), directory)


def _save_byte_level(model: PreTrainedModel, directory: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    tokenizer = byte_level("<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens(["yes", "no"])
    _save_tokenizer(tokenizer, directory, types=False)
    return directory


def _finished(tokenizer: Tokenizer, trainer: Any, pair: str | None) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS, trainer)
    if pair is not None:
        named = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        template = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=named)
        tokenizer.post_processor = template
    return tokenizer


def save_byte_level_tokenizer(directory: Path) -> Path:
    """Add a byte-level tokenizer without chat tokens to the directory of a model."""
    _save_tokenizer(byte_level(), directory, types=False)
    return directory


def _save_tokenizer(tokenizer: Tokenizer, directory: Path, *, types: bool) -> None:
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **_NAMES).save_pretrained(directory)


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def encoder_metadata(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the GGUF keys for a WordPiece or unigram vocabulary, as llama.cpp's converter writes them."""
    model = json.loads(tokenizer.to_str())["model"]
    names = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    types = np.array([3 if name in _SPECIAL and name != "[UNK]" else 1 for name in names], np.int32)
    keys: dict[str, object] = {"token_type": types, "unknown_token_id": tokenizer.token_to_id("[UNK]")}
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    if model["type"] == "WordPiece":
        marked = [n if n in _SPECIAL else n[2:] if n.startswith("##") else f"▁{n}" for n in names]
        keys |= {"model": "bert", "tokens": marked, "cls_token_id": cls, "seperator_token_id": sep}
    else:
        padding = [f"[PAD{i}]" for i in range(len(names), VOCAB_SIZE)]
        scores = np.array([score for _, score in model["vocab"]] + [-1000.0] * len(padding), np.float32)
        keys |= {"model": "t5", "tokens": names + padding, "scores": scores, "bos_token_id": cls, "eos_token_id": sep}
        unused = np.full(len(padding), 5, np.int32)
        keys |= {"add_bos_token": True, "add_eos_token": True, "token_type": np.concatenate([types, unused])}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
