"""Tiny random models of every architecture: as transformers has them, as safetensors and as GGUF."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from octavo.graph.builder import Graph
from octavo.loader.checkpoint import checkpoint_name
from octavo.loader.tensor_files import Source
from octavo.loader.tensor_names import GGUF_STEMS, renamed
from octavo.loader.transforms import transformed
from octavo.models import build_graph, load_architecture, weight_table
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight, Weight
from tests.support import tiny_classic

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 16, **parameters}


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied-biased": lambda: LlamaConfig(
        **_SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=32
    ),
    "llama-llama3-rope": lambda: LlamaConfig(
        **_SIZES, rope_parameters=_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "llama-yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=_rope("yarn", factor=4.0)),
    "llama-linear": lambda: LlamaConfig(**_SIZES, rope_parameters=_rope("linear", factor=2.0)),
    "mistral-window": lambda: MistralConfig(**_SIZES, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2-window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=5,
    ),
    "gemma3-softcap": lambda: Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 2},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    **tiny_classic.CONFIGS,
}

# Groups of layers with block tables of their own, as many as any of these has.
NUM_CACHE_GROUPS = 7

# GGUF files of these architectures have no place for what makes the configuration special.
GGUF_CONFIGS = [n for n in CONFIGS if n not in {"qwen2-window", "gemma3-softcap", *tiny_classic.WITHOUT_GGUF}]


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The model in float32, with weights so large that every part of it shows in the logits."""
    torch.manual_seed(seed)
    # The eager form of Falcon in transformers adds the slopes of ALiBi twice.
    form = "sdpa" if name == "falcon-alibi" else "eager"
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation=form).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            if parameter.dim() == 1 and parameter_name.endswith("weight") and not name.startswith("gemma"):
                parameter += 1.0
            if "embed_tokens" in parameter_name:
                parameter *= parameter.shape[-1] ** 0.25
    return model


def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> NDArray[np.float32]:
    """[tokens, vocab], in float32."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids])).logits[0].numpy()


def tiny_graph(name: str, seed: int = 0) -> tuple[Graph, dict[str, Weight]]:
    """The model as our graph, not optimized, with its weights by name; nothing touches the disk."""
    model = tiny_model(name, seed)
    module = load_architecture(model.config.model_type)
    config = module.Config.from_hf(ConfigReader(model.config.to_dict()))
    table = weight_table(module)
    stored = {checkpoint_name(n, table): _source(n, t.numpy()) for n, t in model.state_dict().items()}
    sources = transformed(stored, table.transforms, config, "safetensors")
    weights = {name: source.make() for name, source in sources.items()}
    return build_graph(model.config.model_type, config, {n: w.shape for n, w in weights.items()}), weights


def _source(name: str, array: NDArray[np.float32]) -> Source:
    weight = DenseWeight(array)
    return Source(weight.type_name, weight.shape, weight.nbytes, (name,), lambda: weight)


def save_safetensors(model: PreTrainedModel, directory: Path) -> Path:
    """The directory, with config.json and model.safetensors."""
    model.save_pretrained(directory)
    return directory


def save_gguf(model: PreTrainedModel, path: Path) -> Path:
    """The model as a converter writes it, every tensor as F32."""
    config = model.config
    if config.model_type in tiny_classic.GGUF_ARCHITECTURES:
        return tiny_classic.save_gguf(model, path)
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    names = _gguf_names(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem = name.removeprefix("model.")
        if stem == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and stem.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if ".q_proj" in stem else config.num_key_value_heads
            array = _permute(array, heads)
        if architecture == "gemma3" and stem.endswith("norm.weight"):
            array = array + 1.0
        writer.add_tensor(names[stem], np.ascontiguousarray(array))
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1"])


def _gguf_names(architecture: str, num_layers: int) -> dict[str, str]:
    """Checkpoint names with their names in GGUF files, by asking our own table about the gguf package's names."""
    stems = {**GGUF_STEMS, **weight_table(load_architecture(architecture)).names}
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = {}
    for tensor in gguf.MODEL_TENSORS[arch]:
        for layer in range(num_layers):
            for kind in ("weight", "bias"):
                name = gguf.TENSOR_NAMES[tensor].format(bid=layer) + f".{kind}"
                if (known := renamed(name, stems)) is not None:
                    names[known] = name
    return names


def _permute(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """From halves of a head to pairs side by side, as converters do for llama."""
    pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _llama3_divisors(config: PreTrainedConfig) -> NDArray[np.float32]:
    """The tensor that the converter stores: the divisor of each frequency."""
    rope = config.rope_parameters
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    head_dim = config.hidden_size // config.num_attention_heads
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
