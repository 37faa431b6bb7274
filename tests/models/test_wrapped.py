"""Models that also see load as text models: their logits for text are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma4UnifiedConfig,
    Idefics3Config,
    InternVLConfig,
    LlavaConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    Step3p7Config,
)

from octavo.cli.quantize import convert
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import load_architecture
from octavo.models._reading import ConfigReader
from octavo.models._wrapped import TEXT_DEFAULTS
from octavo.tokenizer.directory_vocab import configured_eos
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support import tiny_models, tiny_step
from tests.support.directory_tokenizers import save_tokenizer
from tests.support.tiny_sizes import SIZES

_QWEN_EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SIGLIP = {**_EYES, "model_type": "siglip_vision_model", "projection_dim": 64}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_TEXT = {**SIZES, "head_dim": 16}
_IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config={**SIZES, "rope_parameters": {**_MROPE}},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        tie_word_embeddings=True,
        **_IDS,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": {**_MROPE}}, vision_config=_QWEN_EYES, **_IDS
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision_config={**_QWEN_EYES, "deepstack_visual_indexes": [0]},
        **_IDS,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={
            **_TEXT,
            "rope_parameters": {**_MROPE, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        vision_config={**_QWEN_EYES, "deepstack_visual_indexes": [0]},
        **_IDS,
    ),
    "llava": lambda: LlavaConfig(
        text_config={"model_type": "llama", **SIZES}, vision_config={**_EYES, "model_type": "clip_vision_model"}
    ),
    "llava-qwen2": lambda: LlavaConfig(
        text_config={"model_type": "qwen2", **SIZES}, vision_config=_SIGLIP, tie_word_embeddings=True
    ),
    "smolvlm": lambda: SmolVLMConfig(text_config={"model_type": "llama", **SIZES}, vision_config=_EYES),
    "idefics3": lambda: Idefics3Config(text_config={"model_type": "llama", **SIZES}, vision_config=_EYES),
    "internvl": lambda: InternVLConfig(
        text_config={"model_type": "qwen2", **SIZES},
        vision_config={**_EYES, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "paligemma": lambda: PaliGemmaConfig(
        text_config={"model_type": "gemma", **_TEXT}, vision_config=_SIGLIP, projection_dim=64
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "mistral", **_TEXT}, vision_config={**_EYES, "model_type": "pixtral"}
    ),
    "step3p7": lambda: Step3p7Config(
        text_config=tiny_step.limited().to_dict(),
        vision_config={**_EYES, "image_size": 28, "patch_size": 14},
    ),
    "gemma4_unified": lambda: Gemma4UnifiedConfig(
        text_config={
            **_TEXT,
            "sliding_window": 5,
            "per_layer_config": {1: {"head_dim": 16}, 2: {"head_dim": 16}},
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
}


def tiny(name: str, vocab_size: int = SIZES["vocab_size"]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.text_config.vocab_size = vocab_size
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            # Norms of Step multiply by 1 + weight: with larger ones rounding would choose other experts.
            if parameter.dim() == 1 and parameter_name.endswith("weight") and name != "step3p7":
                parameter += 1.0
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_text(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    checkpoint = open_checkpoint(tiny_models.save_safetensors(model, tmp_path))
    expected = tiny_models.expected_logits(model, TOKENS)
    assert_close(logits_of(checkpoint), expected)
    assert_close(logits_of(checkpoint, "cpu"), expected, 2e-3)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_keys_of_text_beside_the_others(name: str, tmp_path: Path) -> None:
    """The published files of Qwen 2 have no section about text, and say mrope in place of default."""
    model = tiny(name)
    tiny_models.save_safetensors(model, tmp_path)
    path = tmp_path / "config.json"
    values: dict[str, Any] = json.loads(path.read_text())
    text = values.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    path.write_text(json.dumps({**text, **values, "rope_theta": 1e6}))
    assert_close(logits_of(open_checkpoint(tmp_path)), tiny_models.expected_logits(model, TOKENS))


# The architecture of the text part in GGUF files.
GGUF_NAMES = {
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "llava-qwen2": "qwen2",
}


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_text_parts_are_converted(name: str, tmp_path: Path) -> None:
    """Logits are the same to the last bit, and the names those of the gguf package."""
    num_tokens = save_tokenizer("qwen2", tmp_path)
    model = tiny(name, num_tokens)
    tiny_models.save_safetensors(model, tmp_path)
    result = CliRunner().invoke(convert, [str(tmp_path), str(tmp_path / "m.gguf"), "--to", "gguf"])
    assert result.exit_code == 0, result.stderr
    converted = open_checkpoint(tmp_path / "m.gguf")
    np.testing.assert_array_equal(logits_of(converted, "cpu"), logits_of(open_checkpoint(tmp_path), "cpu"))
    architecture = converted.file.metadata["general.architecture"]
    assert architecture == GGUF_NAMES[name]
    known = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    stems = {gguf.TENSOR_NAMES[tensor].format(bid=i) for tensor in gguf.MODEL_TENSORS[known] for i in range(3)}
    assert {tensor.rpartition(".")[0] for tensor in converted.file.tensors} <= stems
    if architecture != "qwen2":
        sections = converted.file.metadata[gguf.Keys.Rope.DIMENSION_SECTIONS.format(arch=architecture)]
        assert list(np.asarray(sections)) == [2, 3, 3, 0]


# Switches of published files that transformers leaves out of those that it writes, or writes otherwise.
_SWITCHES: list[tuple[str, dict[str, object]]] = [
    ("mistral-window", {"sliding_window": None}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("exaone4-window", {"layer_types": None, "sliding_window_pattern": "LLG"}),
    ("granitehybrid-dense", {"position_embedding_type": "rope", "mamba_d_head": "auto"}),
    ("nemotron-h", {"layers_block_type": None, "layer_types": ["mamba", "mlp", "mamba", "attention", "mlp"]}),
    ("jamba", {"mamba_dt_rank": "auto"}),
]


@pytest.mark.parametrize(("name", "switches"), [*((name, {}) for name in tiny_models.CONFIGS), *_SWITCHES])
def test_a_section_is_read_like_a_file(name: str, switches: dict[str, object]) -> None:
    values = tiny_models.config_values(name) | switches
    config = load_architecture(values["model_type"]).Config
    section = ConfigReader({f"text_config.{key}": value for key, value in values.items()}, "text_config.")
    assert config.from_hf(section) == config.from_hf(ConfigReader(values))


def test_limits_of_a_section_are_refused() -> None:
    values = tiny_models.config_values("mamba2") | {"time_step_limit": [0.1, 1.0]}
    section = ConfigReader({f"text_config.{key}": value for key, value in values.items()}, "text_config.")
    with pytest.raises(ModelLoadError, match=r"text_config\.time_step_limit is .* steps are not limited"):
        load_architecture("mamba2").Config.from_hf(section)


def test_layers_without_experts_are_not_converted(tmp_path: Path) -> None:
    """GGUF files cannot say which these are."""
    tiny_models.save_safetensors(tiny("qwen3_vl_moe", save_tokenizer("qwen2", tmp_path)), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["mlp_only_layers"] = [0]
    path.write_text(json.dumps(values))
    arguments = [str(tmp_path), str(tmp_path / "m.gguf"), "--to", "gguf"]
    with pytest.raises(ModelLoadError, match="some layers have no experts"):
        CliRunner().invoke(convert, arguments, catch_exceptions=False)


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    defaults = AutoConfig.for_model(kind).to_dict()
    assert {key: defaults[key] for key in TEXT_DEFAULTS[kind]} == TEXT_DEFAULTS[kind]


def test_sections_leave_out_defaults(tmp_path: Path) -> None:
    """Published files of LLaVA do not say the sizes of Llama's 7B: the sizes of the weights contradict them here."""
    model = tiny("llava")
    tiny_models.save_safetensors(model, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["text_config"]["hidden_size"]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"text_config\.hidden_size is 4096: embed_tokens.weight has 64 columns"):
        open_checkpoint(tmp_path)


def test_unknown_text_parts_are_named(tmp_path: Path) -> None:
    tiny_models.save_safetensors(tiny("llava"), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["model_type"] = "lamas"
    path.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="'lamas' is not supported; the nearest supported ones: ll"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", [None, ["llava"], 7])
def test_the_file_needs_a_model_type_of_its_own(kind: object, tmp_path: Path) -> None:
    tiny_models.save_safetensors(tiny("llava"), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "model_type": kind}))
    with pytest.raises(ModelLoadError, match=r"config\.json: model_type is "):
        open_checkpoint(tmp_path)


def test_end_token_of_the_section(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    assert configured_eos(tmp_path, 10) == [5]
