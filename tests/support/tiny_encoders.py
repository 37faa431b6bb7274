"""Tiny random encoders, in transformers, as safetensors and as GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    Gemma3TextConfig,
    GteConfig,
    JinaEmbeddingsV3Config,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.support.jina_bert import JinaBert, JinaBertConfig, JinaBertForSequenceClassification
from tests.support.tiny_models import stored_tensors

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "bert": lambda **more: BertConfig(**_SIZES, **more),
    "bert-tanh-gelu": lambda **more: BertConfig(**_SIZES, hidden_act="gelu_new", type_vocab_size=4, **more),
    "xlm-roberta": lambda **more: XLMRobertaConfig(
        **{**_SIZES, "max_position_embeddings": 66}, type_vocab_size=1, **more
    ),
    "roberta": lambda **more: RobertaConfig(**{**_SIZES, "max_position_embeddings": 66}, **more),
    "modernbert": lambda **more: ModernBertConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        local_attention=10,
        cls_token_id=2,
        sep_token_id=3,
        bos_token_id=2,
        eos_token_id=3,
        **more,
    ),
    "modernbert-biased": lambda **more: ModernBertConfig(
        **_SIZES,
        local_attention=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
        mlp_bias=True,
        norm_bias=True,
        classifier_bias=True,
        classifier_pooling="mean",
        cls_token_id=2,
        sep_token_id=3,
        bos_token_id=2,
        eos_token_id=3,
        **more,
    ),
    "nomic-bert": lambda **more: NomicBertConfig(**_SIZES, **more),
    "jina-bert": lambda **more: JinaBertConfig(**_SIZES, **more),
    "jina-bert-code": lambda **more: JinaBertConfig(
        **{**_SIZES, "hidden_size": 96, "num_attention_heads": 6}, for_code=True, **more
    ),
    "jina-bert-reglu": lambda **more: JinaBertConfig(**_SIZES, feed_forward_type="reglu", **more),
    "jina-bert-plain": lambda **more: JinaBertConfig(**_SIZES, feed_forward_type="original", **more),
    "deberta-v3": lambda **more: DebertaV2Config(
        **_SIZES,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        **more,
    ),
    "deberta-v2-apart": lambda **more: DebertaV2Config(
        **_SIZES,
        relative_attention=True,
        max_relative_positions=20,
        pos_att_type=["c2p"],
        type_vocab_size=2,
        pooler_hidden_act="tanh",
        **more,
    ),
    "deberta-v2-p2c": lambda **more: DebertaV2Config(
        **_SIZES, relative_attention=True, position_buckets=8, pos_att_type="p2c", share_att_key=True, **more
    ),
    "gte": lambda **more: GteConfig(
        **{**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **more}
    ),
    "gte-plain": lambda **more: GteConfig(**_SIZES, type_vocab_size=0, hidden_act="gelu_new", **more),
    "jina-v3": lambda **more: JinaEmbeddingsV3Config(
        **_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **more
    ),
    "distilbert": lambda **more: DistilBertConfig(**_SIZES, hidden_dim=80, **more),
    "distilbert-relu": lambda **more: DistilBertConfig(
        **_SIZES, hidden_dim=96, activation="relu", sinusoidal_pos_embds=True, **more
    ),
    "mpnet": lambda **more: MPNetConfig(**{**_SIZES, "max_position_embeddings": 66}, **more),
    "mpnet-tanh-gelu": lambda **more: MPNetConfig(
        **{**_SIZES, "max_position_embeddings": 66, "pad_token_id": 3}, hidden_act="gelu_new", **more
    ),
    "electra": lambda **more: ElectraConfig(**_SIZES, embedding_size=64, **more),
    "electra-narrow": lambda **more: ElectraConfig(**_SIZES, embedding_size=24, hidden_act="relu", **more),
    "gemma-embedding": lambda **more: Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 7},
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=10,
        use_bidirectional_attention=True,
        **more,
    ),
    "gemma-embedding-list": lambda **more: Gemma3TextConfig(
        **_SIZES,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=8,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        use_bidirectional_attention=True,
        attention_bias=True,
        **more,
    ),
}
WITHOUT_LABELS = ("nomic-bert", "gemma-embedding", "gemma-embedding-list")

# The others have what a GGUF file has no place for.
GGUF_CONFIGS = [
    "bert",
    "xlm-roberta",
    "roberta",
    "modernbert",
    "nomic-bert",
    "jina-bert",
    "jina-bert-code",
    "jina-v3",
    "gemma-embedding",
]
_ARCHITECTURES = {
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "jina_embeddings_v3": gguf.MODEL_ARCH.JINA_BERT_V3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
_POOLING_TYPES = {"mean": 1, "cls": 2, "last": 3, "rank": 4}


def tiny_encoder(name: str, *, labels: int = 0, seed: int = 0, **more: object) -> PreTrainedModel:
    """Return the model in float32.

    labels: labels of a sequence-classification head; 0 for no head.
    """
    torch.manual_seed(seed)
    auto = AutoModelForSequenceClassification if labels else AutoModel
    config = CONFIGS[name](**({"num_labels": labels} if labels else {}), **more)
    if isinstance(config, JinaBertConfig):
        model = JinaBertForSequenceClassification(config, labels) if labels else JinaBert(config)
    else:
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            if "orm" in parameter_name.replace("transformer", "") and parameter_name.endswith("weight"):
                parameter += 0.0 if name.startswith("gemma") else 1.0  # whose norms multiply by 1 + weight
            elif "embed" in parameter_name and parameter.dim() > 1:
                parameter *= parameter.shape[-1] ** 0.25
    return model


def expected_states(
    model: PreTrainedModel, token_ids: list[int], types: list[int] | None = None
) -> NDArray[np.float32]:
    """Return the last hidden states [tokens, hidden], or the labels [labels] of a model with a head."""
    more = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        output = model(input_ids=torch.tensor([token_ids]), **more)
    states = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return states[0].numpy()


def save_gguf(
    model: PreTrainedModel, path: Path, pooling: str = "mean", vocabulary: Mapping[str, object] | None = None
) -> Path:
    """Write the model as llama.cpp's converter does, under the names of the gguf package, every tensor as F32.

    vocabulary: keys of the tokenizer.
    """
    return save_tensors(model, _converted(model), path, pooling, vocabulary)


def save_tensors(
    model: PreTrainedModel,
    tensors: Mapping[str, NDArray[np.float32]],
    path: Path,
    pooling: str = "mean",
    vocabulary: Mapping[str, object] | None = None,
) -> Path:
    """Write the model with these tensors, under the names of transformers or of GGUF files."""
    config = model.config
    kind = config.model_type
    is_jina = isinstance(config, JinaBertConfig)
    architecture = gguf.MODEL_ARCH.JINA_BERT_V2 if is_jina else _ARCHITECTURES.get(kind, gguf.MODEL_ARCH.BERT)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    offset = _position_offset(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if kind == "gemma3_text":
        _add_gemma(writer, config)
    else:
        writer.add_layer_norm_eps(config.norm_eps if kind == "modernbert" else config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_uint32(f"{gguf.MODEL_ARCH_NAMES[architecture]}.pooling_type", _POOLING_TYPES[pooling])
    if kind == "modernbert":
        writer.add_sliding_window(config.local_attention)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    elif kind in ("nomic_bert", "jina_embeddings_v3"):
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, array in tensors.items():
        stem, _, suffix = name.rpartition(".")
        gguf_name = stem if stem.startswith("blk.") else _HEADS.get(stem) or names.get_name(stem)
        assert gguf_name is not None, name
        writer.add_tensor(f"{gguf_name}.{suffix}", np.ascontiguousarray(array))
    for key, value in (vocabulary or {}).items():
        _add_key(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_HEADS = {"classifier": "cls.output", "head.dense": "cls", "head.norm": "cls.norm"}


def _add_gemma(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the keys of Gemma. The window is that of the published config.json, which transformers halves."""
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(2 * (config.sliding_window - 1))
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])


def _position_offset(config: PreTrainedConfig) -> int:
    return config.pad_token_id + 1 if "roberta" in config.model_type else 0


def _add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, (list, np.ndarray))
        writer.add_array(key, value if isinstance(value, list) else value.tolist())


def _converted(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a file, without the position rows before the first and without an unused pooler."""
    tensors = {name.removeprefix("bert.").removeprefix("roberta.").removeprefix("model."): array
               for name, array in stored_tensors(model).items()}  # fmt: skip
    if (positions := tensors.get("embeddings.position_embeddings.weight")) is not None:
        tensors["embeddings.position_embeddings.weight"] = positions[_position_offset(model.config) :]
    if model.config.model_type == "gemma3_text":
        tensors = {name: array + name.endswith("norm.weight") for name, array in tensors.items()}
    return {name: array for name, array in tensors.items() if not name.startswith("pooler.")}
