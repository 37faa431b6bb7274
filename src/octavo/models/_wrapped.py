"""The text part of multimodal models, whose config.json describes it in a section with its own model_type."""

from __future__ import annotations

from collections.abc import Container, Mapping

from octavo.models._reading import ConfigReader

_SECTIONS = ("text_config", "llm_config", "language_config")

# Such a section leaves out what the configuration class of its model_type in transformers has by default.
_SIZES: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA: Mapping[str, object] = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
TEXT_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": _SIZES,
    "mistral": {
        **_SIZES,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "granite_docling_text": {
        "vocab_size": 133800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
    "qwen2": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    "gemma": {
        **_GEMMA,
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


def text_section(reader: ConfigReader) -> ConfigReader:
    """Return the section of config.json about text, or the whole file if it has none."""
    key = next((key for key in _SECTIONS if isinstance(reader.value(key), Mapping)), None)
    return reader if key is None else reader.section(key)


def text_part(reader: ConfigReader, known: Container[object]) -> ConfigReader:
    """Return the part that an architecture reads: the section about text, or everything if the model_type is `known`.

    Keys missing from the section get the defaults of its model_type. The output head is the embedding if either part
    says so.
    """
    outer = reader.value("model_type")
    if not isinstance(outer, str) or outer in known:
        return reader
    part = text_section(reader)
    kind = part.value("model_type")
    if part is reader or not isinstance(kind, str):
        return reader
    part = part.with_defaults(TEXT_DEFAULTS.get(kind, {}))
    if outer == "paligemma":  # only prompts with an image use bidirectional attention
        part = part.replaced("use_bidirectional_attention", False)
    tied = part.flag("tie_word_embeddings", False) or reader.flag("tie_word_embeddings", False)
    return part.replaced("tie_word_embeddings", tied)
