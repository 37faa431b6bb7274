"""Configurations from both formats: what they become, and how damaged ones are refused."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import models
from octavo.backends import ExecutorLimits, get_backend
from octavo.config import CPU_KV_DTYPES, KVDtype
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Attention, Rope
from octavo.models import _rope as rope
from octavo.models import build_graph, known_architectures, llama, load_architecture
from octavo.models._attention import AttentionConfig, QueryGrowth, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, tiny_graph

SHAPES = {"embed_tokens.weight": (100, 64), "layers.1.input_layernorm.weight": (64,)}
GGUF = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}
HF = {
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def from_gguf(architecture: str = "llama", shapes: dict[str, tuple[int, ...]] = SHAPES, **changes: Any) -> Any:
    """changes: by key, with underscores doubled for dots; None leaves a key out."""
    values = {**GGUF, **{k.replace("__", "."): v for k, v in changes.items()}}
    metadata = {k if "weight" in k else f"{architecture}.{k}": v for k, v in values.items() if v is not None}
    return load_architecture(architecture).Config.from_gguf(ConfigReader(metadata, f"{architecture}."), shapes)


def from_hf(architecture: str = "llama", **changes: Any) -> Any:
    config = {k: v for k, v in {**HF, **changes}.items() if v is not ...}
    return load_architecture(architecture).Config.from_hf(ConfigReader(config))


def test_architectures_are_found_by_file_and_alias() -> None:
    known = known_architectures()
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text"} <= set(known)
    assert known["ministral3"] == "mistral"
    assert load_architecture("gemma3_text").__name__ == "octavo.models.gemma3"
    with pytest.raises(ModelLoadError, match=r"'rwkv4' is not supported \(docs/models\.md"):
        load_architecture("rwkv4")


def test_names_and_variants_are_those_that_the_modules_declare() -> None:
    """They are read without importing the modules, which would delay every start."""
    modules = {name: load_architecture(name) for name in set(known_architectures().values())}
    names = {name: module for module in modules for name in (module, *getattr(modules[module], "ALIASES", ()))}
    assert names == known_architectures()
    variants = {(name, *module.VARIANT_OF) for name, module in modules.items() if hasattr(module, "VARIANT_OF")}
    assert variants == set(models._variants())
    program = "import sys, octavo.models as m; m.known_architectures(); sys.exit('octavo.models.llama' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_gguf() -> None:
    config = from_gguf()
    sizes = (config.vocab_size, config.num_layers, config.hidden_size, config.mlp.intermediate_size)
    assert sizes == (100, 2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.max_position_embeddings == 4096
    np.testing.assert_allclose(config.rope.params.frequencies, rope.scaled(16, 5e5).frequencies)


def test_both_formats_agree() -> None:
    for architecture in ("qwen2", "qwen3"):
        assert from_gguf(architecture, attention__key_length=16) == from_hf(
            architecture, head_dim=16, tie_word_embeddings=True
        )


@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_gguf_with_values_of_another_width(kv_dtype: KVDtype) -> None:
    """The model's graph gives the same logits in numpy and on the cpu, which stores float16 or int8."""
    rng = np.random.default_rng(0)
    _, plain = tiny_graph("llama")
    config = from_gguf("llama", {n: w.shape for n, w in plain.items()}, attention__value_length=24)
    assert (config.head_dim, config.value_dim) == (16, 24)
    shapes = {n: w.shape for n, w in plain.items()}
    for layer in range(config.num_layers):
        shapes[f"layers.{layer}.self_attn.v_proj.weight"] = (config.num_kv_heads * 24, config.hidden_size)
        shapes[f"layers.{layer}.self_attn.o_proj.weight"] = (config.hidden_size, config.num_heads * 24)
    weights = {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in shapes.items()}
    graph = build_graph("llama", config, shapes)
    tokens, results = rng.integers(0, 96, 30).tolist(), []
    for backend in ("reference", "cpu"):
        executor = get_backend(backend).compile(graph, weights, ExecutorLimits(64, 4, 64, 64), kv_dtype=kv_dtype)
        executor.allocate_cache(4, 16)
        sequence = Request(tokens, [3, 1])
        steps = [step([(sequence, count)], block_size=16) for count in (20, 10)]
        results.append(np.concatenate([executor.submit(batch).wait().logits for batch in steps]))
        executor.close()
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=2e-2 * np.abs(results[0]).max())


def test_gguf_rotary_factors() -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    config = from_gguf(**{"rope_freqs.weight": divisors})
    plain = rope.scaled(16, 5e5).frequencies
    np.testing.assert_allclose(config.rope.params.frequencies, np.array(plain) / divisors, rtol=1e-6)
    factors = {"rope_factors_long.weight": divisors, "rope_factors_short.weight": np.ones(8, np.float32)}
    short = from_gguf(**factors)
    long = from_gguf(**factors, rope__scaling__original_context_length=1024, rope__scaling__attn_factor=1.19)
    np.testing.assert_allclose(short.rope.params.frequencies, plain)
    np.testing.assert_allclose(long.rope.params.frequencies, np.array(plain) / divisors, rtol=1e-6)
    assert long.rope.params.attention_factor == 1.19


def test_gguf_scalings() -> None:
    linear = from_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope.params
    np.testing.assert_allclose(linear.frequencies, rope.scaled(16, 5e5, 4.0).frequencies)
    legacy = from_gguf(rope__scale_linear=4.0).rope.params
    assert legacy == linear
    yarn = from_gguf(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=1024
    ).rope.params
    assert yarn.frequencies == rope.yarn(16, 5e5, 4.0, 1024).frequencies
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_gguf_partial_rotary() -> None:
    assert len(from_gguf(rope__dimension_count=8).rope.params.frequencies) == 4


def test_tied_embeddings() -> None:
    assert from_gguf().output_head == "embed_tokens"
    assert from_gguf(shapes={**SHAPES, "lm_head.weight": (100, 64)}).output_head == "lm_head"
    assert from_hf().output_head == "lm_head"
    assert from_hf(tie_word_embeddings=True).output_head == "embed_tokens"
    assert from_hf("gemma3").output_head == "embed_tokens"


def test_missing_head() -> None:
    """A checkpoint that is not tied and has no head is damaged."""
    graph, _ = tiny_graph("llama")
    shapes = {name: shape for name, shape in graph.weights.items() if "lm_head" not in name}
    config = load_architecture("llama").Config.from_hf(ConfigReader(CONFIGS["llama"]().to_dict()))
    with pytest.raises(GraphError, match=r"lm_head: logits: the checkpoint has no weight lm_head\.weight"):
        build_graph("llama", config, shapes)


class _MadeUp(DecoderConfig):
    """A family that differs from Llama in its attention, in the layers that rotate, and in its activation."""

    __slots__ = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> _MadeUp:
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader, 4), softcap=5.0, query_growth=QueryGrowth(0.5, 8)),
            rope=replace(hf_rope(reader), rotates=(True, False)),
            mlp=MLPConfig.from_hf(reader, activation=("relu2",)),
        )


def test_a_family_states_only_what_is_its_own() -> None:
    values = {**CONFIGS["llama"]().to_dict(), "num_hidden_layers": 2, "hidden_act": "relu2"}
    config = _MadeUp.from_hf(ConfigReader(values))
    plain = llama.Config.from_hf(ConfigReader(values | {"hidden_act": "silu"}))
    g = Graph({**tiny_graph("llama")[0].weights})
    llama.build(g, config)
    attentions = [node.op.params for node in g.nodes if isinstance(node.op, Attention)]
    assert [(params.window, params.softcap) for params in attentions] == [(4, 5.0)] * 2
    scales = attentions[0].query_scales
    assert scales is not None
    assert len(scales) * 8 == config.max_position_embeddings
    assert scales[2] == 1 + 0.5 * math.log1p(2)
    assert [node.layer for node in g.nodes if isinstance(node.op, Rope)] == ["layers.0"] * 2
    # What it does not state is Llama's.
    assert (config.rope.params, config.mlp) == (plain.rope.params, plain.mlp)
    own = {"attention": config.attention, "rope": config.rope}
    assert config == _MadeUp(**{field.name: getattr(plain, field.name) for field in fields(plain)} | own)


def test_mistral_window() -> None:
    assert from_hf("mistral").attention.windows == (4096, 4096)
    assert from_hf("mistral", sliding_window=None).attention.windows == (None, None)
    assert from_hf("llama").attention.windows == (None, None)


def test_gemma3_pattern() -> None:
    layers = {"layers.6.input_layernorm.weight": (64,), "embed_tokens.weight": (100, 64)}
    gemma = from_gguf("gemma3", layers, block_count=7, attention__sliding_window=512)
    assert gemma.attention.windows == (512,) * 5 + (None, 512)
    hf = from_hf("gemma3", num_hidden_layers=7, sliding_window=512, head_dim=16)
    assert hf.attention.windows == gemma.attention.windows
    text = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 8}
    config = ConfigReader({"model_type": "gemma3", "text_config": text})
    nested = load_architecture("gemma3").Config.from_hf(config)
    assert (nested.vocab_size, nested.head_dim, nested.num_kv_heads) == (262_208, 256, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, r"llama\.block_count is missing"),
        ({"block_count": 1_000_000}, r"llama\.block_count is 1000000: must be a whole number from 1 to 4096"),
        ({"block_count": 3}, r"block_count is 3: the file has no tensors of block 2"),
        ({"block_count": "2"}, r"block_count is '2': must be a whole number"),
        ({"block_count": True}, "must be a whole number"),
        ({"attention__head_count": 0}, r"attention\.head_count is 0"),
        ({"attention__head_count": [4, 2]}, "differs between layers"),
        ({"attention__head_count": 3}, r"head_count is 3: does not divide the hidden size, 64, and .*key_length is"),
        ({"attention__head_count_kv": 3}, "does not divide the number of heads, 4"),
        ({"attention__head_count_kv": 8}, "from 1 to 4"),
        ({"attention__key_length": 15}, "must be even"),
        ({"attention__key_length": 2**20}, r"key_length is 1048576: makes more than 1048576 columns with 4 heads"),
        ({"attention__value_length": 2**19}, r"value_length is 524288: makes more than 1048576 columns"),
        ({"attention__value_length": 0}, r"attention\.value_length is 0"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be more than 0"),
        ({"attention__layer_norm_rms_epsilon": None}, "epsilon is missing"),
        ({"attention__sliding_window": -1}, "sliding_window is -1"),
        ({"context_length": 10**12}, "context_length is 1000000000000"),
        ({"embedding_length": -64}, "embedding_length is -64"),
        ({"expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"rope__freq_base": float("nan")}, r"rope\.freq_base is nan"),
        ({"rope__freq_base": float("inf")}, r"rope\.freq_base is inf"),
        ({"rope__freq_base": 0.0}, r"rope\.freq_base is 0\.0"),
        ({"rope__dimension_count": 18}, "from 2 to 16"),
        ({"rope__dimension_count": 7}, "must be even"),
        ({"rope__scaling__type": "spiral"}, r"rope\.scaling\.type is 'spiral': must be none, linear or yarn"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": -2.0}, r"rope\.scaling\.factor is -2\.0"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, r"rope_freqs\.weight is .*: must be 8 numbers"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, r"rope_freqs\.weight\[0\] is .*: must be more than 0"),
    ],
)
def test_gguf_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        from_gguf(**changes)


def test_gguf_without_embedding() -> None:
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight is missing"):
        from_gguf(shapes={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers is 2\.5"),
        ({"head_dim": 2**20}, "head_dim is 1048576: makes more than 1048576 columns with 4 heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 5}, "from 1 to 4"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': must be silu or swish"),
        ({"rope_scaling": [8.0]}, "rope_scaling is .*: must be an object"),
        ({"rope_scaling": {"type": "spiral"}}, r"rope_scaling\.rope_type is 'spiral': must be default"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, r"rope_scaling\.factor is '8': must be a number"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0}},
            "must be at least low_freq_factor",
        ),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "must be 8 numbers"),
        (
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings is 1: must be a whole number from 2",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "must rotate an even number"),
    ],
)
def test_hf_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        from_hf(**changes)


def test_hf_refuses_odd_layer_types() -> None:
    with pytest.raises(ModelLoadError, match=r"layer_types is .*: must be 2 strings"):
        from_hf("qwen3", use_sliding_window=True, layer_types=["full_attention"])
    with pytest.raises(ModelLoadError, match="layer_types is 'linear_attention'"):
        from_hf("qwen3", use_sliding_window=True, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention"):
        from_hf("gemma3", use_bidirectional_attention=True)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**6, 2**31, 2**63, -(2**63), 10**400]),
    st.floats(),
    st.sampled_from(["", "yarn", "linear", "longrope", "llama3", "none", "4"]),
    st.lists(st.floats(), max_size=9),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.sampled_from(["type", "factor", "rope_type", "rope_theta"]), st.floats(), max_size=3),
)
GGUF_KEYS = [
    *GGUF,
    *("expert_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.dimension_count", "attention.key_length", "attention.sliding_window", "rope.scale_linear"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope_freqs.weight", "rope_factors_long.weight"),
]
HF_KEYS = [
    *(*HF, "head_dim", "rope_scaling", "rope_parameters", "partial_rotary_factor", "hidden_act", "model_type"),
    *("use_sliding_window", "sliding_window", "layer_types", "max_window_layers", "text_config"),
    *("original_max_position_embeddings", "query_pre_attn_scalar", "final_logit_softcapping"),
]
ROPE_KEYS = ["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale"]
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["yarn", "linear", "longrope", "llama3", "dynamic"])},
    optional=dict.fromkeys(ROPE_KEYS, ODD),
)


@given(st.sampled_from(["llama", "qwen3", "gemma3"]), st.dictionaries(st.sampled_from(GGUF_KEYS), ODD, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_gguf_metadata_is_read_or_refused(architecture: str, changes: dict[str, Any]) -> None:
    with contextlib.suppress(ModelLoadError):
        config = from_gguf(architecture, **changes)
        assert np.isfinite(config.rope.params.frequencies).all()


@given(
    st.sampled_from(["llama", "qwen2", "gemma3"]),
    st.dictionaries(st.sampled_from(HF_KEYS), ODD, max_size=4),
    st.one_of(st.none(), ROPE),
)
@settings(max_examples=300, deadline=None)
def test_any_hf_config_is_read_or_refused(
    architecture: str, changes: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    with contextlib.suppress(ModelLoadError):
        config = from_hf(architecture, **(changes if scaling is None else {**changes, "rope_scaling": scaling}))
        assert np.isfinite(config.rope.params.frequencies).all()


def test_the_length_under_its_older_key() -> None:
    """Files of Llama 1 say max_sequence_length. The newer key wins, as in transformers."""
    config = from_hf(max_position_embeddings=..., max_sequence_length=2048)
    assert config.max_position_embeddings == 2048
    assert from_hf(max_sequence_length=2048).max_position_embeddings == 4096
    with pytest.raises(ModelLoadError, match="max_position_embeddings is missing"):
        from_hf(max_position_embeddings=...)
