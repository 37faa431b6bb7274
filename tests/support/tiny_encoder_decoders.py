"""Tiny random encoder-decoder models, in transformers and as GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    MT5Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5GemmaConfig,
    UMT5Config,
)

from tests.support.tiny_models import stored_tensors

_T5 = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 3,
    "n_positions": 64,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
_GEMMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
}
_UNCAPPED = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "t5": lambda **more: T5Config(**{**_T5, **more}),
    "t5-gated": lambda **more: T5Config(
        **{**_T5, "num_decoder_layers": 3, **more}, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "t5-silu": lambda **more: T5Config(
        **{**_T5, "relative_attention_num_buckets": 8, "decoder_start_token_id": 5},
        feed_forward_proj="gated-silu",
        layer_norm_epsilon=1e-3,
        **more,
    ),
    "mt5": lambda **more: MT5Config(**_T5, feed_forward_proj="gated-gelu", **more),
    "t5gemma": lambda **more: T5GemmaConfig(
        encoder={**_GEMMA, "hidden_size": 48, "num_hidden_layers": 3},
        decoder={**_GEMMA, "num_key_value_heads": 1},
        vocab_size=96,
        **more,
    ),
    "t5gemma-plain": lambda **more: T5GemmaConfig(
        encoder={**_GEMMA, **_UNCAPPED, "query_pre_attn_scalar": 8},
        decoder={**_GEMMA, **_UNCAPPED, "attention_bias": True},
        vocab_size=96,
        **more,
    ),
    "umt5": lambda **more: UMT5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **more),
}
GGUF_CONFIGS = ["t5", "t5-gated"]  # the others have what a GGUF file has no place for
OWN_HEAD = ("t5-gated", "mt5")


def tiny_encoder_decoder(name: str, seed: int = 0, **more: object) -> PreTrainedModel:
    """Return the model in float32, with weights that differ enough for sharp distributions."""
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(
        CONFIGS[name](**more), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if name in OWN_HEAD:
        model.lm_head.weight = nn.Parameter(torch.empty(model.config.vocab_size, model.config.hidden_size))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            if parameter.dim() == 1:
                parameter += 0.0 if name.startswith("t5gemma") else 1.0  # whose norms multiply by 1 + weight
            elif name.startswith("t5gemma"):
                parameter *= 1.0 if "proj" in parameter_name else 2.0
            elif "shared" in parameter_name or "embed_tokens" in parameter_name or "lm_head" in parameter_name:
                parameter *= 4.0
    return model


def expected_logits(model: PreTrainedModel, source: list[int], answer: list[int]) -> NDArray[np.float32]:
    """Return the logits [answer, vocab] after each token of the decoder."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([answer]), use_cache=False)
    logits: NDArray[np.float32] = output.logits[0].numpy()
    return logits


def save_gguf(model: PreTrainedModel, path: Path) -> Path:
    """Write a T5 as llama.cpp's converter does, under the names of the gguf package, every tensor as F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_uint32("t5.decoder_block_count", config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(config.decoder_start_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(config.num_layers, config.num_decoder_layers))
    for name, array in stored_tensors(model).items():
        stem, _, suffix = name.rpartition(".")
        if stem.endswith("embed_tokens") or (stem == "lm_head" and model.lm_head.weight is model.shared.weight):
            continue  # it is `shared`
        found = names.get_name(stem)
        assert found is not None, name
        writer.add_tensor(f"{found}.{suffix}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TEXTS = [
    "translate English to German: the quick brown fox",
    "summarize: vectors of texts, and scores of pairs!",
    "A",
    "the same fox " * 6,
]


def unigram() -> Tokenizer:
    """Return T5's tokenizer: pieces with a space before each word, and an end token after every text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=96, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([f"<{i}>" for i in range(96 - tokenizer.get_vocab_size())])  # as many as the models have
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return tokenizer


def save_encoder_decoder(name: str, directory: Path, **more: object) -> PreTrainedModel:
    """Save a model with its tokenizer in a directory."""
    model = tiny_encoder_decoder(name, **more)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=unigram(), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return model
