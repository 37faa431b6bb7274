"""Values that an architecture cannot have are refused before weights are read, by the name of the key."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from octavo.errors import ModelLoadError
from octavo.models import find_architecture, load_architecture
from octavo.models._reading import ConfigReader
from tests.support import tiny_classic
from tests.support.tiny_models import CONFIGS, config_values

# Keys of config.json that nearly every architecture has, with a value that none can have.
WRONG = {
    "vocab_size": 0,
    "hidden_size": -64,
    "num_hidden_layers": 10**6,
    "num_attention_heads": "4",
    "num_key_value_heads": 3,
    "max_position_embeddings": 1.5,
    "intermediate_size": True,
    "rms_norm_eps": float("nan"),
    "tie_word_embeddings": "yes",
}


def config_of(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model with other values; `...` leaves one out. A nested one: `rope_parameters__x`."""
    values = config_values(name)
    for key, value in changes.items():
        *outer, last = key.split("__")
        section = values
        for part in outer:
            section = section[part]
        section[last] = value
        if value is ...:
            del section[last]
    return load_architecture(values["model_type"]).Config.from_hf(ConfigReader(values))


ROTARY = [name for name in CONFIGS if "rope_parameters" in config_values(name) and name != "falcon-alibi"]


@pytest.mark.parametrize("name", CONFIGS)
def test_common_keys(name: str) -> None:
    values = config_values(name)
    config_of(name)
    # Models from before Llama take the width of the MLP from its weights.
    unread = {"intermediate_size"} if name in tiny_classic.CONFIGS else set()
    tried = [key for key in WRONG if key in values and key not in unread]
    assert len(tried) >= 2
    for key in tried:
        with pytest.raises(ModelLoadError, match=rf"\b{key} is "):
            config_of(name, **{key: WRONG[key]})


@pytest.mark.parametrize("name", ROTARY)
def test_unknown_scalings(name: str) -> None:
    rope = config_values(name)["rope_parameters"]
    nested = "full_attention__" if "full_attention" in rope else ""
    with pytest.raises(ModelLoadError, match=r"rope_type is 'spiral': must be default"):
        config_of(name, **{f"rope_parameters__{nested}rope_type": "spiral"})


@pytest.mark.parametrize("name", [name for name in CONFIGS if "hidden_act" in config_values(name)])
def test_unknown_activations(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"hidden_act(ivation)? is 'step': must be "):
        config_of(name, hidden_act="step")


SPECIFIC: list[tuple[str, dict[str, Any], str]] = [
    ("mistral-window", {"sliding_window": -5}, "sliding_window is -5"),
    ("ministral", {"layer_types": ["full_attention"] * 2}, "layer_types is .*: must be 3 strings"),
    ("ministral", {"layer_types": ["chunked_attention"] * 3}, "layer_types is 'chunked_attention'"),
    ("ministral3", {"rope_parameters__llama_4_scaling_beta": 1e9}, "llama_4_scaling_beta is 1000000000"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5: must be a whole number from 1 to 4"),
    ("qwen3moe", {"num_experts": ..., "num_local_experts": ...}, "num_experts is missing"),
    ("qwen3moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1: must be true or false"),
    ("qwen2moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ("qwen2moe-mixed", {"sliding_window": 0}, "sliding_window is 0"),
    ("gemma3n", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6: must be less than the 6 layers"),
    ("gemma3n", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: no layer without a window is left"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5]}, r"activation_sparsity_pattern is \[0\.5\]: must be 6 numbers"),
    ("gemma3n", {"activation_sparsity_pattern": [1.5] * 6}, r"activation_sparsity_pattern\[0\] is 1\.5"),
    ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs is 1: must be a whole number from 2"),
    ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx is 4: must be a whole number from 0 to 3"),
    ("gemma3n", {"intermediate_size": [96]}, r"intermediate_size is \[96\]: must be 6 whole numbers"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': bidirectional attention"),
    ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: no layer without a window is left"),
    ("gemma4", {"per_layer_config__1__head_dim": 31}, r"per_layer_config\.1\.head_dim is 31: must be even"),
    ("gemma4", {"per_layer_config__1__head_dim": 16}, "per_layer_config is .*: differs between layers"),
    (
        "gemma4-few-keys",
        {"per_layer_config__1__num_key_value_heads": 3},
        "per_layer_config is .*: differs between layers",
    ),
    ("gemma4", {"enable_moe_block": True}, "num_experts is missing"),
    ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax': must be sigmoid"),
    ("minimax-m2", {"attn_type_list": [0, 1, 1]}, "attn_type_list is .*: differs between layers"),
    ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm is False: must be true"),
    ("hunyuan-moe", {"use_cla": True}, "use_cla is True: layers that share keys and values"),
    ("hunyuan-moe", {"moe_topk": [1, 2, 2]}, "moe_topk is .*: differs between layers"),
    ("hunyuan-dense-alpha", {"rope_parameters__alpha": -1.0}, "alpha is -1.0"),
    ("ernie4-5-moe", {"moe_k": 5}, "moe_k is 5: must be a whole number from 1 to 4"),
    ("dots1", {"topk_method": "greedy"}, "topk_method is 'greedy': must be noaux_tc"),
    ("bailingmoe2", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False: must be true"),
    ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1: must be 2"),
    ("phimoe-long", {"rope_parameters__short_mscale": 1.3}, "short_mscale is 1.3: must be long_mscale, 1.2"),
    ("mimo-v2-flash", {"swa_num_key_value_heads": 3}, "swa_num_key_value_heads is 3: does not divide 4 heads"),
    ("mimo-v2-flash", {"swa_head_dim": 16}, "swa_head_dim is 16: must be 24"),
    ("step35", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False: must be true"),
    ("step35", {"norm_expert_weight": False}, "norm_expert_weight is False: must be true"),
    ("step35", {"zero_centered": False}, "zero_centered is False: must be true"),
    ("step35", {"sink": True}, "sink is True: must be false"),
    ("step35", {"gating": "per-column"}, "gating is 'per-column': must be per-head"),
    ("step35", {"moe_router_activation": "softmax"}, "moe_router_activation is 'softmax': must be sigmoid"),
    ("step35", {"use_rope_layers": [True, False]}, r"use_rope_layers is .*: must be empty or true alone"),
    ("step35", {"yarn_only_types": ["sliding_attention"]}, "yarn_only_types is .*: must be empty or full_attention"),
    ("step35", {"layer_types": ["full_attention"]}, "layer_types is .*: must have 5 values"),
    ("step35", {"sliding_window": None}, "sliding_window is missing"),
    (
        "step35",
        {"num_sliding_attention_heads": 5},
        "num_sliding_attention_heads is 5: must be a multiple of 2 kv heads",
    ),
    ("step35", {"num_sliding_attention_heads": 2**17}, "head_dim is 16: makes more than 1048576 columns"),
    ("step35", {"attention_other_setting": {"head_dim": 8}}, "head_dim is 8: must be 16, as in the other layers"),
    ("step35", {"swiglu_limits": [-1.0] * 5}, r"swiglu_limits\[0\] is -1\.0"),
    ("step35", {"swiglu_limits_shared": [7.0]}, "swiglu_limits_shared is .*: must have 5 values"),
    ("longcat-flash", {"mla_scale_q_lora": False}, "mla_scale_q_lora is False: must be true, as in transformers"),
    ("longcat-flash", {"router_bias": True}, "router_bias is True: must be false, as in transformers"),
    ("longcat-flash", {"zero_expert_type": "drop"}, "zero_expert_type is 'drop': must be identity"),
    ("longcat-flash", {"moe_topk": 8}, "num_experts_per_tok is 8: must be a whole number from 1 to 7"),
    ("longcat-flash", {"q_lora_rank": 0}, "q_lora_rank is 0"),
    ("deepseek32", {"index_topk": 0}, "index_topk is 0"),
    ("gpt-neo", {"attention_types": [[["near"], 2]]}, "attention_types is .*: must be pairs of kinds"),
    ("gpt-neo", {"attention_types": [[["global"], 1]]}, "attention_types is .*: must be pairs of kinds"),
    ("gpt-bigcode", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gemma4-experts", {"top_k_experts": 7}, "top_k_experts is 7: must be a whole number from 1 to 6"),
    ("gemma4-experts", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types is 'sliding_attention': must be chunked"),
    ("llama4", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: must be 4 values"),
    ("llama4", {"floor_scale": 2}, "floor_scale is 2: must be a whole number from 16"),
    ("llama4", {"attn_scale": 1e3}, "attn_scale is 1000"),
    ("llama4", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
    ("llama4", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5: must be a whole number from 1 to 4"),
    ("llama4", {"intermediate_size_mlp": -1}, "intermediate_size_mlp is -1"),
    (
        "llama4",
        {"rope_parameters__rope_type": "yarn"},
        "rope_type is 'yarn': must be default, linear, llama3",
    ),
    ("gpt-oss", {"swiglu_alpha": 2.0}, r"swiglu_alpha is 2\.0: must be 1\.702"),
    ("gpt-oss", {"swiglu_limit": -7.0}, r"swiglu_limit is -7\.0"),
    ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types is .*: must be 4 strings"),
    ("gpt-oss", {"num_local_experts": 1}, "num_experts_per_tok is 2: must be a whole number from 1 to 1"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma2", {"attn_logit_softcapping": -2.0}, r"attn_logit_softcapping is -2\.0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping is 2.0: Gemma 3 has no softcap"),
    ("phi3", {"sliding_window": 0}, "sliding_window is 0"),
    ("phi3-longrope", {"rope_parameters__long_factor": [1.0]}, r"long_factor is \[1\.0\]: must be 6 numbers"),
    ("olmo3", {"layer_types": ["full_attention"]}, "layer_types is .*: must be 4 strings"),
    ("granite", {"logits_scaling": 0.0}, r"logits_scaling is 0\.0"),
    ("granite", {"residual_multiplier": "1"}, "residual_multiplier is '1': must be a number"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 1, 1]}, "no_rope_layers is 2: must be true or false"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]: must be 5 values"),
    ("starcoder2", {"norm_epsilon": -1.0}, r"norm_epsilon is -1\.0"),
    (
        "stablelm",
        {"rope_parameters__partial_rotary_factor": 0.01},
        "partial_rotary_factor is .*must rotate an even number",
    ),
    ("nemotron", {"norm_eps": 0.0}, r"norm_eps is 0\.0"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True: norms on q and k are not supported"),
    ("cohere2", {"logit_scale": None, "sliding_window": "all"}, "sliding_window is 'all'"),
    ("glm4", {"head_dim": 15}, "head_dim is 15: must be even"),
    ("exaone4-window", {"layer_types": None, "sliding_window_pattern": "LLX"}, "sliding_window_pattern is 'LLX'"),
    ("deepseek2", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ("deepseek2", {"kv_lora_rank": ...}, "kv_lora_rank is missing"),
    ("deepseek2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7: must be even"),
    (
        "deepseek2",
        {"qk_nope_head_dim": 2**19},
        "qk_nope_head_dim is 524288: makes more than 1048576 columns with 4 heads",
    ),
    ("deepseek2", {"v_head_dim": 2**19}, "v_head_dim is 524288"),
    ("deepseek2", {"num_key_value_heads": 2}, "num_key_value_heads is 2: must be 4"),
    ("deepseek2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': must be greedy or group_limited_greedy"),
    ("deepseek2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': must be softmax"),
    ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob is True: must be false"),
    ("deepseek2", {"moe_layer_freq": 2}, "moe_layer_freq is 2: must be 1"),
    ("deepseek2", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7: must be a whole number from 1 to 6"),
    ("deepseek2", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ("deepseek2-groups", {"n_group": 3}, "n_group is 3: does not divide 8 experts"),
    ("deepseek2-groups", {"topk_group": 5}, "topk_group is 5: must be a whole number from 1 to 4"),
    ("deepseek2-groups", {"topk_group": 1}, "num_experts_per_tok is 3: only 2 experts are in 1 of 4 groups"),
    ("deepseek3", {"scoring_func": "softmax"}, "scoring_func is 'softmax': must be sigmoid"),
    ("deepseek3", {"n_group": 8}, "n_group is 8: a group has only 1 experts, fewer than the best 2"),
    ("deepseek3", {"n_group": ...}, "n_group is missing"),
    ("glm4moe", {"topk_method": "greedy"}, "topk_method is 'greedy': must be noaux_tc"),
    ("glm4moe", {"n_routed_experts": 2}, "num_experts_per_tok is 3: must be a whole number from 1 to 2"),
    ("glm4moe-lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types is .*: must be dense in the"),
    ("glm4moe-lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*: must be 3 strings"),
    ("deepseek3", {"rope_parameters__mscale_all_dim": 1e9}, r"mscale_all_dim is 1000000000\.0"),
]


@pytest.mark.parametrize(("name", "changes", "message"), SPECIFIC)
def test_specific_keys(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_of(name, **changes)


GGUF_LATENT = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.key_length_mla": 8}, r"attention\.key_length_mla is 8: must be a whole number from 9"),
        ({"attention.kv_lora_rank": 0}, r"attention\.kv_lora_rank is 0"),
        (
            {"attention.value_length_mla": 2**20},
            r"attention\.value_length_mla is 1048576: makes more than 1048576 columns",
        ),
        ({"expert_gating_func": 3}, r"expert_gating_func is 3: must be 1 \(softmax\) or 2 \(sigmoid\)"),
        ({"expert_group_count": 3}, "expert_group_count is 3: does not divide 8 experts"),
        ({"expert_used_count": 5}, "expert_used_count is 5: only 4 experts are in 2 of 4 groups"),
        ({"leading_dense_block_count": 2}, "leading_dense_block_count is 2"),
        ({"rope.scaling.yarn_log_multiplier": float("inf")}, "yarn_log_multiplier is inf"),
    ],
)
def test_gguf_of_deepseek(changes: dict[str, Any], message: str) -> None:
    shapes = {"embed_tokens.weight": (96, 64), "layers.0.input_layernorm.weight": (64,)}

    def read(values: dict[str, Any]) -> Any:
        reader = ConfigReader({f"deepseek2.{key}": value for key, value in values.items()}, "deepseek2.")
        return load_architecture("deepseek2").Config.from_gguf(reader, shapes)

    config = read(GGUF_LATENT)
    assert (config.head_dim, config.value_dim, config.nope_dim, config.head_value_dim) == (40, 32, 12, 16)
    with pytest.raises(ModelLoadError, match=message):
        read(GGUF_LATENT | changes)


GGUF_STEP = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": [4, 6, 6],
    "attention.head_count_kv": [2, 2, 2],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 16,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [False, True, True],
    "rope.freq_base": 5e5,
    "rope.freq_base_swa": 1e4,
    "expert_count": 8,
    "expert_used_count": 3,
    "swiglu_clamp_exp": [0.0, 7.0, 7.0],
    "nextn_predict_layers": 1,
}


def step_of_gguf(**changes: Any) -> Any:
    shapes = {"embed_tokens.weight": (96, 64), "layers.1.input_layernorm.weight": (64,)}
    values = GGUF_STEP | {key.replace("__", "."): value for key, value in changes.items()}
    reader = ConfigReader({f"step35.{key}": value for key, value in values.items()}, "step35.")
    return load_architecture("step35").Config.from_gguf(reader, shapes)


def test_lists_of_step_35_in_gguf_files_go_on_with_layers_that_predict_further_tokens() -> None:
    config = step_of_gguf()
    assert (config.num_layers, config.num_heads, config.local_heads) == (2, 4, 6)
    assert (config.attention.windows, config.limits, config.shared_limits) == ((None, 6), (None, 7.0), (None, None))
    # Half of the columns turn in layers without a window, as the file does not say.
    assert [2 * len(config.rope_params(layer).frequencies) for layer in (0, 1)] == [8, 16]
    assert step_of_gguf(rope__dimension_count_swa=4).rope.local.frequencies == (1.0, 0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__head_count": [4]}, r"attention\.head_count is \[4\]: must have 2 values"),
        ({"attention__head_count_kv": [2, 1, 1]}, r"attention\.head_count_kv is .*: differs between layers"),
        ({"attention__head_count": [4, 5, 5]}, r"attention\.head_count is 5: must be a multiple of 2 kv heads"),
        ({"expert_gating_func": 1}, r"expert_gating_func is 1: must be 2 \(sigmoid\)"),
        ({"rope__scaling__type": "yarn"}, r"rope\.scaling\.type is 'yarn': must be none"),
        ({"swiglu_clamp_exp": [float("nan")] * 3}, r"swiglu_clamp_exp\[0\] is nan"),
    ],
)
def test_gguf_of_step_35(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        step_of_gguf(**changes)


def test_windows_of_qwen2_moe_without_a_list() -> None:
    """As transformers fills the list in: every second layer up to `max_window_layers`."""
    listed = config_of("qwen2moe-mixed")
    assert listed.attention.windows == config_of("qwen2moe-mixed", layer_types=...).attention.windows == (5, None, None)
    assert config_of("qwen2moe-mixed", layer_types=..., use_sliding_window=False).attention.windows == (None,) * 3


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek4"])
def test_missing_operations_of_known_architectures_are_named(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        find_architecture(name, ConfigReader({}), lambda module, own: module.Config.from_hf(own))
    message = str(caught.value)
    assert f"'{name}' is not supported: it needs attention over keys that are averaged over windows" in message
    assert "experts by token id; the nearest supported ones: deepseek2 (" in message


def nearest_to(name: str, **changes: Any) -> str:
    reader = ConfigReader(config_values(name) | {"model_type": "novel"} | changes)
    with pytest.raises(ModelLoadError) as caught:
        find_architecture("novel", reader, lambda module, own: module.Config.from_hf(own))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nanochat", "arcee, which has no key final_logit_softcapping ("),
        ("vaultgemma", "gemma2, which has all its keys ("),
        ("deepseek_v4", "deepseek2 ("),
        ("xglm", None),  # glm4 has a similar name and nothing else in common
        ("xlstm", None),
    ],
)
def test_what_is_near_to_published_architectures(name: str, near: str | None) -> None:
    reader = ConfigReader(AutoConfig.for_model(name).to_dict())
    with pytest.raises(ModelLoadError) as caught:
        find_architecture(name, reader, lambda module, own: module.Config.from_hf(own))
    expected = "and no supported one is similar" if near is None else f"the nearest supported ones: {near}"
    assert expected in str(caught.value)


NEAREST = {
    **{"aria_text": "ernie4_5", "codegen": "gptj", "cwm": "mistral", "diffllama": "llama", "doge": "olmoe"},
    **{"ernie4_5_vl_moe_text": "ernie4_5", "flex_olmo": "olmoe", "gpt_neox_japanese": "gptneox", "ibert": "bert"},
    **{"jetmoe": "qwen2moe", "longformer": "xlm_roberta", "megatron-bert": "modernbert", "persimmon": "nemotron"},
    **{"rembert": "bert", "rwkv": "rwkv7", "splinter": "mpnet", "youtu": "minicpm3"},
}
# A similar name, a text part or most keys are not enough.
FAR = ["bart", "cohere_asr", "evolla", "fuyu", "funnel", "git", "granite_speech", "idefics", "led", "mllama", "moshi"]
FAR += ["nystromformer", "phi4_multimodal", "reformer", "switch_transformers", "xlnet"]


@pytest.mark.parametrize("name", [*NEAREST, *FAR])
def test_published_architectures_that_are_not_supported_name_a_relative_or_nothing(name: str) -> None:
    reader = ConfigReader(AutoConfig.for_model(name).to_dict())
    with pytest.raises(ModelLoadError) as caught:
        find_architecture(name, reader, lambda module, own: module.Config.from_hf(own))
    expected = f"supported ones: {NEAREST[name]}, which has" if name in NEAREST else "and no supported one is similar"
    assert expected in str(caught.value)


def test_an_unknown_architecture_names_the_nearest_and_what_it_lacks() -> None:
    message = nearest_to("llama", conv_width=4, gate_kind="tanh", resid_dropout=0.1, unused=None, off=False)
    assert "'novel' is not supported; the nearest supported ones: " in message
    assert "which has no key conv_width, gate_kind (docs" in message
    assert "granite, which has no key router_kind (" in nearest_to("granite", router_kind="top")
    assert "which has all its keys" in nearest_to("granite")
    assert "which has no key is_encoder_decoder (" in nearest_to("llama", is_encoder_decoder=True)
    # A list in place of `intermediate_size` does not make its other keys unknown.
    assert "ones: gemma3n, which has no key vocab_size_per_layer_input" in nearest_to("gemma3n", router_kind="top")
    for message in (
        nearest_to("llama", **{f"key{i}": i for i in range(20)}),
        nearest_to("llama", vocab_size=-1),
    ):
        assert "'novel' is not supported, and no supported one is similar (docs" in message


def test_contexts_that_an_indexer_would_choose_from() -> None:
    """Up to index_topk all tokens are chosen; beyond it the model would be another one."""
    config = config_of("deepseek32")
    assert config.max_position_embeddings == 40
    assert config.for_length(40) is config
    with pytest.raises(ModelLoadError, match=r"max_model_len 41 is more than index_topk, 40: .*; set it to at most 40"):
        config.for_length(41)
    assert config_of("deepseek32", index_topk=4096).max_position_embeddings == 64


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    assert config_of("deepseek3", model_type="kimi_k2") == config_of("deepseek3")


def test_layers_that_predict_further_tokens_are_not_counted() -> None:
    """GGUF files of GLM 4.5 count them among their blocks."""
    keys = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
    values = {f"glm4moe.{key}": GGUF_LATENT[key] for key in keys} | {
        "glm4moe.block_count": 4,
        "glm4moe.nextn_predict_layers": 1,
        "glm4moe.attention.layer_norm_rms_epsilon": 1e-5,
        "glm4moe.expert_count": 8,
        "glm4moe.expert_used_count": 2,
    }
    shapes = {"embed_tokens.weight": (96, 64), "layers.2.input_layernorm.weight": (64,)}
    read = load_architecture("glm4moe").Config.from_gguf
    assert read(ConfigReader(values, "glm4moe."), shapes).num_layers == 3
    with pytest.raises(ModelLoadError, match="block_count is 4: must be a whole number from 5"):
        read(ConfigReader(values | {"glm4moe.nextn_predict_layers": 4}, "glm4moe."), shapes)
