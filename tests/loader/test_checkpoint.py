"""Opening a model: names, configuration and weights of both formats, and errors that name the file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import GraphError, ModelLoadError
from octavo.loader.checkpoint import Checkpoint, open_checkpoint, warn_unused_weights
from octavo.models import build_graph
from octavo.tokenizer import load_tokenizer
from tests.support.gguf_writer import Tensor, Value, gguf, key, write_split
from tests.support.limits import bounded
from tests.support.safetensors_writer import safetensors
from tests.support.tiny_gguf import HIDDEN, VOCABULARY, WIDTH, tiny_gguf, tiny_keys, tiny_tensors

NAMES = {
    "embed_tokens.weight": (VOCABULARY, WIDTH),
    "norm.weight": (WIDTH,),
    "layers.0.input_layernorm.weight": (WIDTH,),
    "layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
    "layers.0.self_attn.k_proj.weight": (WIDTH // 2, WIDTH),
    "layers.0.self_attn.v_proj.weight": (WIDTH // 2, WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
    "layers.0.post_attention_layernorm.weight": (WIDTH,),
    "layers.0.mlp.gate_proj.weight": (HIDDEN, WIDTH),
    "layers.0.mlp.up_proj.weight": (HIDDEN, WIDTH),
    "layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def write_directory(tmp_path: Path, config: object = CONFIG, prefix: str = "model.") -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = safetensors({prefix + name: np.full(shape, 0x3F80, np.uint16) for name, shape in NAMES.items()})
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def check_graph(checkpoint: Checkpoint) -> None:
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    assert {parameter.name for parameter in graph.parameters} == set(checkpoint.weights)


def test_gguf(tmp_path: Path) -> None:
    path = write(tmp_path, tiny_gguf())
    checkpoint = open_checkpoint(path)
    assert (checkpoint.path, checkpoint.format) == (path, "gguf")
    assert checkpoint.architecture == "llama"
    assert checkpoint.config.num_layers == 1
    assert checkpoint.file.metadata["tokenizer.ggml.eos_token_id"] == 1
    assert {name: checkpoint.weights[name].shape for name in checkpoint.weights} == NAMES
    assert checkpoint.weights["layers.0.mlp.up_proj.weight"].type_name == "Q8_0"
    assert "lm_head.weight" not in checkpoint.weights
    assert checkpoint.weights.get("lm_head.weight") is None
    check_graph(checkpoint)
    checkpoint.weights.release("embed_tokens.weight")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ModelLoadError, match="the model is closed"):
        checkpoint.weights["norm.weight"]


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    assert open_checkpoint(write(tmp_path, tiny_gguf()).parent).path == tmp_path / "model.gguf"


def test_directory_with_a_split_gguf(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    parts = write_split(tmp_path, "m", tiny_keys(), [tensors[:5], tensors[5:]])
    assert open_checkpoint(tmp_path).path == parts[0]
    assert {**open_checkpoint(parts[1]).weights.shapes} == NAMES


def test_gguf_without_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "sha256-0123"
    path.write_bytes(tiny_gguf())
    assert open_checkpoint(path).format == "gguf"


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_safetensors(prefix: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_directory(tmp_path, prefix=prefix))
    assert (checkpoint.format, checkpoint.path) == ("safetensors", tmp_path / "model.safetensors")
    assert checkpoint.file.metadata == {}
    assert {name: checkpoint.weights[name].shape for name in checkpoint.weights} == NAMES
    assert checkpoint.weights["norm.weight"].type_name == "BF16"
    check_graph(checkpoint)
    checkpoint.weights.release("embed_tokens.weight")
    checkpoint.close()


def test_rotary_factors_reach_the_configuration(tmp_path: Path) -> None:
    plain = open_checkpoint(write(tmp_path, tiny_gguf())).config
    factors = np.array([1, 2, 4, 8], np.float32)
    tensors = [*tiny_tensors(), Tensor("rope_freqs.weight", "F32", (4,), factors.tobytes())]
    scaled = open_checkpoint(write(tmp_path, tiny_gguf(tensors=tensors)))
    assert "rope_freqs.weight" not in scaled.weights
    np.testing.assert_allclose(scaled.config.rope.params.frequencies, plain.rope.params.frequencies / factors)


@pytest.mark.parametrize(
    "tensor", [Tensor("rope_freqs.weight", "F32", (2, 4)), Tensor("rope_freqs.weight", "F32", (1 << 13,))]
)
def test_rotary_factors_of_a_wrong_shape(tensor: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"offset \d+: tensor 'rope_freqs.weight' has the shape"):
        open_checkpoint(write(tmp_path, tiny_gguf(tensors=[*tiny_tensors(), tensor])))


# Well-formed metadata with invalid values. None: the key is missing.
SENSELESS: dict[str, tuple[dict[str, Value | None], str]] = {
    "no architecture": ({"general.architecture": None}, "general.architecture is missing"),
    "numeric architecture": ({"general.architecture": 7}, "general.architecture is 7"),
    "empty architecture": ({"general.architecture": ""}, "architecture '' is not supported"),
    "long architecture": ({"general.architecture": "x" * 1_000_000}, "architecture 'xxx"),
    "longer architecture": (
        {"general.architecture": "x" * 10_000_000},
        "offset 56: the value of 'general.architecture'",
    ),
    "unknown architecture": ({"general.architecture": "lama"}, "'lama' is not supported; the nearest .*: llama"),
    "traversal": ({"general.architecture": "../models"}, "'../models' is not supported"),
    "private module": ({"general.architecture": "_decoder"}, "'_decoder' is not supported"),
    "no layers": ({"llama.block_count": None}, "llama.block_count"),
    "zero layers": ({"llama.block_count": 0}, "llama.block_count"),
    "negative layers": ({"llama.block_count": -1}, "llama.block_count"),
    "a million layers": ({"llama.block_count": 1_000_000}, "llama.block_count"),
    "layers as text": ({"llama.block_count": "1"}, "llama.block_count"),
    "zero heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
    "heads not dividing": ({"llama.attention.head_count": 5}, "head_count|heads"),
    "more key heads than heads": ({"llama.attention.head_count_kv": 8}, "head_count"),
    "key heads not dividing": ({"llama.attention.head_count_kv": 3}, "head_count"),
    "rope base NaN": ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base"),
    "rope base 0": ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base"),
    "epsilon infinite": ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "rms_epsilon"),
    "context of 10^12": ({"llama.context_length": 10**12}, "llama.context_length"),
    "no width": ({"llama.embedding_length": None}, "llama.embedding_length"),
    "width as list": ({"llama.embedding_length": ["32"]}, "llama.embedding_length"),
    "token types as text": (
        {"tokenizer.ggml.token_type": ["1"] * VOCABULARY},
        "tokenizer.ggml.token_type is .*it must be a list of numbers",
    ),
    "too many token types": (
        {"tokenizer.ggml.token_type": np.ones(9, np.int32)},
        "token_type has 9 entries, the vocabulary 8 tokens",
    ),
    "merges without their token": (
        {"tokenizer.ggml.merges": ["a b", "b c"]},
        "tokenizer.ggml.merges: entry 1, 'b c': 'bc' is not in the vocabulary",
    ),
    "merges as a number": ({"tokenizer.ggml.merges": 5}, "tokenizer.ggml.merges is 5 .*it must be a list of strings"),
    "no tokens": ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is empty"),
    "tokens as text": ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is 'abc'"),
    "one token more than rows": (
        {
            "tokenizer.ggml.tokens": [*"abcdefghi"],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.scores": None,
            "tokenizer.ggml.token_type": None,
        },
        "the embedding has 8 rows and the output 9, but the vocabulary has 9 tokens",
    ),
    "EOT as text": ({"tokenizer.ggml.eot_token_id": "x"}, "tokenizer.ggml.eot_token_id is 'x'"),
    "template of 50 MB": ({"tokenizer.chat_template": "x" * 50_000_000}, "the value of 'tokenizer.chat_template' has"),
    "template as number": ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is 7 .*; it must be a string"),
}


@pytest.mark.parametrize("case", SENSELESS)
def test_senseless_metadata(case: str, tmp_path: Path) -> None:
    changes, reason = SENSELESS[case]
    path = write(tmp_path, tiny_gguf(changes))
    with bounded(), pytest.raises(ModelLoadError, match=reason) as raised:
        load_tokenizer(open_checkpoint(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert len(str(raised.value)) < len(str(path)) + 400


def replaced(name: str, *tensors: Tensor) -> list[Tensor]:
    return [*(t for t in tiny_tensors() if t.name != name), *tensors]


def test_output_smaller_than_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path, tiny_gguf(tensors=[*tiny_tensors(), Tensor("output.weight", "F32", (4, WIDTH))]))
    with pytest.raises(
        ModelLoadError, match="the embedding has 8 rows and the output 4, but the vocabulary has 8 tokens"
    ):
        load_tokenizer(open_checkpoint(path))


def test_quantized_norm(tmp_path: Path) -> None:
    path = write(
        tmp_path, tiny_gguf(tensors=replaced("output_norm.weight", Tensor("output_norm.weight", "Q8_0", (32,))))
    )
    with pytest.raises(ModelLoadError, match=r"offset \d+: tensor 'output_norm.weight' .* has type Q8_0"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (replaced("blk.0.attn_k.weight"), r"layers.0.self_attn.k_proj.weight"),
        (replaced("blk.0.ffn_up.weight", Tensor("blk.0.ffn_up.weight", "F32", (48, WIDTH))), r"layers.0"),
        (replaced("output_norm.weight"), r"norm.weight"),
    ],
)
def test_weight_missing_or_of_wrong_shape(tensors: list[Tensor], reason: str, tmp_path: Path) -> None:
    """The graph knows what it needs, and names it."""
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(tensors=tensors)))
    with pytest.raises(GraphError, match=reason):
        build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)


def test_extra_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = [Tensor("blk.0.wonder.weight", "F32", (8,)), Tensor("blk.7.attn_q.weight", "F32", (8, 8))]
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(tensors=[*tiny_tensors(), *extra])))
    assert "1 tensors are not used: blk.0.wonder.weight" in caplog.text
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    warn_unused_weights(checkpoint, {parameter.name for parameter in graph.parameters})
    assert "1 tensors are not used: layers.7.self_attn.q_proj.weight" in caplog.text


def test_infinite_scales_load(tmp_path: Path) -> None:
    """The loader does not inspect the values of weights; a row of NaN logits ends only its own request."""
    blocks = np.full((VOCABULARY, 34), 255, np.uint8).tobytes()
    tensor = Tensor("token_embd.weight", "Q8_0", (VOCABULARY, WIDTH), blocks)
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(tensors=replaced("token_embd.weight", tensor))))
    assert np.isnan(checkpoint.weights["embed_tokens.weight"].dequantize()).all()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            CONFIG | {"model_type": "lamma"},
            "architecture 'lamma' is not supported; the nearest supported ones: llama",
        ),
        (CONFIG | {"model_type": None}, r"model_type is missing; it must name an architecture from docs/models\.md"),
        (CONFIG | {"num_attention_heads": 7}, "num_attention_heads is 7: does not divide the hidden size, .* head_dim"),
        (CONFIG | {"model_type": "../x"}, "'../x' is not supported"),
        (CONFIG | {"vocab_size": 0}, "vocab_size"),
        (CONFIG | {"vocab_size": -5}, "vocab_size"),
        (CONFIG | {"hidden_size": "32"}, "hidden_size"),
        (CONFIG | {"num_key_value_heads": 0}, "num_key_value_heads"),
        (CONFIG | {"num_key_value_heads": 8}, "num_key_value_heads|heads"),
        (CONFIG | {"max_position_embeddings": 10**12}, "max_position_embeddings"),
        (CONFIG | {"rope_scaling": {"rope_type": "odd"}}, "rope_type"),
        (CONFIG | {"rope_scaling": 7}, "rope_scaling"),
        (CONFIG | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (
            CONFIG | {"quantization_config": {"quant_method": "gptq", "group_size": -7}},
            "quantization_config.bits is missing; supported: 2, 3, 4, 8",
        ),
        (CONFIG | {"quantization_config": "odd"}, "quantization_config is 'odd': must be an object"),
        (
            CONFIG | {"quantization_config": {"quant_method": "odd"}},
            "quantization_config.quant_method is 'odd': is not supported; supported are awq, .*gptq.*; use",
        ),
        ([CONFIG], "a JSON object is needed, not list"),
    ],
)
def test_senseless_config(config: object, reason: str, tmp_path: Path) -> None:
    """Errors about wrong types, absurd sizes and unknown architectures name file and key."""
    with bounded(), pytest.raises(ModelLoadError, match=reason) as raised:
        open_checkpoint(write_directory(tmp_path, config))
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "offset 0: the file is empty"),
        (b"{" * 100_000, "offset"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply|a JSON object is needed"),
        (b'{"model_type": "llama"', "offset 22: not valid JSON"),
        (b'{"a": "\xff"}', "offset 7: not UTF-8"),
        (b'{"model_type": 1, "model_type": 2}', "key 'model_type' appears twice"),
        (b'{"hidden_size": NaN}', "NaN is not valid JSON"),
        (b'{"hidden_size": -Infinity}', "-Infinity is not valid JSON"),
        (b'{"model_type": "llama", "num_hidden_layers": Infinity}', "num_hidden_layers is inf: must be a whole number"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "offset 0: .*digits"),
    ],
)
def test_broken_config(content: bytes, reason: str, tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with bounded(), pytest.raises(ModelLoadError, match=reason) as raised:
        open_checkpoint(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_huge_config(tmp_path: Path) -> None:
    write_directory(tmp_path)
    os.truncate(tmp_path / "config.json", 1 << 30)
    with bounded(), pytest.raises(ModelLoadError, match="1073741824 bytes, the limit for this file is 1048576"):
        open_checkpoint(tmp_path)


def test_model_code_is_never_run(tmp_path: Path) -> None:
    """`auto_map` names Python code in the model directory. It is ignored for known and unknown architectures."""
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('was imported')")
    directory = write_directory(tmp_path, CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}})
    before = set(sys.modules)
    assert open_checkpoint(directory).architecture == "llama"
    write_directory(tmp_path, {"model_type": "evil", "auto_map": {"AutoConfig": "modeling_evil.Config"}})
    with pytest.raises(ModelLoadError, match="architecture 'evil' is not supported"):
        open_checkpoint(directory)
    assert not [name for name in set(sys.modules) - before if "evil" in name]


def test_pickle_checkpoints(tmp_path: Path) -> None:
    """Pickle files are refused without being read."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ModelLoadError, match="pickle checkpoints are not supported"):
            open_checkpoint(path)


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model; a .gguf or .safetensors file is needed"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelLoadError, match=r"no model; a .gguf or .safetensors file is needed"):
        open_checkpoint(tmp_path / "notes.txt")
    write_directory(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config.json: no such file"):
        open_checkpoint(tmp_path)


def test_several_models(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gguf([key("general.architecture", "llama")]))
    with pytest.raises(ModelLoadError, match=r"2 models; name one of them: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains the operating system's message."""
    write(tmp_path, tiny_gguf())

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ModelLoadError, match=r"model.gguf: Input/output error"):
        open_checkpoint(tmp_path)
