"""Models whose code is not in transformers: networks that it has, under the names and in the layout of their authors.

Each layout is written here from the published code of the model, independently of the tables that read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch.nn import functional
from transformers import GraniteMoeSharedConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config

from octavo.cli.quantize import convert
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import baichuan
from octavo.models._weights import UnitRows
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support import tiny_models
from tests.support.directory_tokenizers import save_tokenizer
from tests.support.tiny_sizes import SIZES

Tensors = dict[str, NDArray[np.float32]]
_HEADS, _KV_HEADS, _DIM = 4, 2, 16
_PLAIN = {**SIZES, "num_key_value_heads": _HEADS}


def qkv(tensors: Tensors, layer: int, kind: str = "weight") -> tuple[NDArray[np.float32], ...]:
    return tuple(tensors[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv")


def internlm2(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """wqkv: for each kv head its queries, its key and its value."""
    out = {
        "model.tok_embeddings.weight": tensors["model.embed_tokens.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for i in range(3):
        old, new = f"model.layers.{i}.", f"model.layers.{i}."
        q, k, v = (x.reshape(_KV_HEADS, -1, _DIM, 64) for x in qkv(tensors, i))
        out[new + "attention.wqkv.weight"] = np.concatenate([q, k, v], axis=1).reshape(-1, 64)
        names = {"self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm"}
        names |= {"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1"}
        names |= {"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
        out |= {f"{new}{name}.weight": tensors[f"{old}{stem}.weight"] for stem, name in names.items()}
    keys = {"model_type": "internlm2", "hidden_act": "silu", "bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    return out, {**SIZES, **keys, "rope_scaling": {"type": "dynamic", "factor": 2.0}}


def qwen(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """c_attn: q, k and v with biases; mlp: w1 is not activated, w2 is."""
    out = {
        "transformer.wte.weight": tensors["model.embed_tokens.weight"],
        "transformer.ln_f.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for i in range(3):
        old, new = f"model.layers.{i}.", f"transformer.h.{i}."
        for kind in ("weight", "bias"):
            out[f"{new}attn.c_attn.{kind}"] = np.concatenate(qkv(tensors, i, kind))
        names = {"self_attn.o_proj": "attn.c_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
        names |= {"mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"}
        out |= {f"{new}{name}.weight": tensors[f"{old}{stem}.weight"] for stem, name in names.items()}
    keys = {"model_type": "qwen", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "kv_channels": _DIM}
    keys |= {"num_attention_heads": _HEADS, "intermediate_size": 2 * 96, "layer_norm_epsilon": 1e-6, "no_bias": True}
    keys |= {"rotary_emb_base": 10000, "rotary_pct": 1.0, "seq_length": 48, "max_position_embeddings": 64}
    return out, {**keys, "use_dynamic_ntk": True, "use_logn_attn": True, "tie_word_embeddings": False}


def baichuan_layout(tensors: Tensors, layers: int = 3) -> tuple[Tensors, dict[str, Any]]:
    out = {name: array for name, array in tensors.items() if ".self_attn." not in name or ".o_proj." in name}
    for i in range(layers):
        out[f"model.layers.{i}.self_attn.W_pack.weight"] = np.concatenate(qkv(tensors, i))
    keys = {key: value for key, value in _PLAIN.items() if key != "num_key_value_heads"}
    return out, {
        **keys,
        "model_type": "baichuan",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": layers,
    }


def mimo(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    more = {"model.mtp_layers.0.input_proj.weight": np.zeros((64, 128), np.float32)}
    keys = {"model_type": "mimo", "rms_norm_eps": 1e-6, "attention_bias": True, "num_nextn_predict_layers": 1}
    return {**tensors, **more}, {**SIZES, **keys, "rope_theta": 1e4}


def bailing(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Ling 1: q, k and v in one matrix, an MLP beside the experts."""
    out = {
        "model.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": 3.0 * tensors["lm_head.weight"],  # norm_head: its rows get the length 1
    }
    for i in range(3):
        p = f"model.layers.{i}."
        out[p + "attention.query_key_value.weight"] = np.concatenate(qkv(tensors, i))
        out[p + "attention.dense.weight"] = tensors[p + "self_attn.o_proj.weight"]
        out |= {p + n: tensors[p + n] for n in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        out[p + "mlp.gate.weight"] = tensors[p + "block_sparse_moe.router.layer.weight"]
        shared = np.split(tensors[p + "shared_mlp.input_linear.weight"], 2)
        out |= {f"{p}mlp.shared_experts.{n}_proj.weight": shared[j] for j, n in enumerate(("gate", "up"))}
        out[p + "mlp.shared_experts.down_proj.weight"] = tensors[p + "shared_mlp.output_linear.weight"]
        for e in range(4):
            both = np.split(tensors[p + "block_sparse_moe.input_linear.weight"][e], 2)
            down = tensors[p + "block_sparse_moe.output_linear.weight"][e]
            parts = {"gate": both[0], "up": both[1], "down": down}
            out |= {f"{p}mlp.experts.{e}.{n}_proj.weight": array for n, array in parts.items()}
    keys = {"model_type": "bailing_moe", "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2}
    keys |= {"moe_intermediate_size": 96, "norm_topk_prob": True, "norm_head": True, "norm_softmax": False}
    return out, {**SIZES, **keys, "rms_norm_eps": 1e-6, "use_bias": False, "use_qkv_bias": False}


def chatglm(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    out = {
        "transformer.embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": tensors["model.norm.weight"],
        "transformer.output_layer.weight": tensors["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32),
    }
    for i in range(3):
        old, new = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
        for kind in ("weight", "bias"):
            out[f"{new}self_attention.query_key_value.{kind}"] = np.concatenate(qkv(tensors, i, kind))
        names = {"self_attn.o_proj": "self_attention.dense", "input_layernorm": "input_layernorm"}
        names |= {"post_attention_layernorm": "post_attention_layernorm"}
        names |= {"mlp.gate_up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
        out |= {f"{new}{name}.weight": tensors[f"{old}{stem}.weight"] for stem, name in names.items()}
    keys = {"model_type": "chatglm", "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16}
    keys |= {"num_attention_heads": 4, "multi_query_attention": True, "multi_query_group_num": 2, "rmsnorm": True}
    keys |= {"padded_vocab_size": 96, "seq_length": 64, "layernorm_epsilon": 1.5625e-7, "add_qkv_bias": True}
    keys |= {"add_bias_linear": False, "original_rope": True, "post_layer_norm": True, "rope_ratio": 1}
    return out, {**keys, "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": False}


def _granite() -> GraniteMoeSharedConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}
    return GraniteMoeSharedConfig(**SIZES, **experts, attention_multiplier=_DIM**-0.5)


LAYOUTS: dict[str, tuple[Any, Callable[[Tensors], tuple[Tensors, dict[str, Any]]]]] = {
    "internlm2": (lambda: LlamaConfig(**SIZES), internlm2),
    "qwen": (lambda: Qwen2Config(**_PLAIN), qwen),
    "baichuan": (lambda: LlamaConfig(**_PLAIN), baichuan_layout),
    "mimo": (lambda: Qwen2Config(**SIZES), mimo),
    "bailing_moe": (_granite, bailing),
    "chatglm": (tiny_models.CONFIGS["glm"], chatglm),
}


def written(name: str, directory: Path, vocab_size: int = 96) -> tuple[Path, PreTrainedModel]:
    config, layout = LAYOUTS[name]
    tiny_models.CONFIGS[name] = config
    try:
        model = tiny_models.tiny_model(name, vocab_size=vocab_size)
    finally:
        del tiny_models.CONFIGS[name]
    if name == "bailing_moe":
        head = model.get_output_embeddings().weight
        head.data = functional.normalize(head.data)
    tensors, keys = layout(tiny_models.stored_tensors(model))
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, directory / "model.safetensors")
    keys["padded_vocab_size" if name == "chatglm" else "vocab_size"] = vocab_size
    (directory / "config.json").write_text(json.dumps(keys))
    return directory, model


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits(name: str, tmp_path: Path) -> None:
    path, model = written(name, tmp_path)
    checkpoint, expected = open_checkpoint(path), tiny_models.expected_logits(model, TOKENS)
    assert checkpoint.architecture in {name, "chatglm", "qwen2", "bailingmoe"}
    assert_close(logits_of(checkpoint), expected)
    assert_close(logits_of(checkpoint, "cpu"), expected, 2e-3)


# With the layout of GGUF files that llama.cpp's converter makes of each.
GGUF_PARTS = {
    "internlm2": ("internlm2", "attn_q", 64),
    "qwen": ("qwen", "attn_qkv", 3 * 64),
    "baichuan": ("baichuan", "attn_q", 64),
    "mimo": ("qwen2", "attn_q", 64),
    "bailing_moe": ("bailingmoe", "attn_q", 64),
    "chatglm": ("chatglm", "attn_qkv", 2 * 64),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_written_as_gguf(name: str, tmp_path: Path) -> None:
    path, _ = written(name, tmp_path, save_tokenizer("qwen2", tmp_path))
    result = CliRunner().invoke(convert, [str(path), str(tmp_path / "m.gguf"), "--to", "gguf"])
    assert result.exit_code == 0, result.stderr + str(result.exception)
    converted = open_checkpoint(tmp_path / "m.gguf")
    np.testing.assert_array_equal(logits_of(converted, "cpu"), logits_of(open_checkpoint(path), "cpu"))
    architecture, part, rows = GGUF_PARTS[name]
    assert converted.file.metadata["general.architecture"] == architecture
    assert converted.file.tensors[f"blk.0.{part}.weight"].shape[0] == rows


def test_the_authors_keys_of_mimo_v2_flash(tmp_path: Path) -> None:
    """Their windows do not count the token itself, and kinds of layers are numbers."""
    model = tiny_models.tiny_model("mimo-v2-flash")
    tiny_models.save_safetensors(model, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for key in ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window", "rms_norm_eps"):
        del values[key]
    keys = {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "sliding_window_size": 5}
    keys |= {"sliding_window": 5, "swa_num_key_value_heads": 2, "swa_rope_theta": 10000, "rope_theta": 5000000}
    keys |= {"partial_rotary_factor": 0.334, "layernorm_epsilon": model.config.rms_norm_eps, "n_shared_experts": None}
    path.write_text(json.dumps({**values, **keys, "routed_scaling_factor": None}))
    assert_close(logits_of(open_checkpoint(tmp_path)), tiny_models.expected_logits(model, TOKENS))


def test_the_authors_keys_of_step35(tmp_path: Path) -> None:
    """Lists by layer, with entries and tensors of a layer that predicts a further token."""
    model = tiny_models.tiny_model("step35")
    tensors = tiny_models.stored_tensors(model)
    tensors |= {name.replace("layers.1.", "layers.5."): t for name, t in tensors.items() if "layers.1." in name}
    save_file(tensors, tmp_path / "model.safetensors")
    values = model.config.to_dict()
    heads = {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16}
    full, local = (values["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    lists = {
        key: [*values[key], value] for key, value in (("layer_types", "sliding_attention"), ("swiglu_limits", 0.0))
    }
    for key in ("rope_parameters", "mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"):
        del values[key]
    keys = {
        **{
            "num_attention_groups": values.pop("num_key_value_heads"),
            "moe_num_experts": values.pop("n_routed_experts"),
        },
        **{"moe_top_k": values.pop("num_experts_per_tok"), "max_seq_len": values.pop("max_position_embeddings")},
        **lists,
        "swiglu_limits_shared": [*values["swiglu_limits_shared"], 0.0],
        "rope_theta": [full["rope_theta"], *[local["rope_theta"]] * 3, full["rope_theta"], local["rope_theta"]],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "use_rope_layers": [],
        "moe_layers_enum": "2,3,4",
        "attention_other_setting": {"attention_type": "sliding_attention", **heads},
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps({**values, **keys}))
    assert_close(logits_of(open_checkpoint(tmp_path)), tiny_models.expected_logits(model, TOKENS))


def test_the_latent_of_queries_is_found_by_its_weights(tmp_path: Path) -> None:
    """Also if config.json leaves out its rank."""
    path = tiny_models.save_safetensors(tiny_models.tiny_model("deepseek3"), tmp_path) / "config.json"
    expected = logits_of(open_checkpoint(tmp_path))
    keys = json.loads(path.read_text())
    del keys["q_lora_rank"]
    path.write_text(json.dumps(keys))
    np.testing.assert_array_equal(logits_of(open_checkpoint(tmp_path)), expected)


def test_qwen_ends_where_its_training_did(tmp_path: Path) -> None:
    """Beyond it the authors stretch positions and scale logarithmically, which is not supported."""
    assert open_checkpoint(written("qwen", tmp_path)[0]).config.max_position_embeddings == 48


def test_baichuan_of_40_layers_has_alibi(tmp_path: Path) -> None:
    """The judge is Llama that does not turn, with the biases of ALiBi in its mask."""
    config = LlamaConfig(**{**_PLAIN, "num_hidden_layers": 40})
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else 0.5 * parameter.shape[-1] ** -0.5)
            parameter += float(parameter.dim() == 1)
        model.model.rotary_emb.inv_freq.zero_()
    tensors, keys = baichuan_layout(tiny_models.stored_tensors(model), 40)
    del keys["max_position_embeddings"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**keys, "model_max_length": 64}))
    places = torch.arange(len(TOKENS))
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / _HEADS) for head in range(_HEADS)])
    bias = slopes[:, None, None] * (places[None, :] - places[:, None])
    mask = bias.masked_fill(places[None, :] > places[:, None], float("-inf"))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS]), attention_mask=mask[None]).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.max_position_embeddings == 64
    assert_close(logits_of(checkpoint), expected)


def test_the_head_of_baichuan_2_has_unit_rows() -> None:
    """Only its vocabulary tells it from Baichuan 1."""
    step = next(transform for transform in baichuan.WEIGHTS.transforms if isinstance(transform, UnitRows))
    applies = [step.applies(SimpleNamespace(vocab_size=size)) for size in (64_000, 125_696)]
    assert (step.stem, applies) == ("lm_head", [False, True])
