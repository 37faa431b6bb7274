"""Reading of adapters: parts, scales and digests, and refusals by the name of the key or the tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from octavo.adapters.adapter import AdapterBase
from octavo.adapters.description import describe_adapter
from octavo.adapters.read import read_adapter
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import LowRank
from octavo.graph.values import Part
from octavo.models import load_architecture
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight
from tests.support.tiny_models import config_values, tiny_graph

RNG = np.random.default_rng(0)
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = RNG.standard_normal((2, 64)).astype(np.float32), RNG.standard_normal((64, 2)).astype(np.float32)
FACTORS = {f"{MODULE}.lora_A.weight": A, f"{MODULE}.lora_B.weight": B}


@pytest.fixture(scope="module")
def base() -> AdapterBase:
    """A tiny Llama."""
    graph, _ = tiny_graph("llama")
    config = load_architecture("llama").Config.from_hf(ConfigReader(config_values("llama")))
    return AdapterBase.of("llama", config, graph, {})


def save(folder: Path, tensors: dict[str, NDArray[np.float32]] = FACTORS, **settings: object) -> Path:
    """A PEFT folder."""
    folder.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def save_gguf(
    path: Path, tensors: dict[str, NDArray[np.float32]], alpha: float | None = 3.0, kind: str = "adapter"
) -> Path:
    """A GGUF adapter as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", kind)
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_both_formats_mean_the_same(base: AdapterBase, tmp_path: Path) -> None:
    """A GGUF file has B's rows in the order of the file's weight: pairs of a rotation side by side."""
    plain = read_adapter(save(tmp_path / "sql"), base)
    rows = np.arange(64).reshape(4, 2, 8).swapaxes(1, 2).reshape(-1)
    tensors = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B[rows]}
    converted = read_adapter(save_gguf(tmp_path / "sql.gguf", tensors), base)
    [(name, part)] = plain.parts.items()
    assert (name, part.scale, plain.name, plain.rank) == ("layers.0.self_attn.q_proj.weight", 1.5, "sql", 2)
    np.testing.assert_array_equal(part.b, B)
    assert plain.digest == converted.digest
    assert plain.nbytes == 6 * (A.size + B.size)


def test_the_digest_names_the_content(base: AdapterBase, tmp_path: Path) -> None:
    """Not the name and not the place, but every number and the scale; without effect it is empty."""
    first = read_adapter(save(tmp_path / "a"), base)
    assert first.digest == read_adapter(save(tmp_path / "b"), base, "other").digest
    changed = {**FACTORS, f"{MODULE}.lora_B.weight": B + np.float32(1e-3)}
    digests = {
        first.digest,
        read_adapter(save(tmp_path / "c", changed), base).digest,
        read_adapter(save(tmp_path / "d", lora_alpha=4), base).digest,
        read_adapter(tmp_path / "a", base, scale=0.5).digest,
    }
    assert len(digests) == 4
    for nothing in (
        read_adapter(tmp_path / "a", base, scale=0.0),
        read_adapter(save(tmp_path / "e", lora_alpha=0), base),
    ):
        assert (nothing.digest, nothing.parts) == (b"", {})


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.5),
        ({"use_rslora": True}, 3 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 5}}, 2.5),
        ({"alpha_pattern": {"proj": 5}}, 1.5),
        ({"rank_pattern": {r"layers\.0\..*": 8}, "r": 2}, 0.375),
        ({"lora_alpha": 0.5}, 0.25),
        ({"alpha_pattern": {"^q_proj": 5}}, 1.5),
        ({"alpha_pattern": {r"^model.*\.(q|k)_proj$": 5}}, 2.5),
        ({"alpha_pattern": {"(?:k|v)_proj": 5, r"[a-z]+_proj": 6}}, 3.0),
        # Each takes years with an engine that backtracks.
        ({"alpha_pattern": {"(([a-z0-9_.])+)+!": 5}}, 1.5),
        ({"rank_pattern": {"(m|m|model.*)*(.*)*(.|.|.|[^!])*!": 8}}, 1.5),
    ],
)
def test_scales(settings: dict[str, object], scale: float, base: AdapterBase, tmp_path: Path) -> None:
    """Patterns match the end of a module's name, from a dot on."""
    [part] = read_adapter(save(tmp_path / "a", **settings), base).parts.values()
    assert part.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA is supported"),
        ({"use_dora": True}, "q_proj.lora_A.weight' comes without a lora_magnitude_vector"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        (
            {"alora_invocation_tokens": [-1]},
            r"alora_invocation_tokens is \[-1\]; it must be a list of at most 1024 token",
        ),
        ({"target_parameters": "experts"}, "target_parameters is 'experts'; it must be a list of names"),
        (
            {"target_parameters": ["experts.down_proj_bias"]},
            r"has 'experts.down_proj_bias', but no adapter can change it",
        ),
        ({"alora_invocation_tokens": [1] * 1025}, "it must be a list of at most 1024 token ids"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'; it must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"r": 0}, "r is 0; it must be a number from 1 on"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is not a regular expression"),
        ({"rank_pattern": {"(?!k)q_proj": 2}}, "not a regular expression, or has look-around"),
        ({"rank_pattern": {"^q_proj|k_proj": 2}}, "anchors inside; write the names of modules"),
        ({"rank_pattern": {"q*" * 300: 2}}, "has 600 characters, at most 512"),
        ({"rank_pattern": {"((.{1,30}){1,30}){1,30}!": 2}}, "is too complex; write the names of modules"),
        ({"alpha_pattern": {f"{i}.*": 2 for i in range(65)}}, "65 patterns, 65 of them with more than names and dots"),
        ({"alpha_pattern": ["q_proj"]}, "it must be an object of numbers by pattern"),
    ],
)
def test_refused_settings(settings: dict[str, object], message: str, base: AdapterBase, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_adapter(save(tmp_path / "a", **settings), base)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{MODULE}.lora_A.weight": A}, "q_proj.lora_A.weight' comes without its other factor"),
        (
            {**FACTORS, f"{MODULE}.lora_magnitude_vector": B[:5, 0].copy()},
            r"q_proj.lora_magnitude_vector' is \[5\]; it must be \[64\], of finite numbers",
        ),
        ({**FACTORS, f"{MODULE}.lora_B.bias": B[:, 0].copy()}, r"q_proj.lora_B.bias' is not supported: biases"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": A},
            "lora_embedding_A' comes without its other factor",
        ),
        ({f"{MODULE}.weight": A}, r"q_proj.weight' is not supported: a whole weight \(modules_to_save\)"),
        ({**FACTORS, "base_model.model.odd": A}, "odd' is not a low-rank factor of a weight"),
        (
            {name.replace("self_attn.q_proj", "mlp.experts.3.up_proj"): array for name, array in FACTORS.items()},
            r"experts.3.up_proj.lora_A.weight' belongs to .*, where this model takes no low-rank product",
        ),
        ({f"{MODULE}.lora_A.weight": A, f"{MODULE}.lora_B.weight": B[:, :1].copy()}, r"\[2, 64\] and \[64, 1\] do not"),
        ({f"{MODULE}.lora_A.weight": A, f"{MODULE}.lora_B.weight": B * np.inf}, "is not finite"),
        ({f"{MODULE}.lora_A.weight": A[:0], f"{MODULE}.lora_B.weight": B[:, :0].copy()}, r"\[0, 64\] and \[64, 0\]"),
        ({f"{MODULE}.lora_A.weight": A[:, :32].copy(), f"{MODULE}.lora_B.weight": B}, r"is \[64, 64\]"),
        (
            {name.replace("q_proj", "x_proj"): array for name, array in FACTORS.items()},
            "x_proj.lora_A.weight' belongs to layers.0.self_attn.x_proj.weight, where this",
        ),
        (
            {name.replace("self_attn.q_proj", "input_layernorm"): array for name, array in FACTORS.items()},
            "input_layernorm",
        ),
    ],
)
def test_refused_tensors(
    tensors: dict[str, NDArray[np.float32]], message: str, base: AdapterBase, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_adapter(save(tmp_path / "a", tensors), base)


def test_a_saved_head_is_no_copy_of_the_base(base: AdapterBase, tmp_path: Path) -> None:
    """Where the head is saved, a weight of its shape is another head; elsewhere it is the base's own."""
    head = RNG.standard_normal((base.config.vocab_size, base.config.hidden_size)).astype(np.float32)
    tensors = {**FACTORS, "base_model.model.lm_head.weight": head}
    assert len(read_adapter(save(tmp_path / "a", tensors), base).parts) == 1
    parts = read_adapter(save(tmp_path / "b", tensors, modules_to_save=["lm_head"]), base, scale=0.25).parts
    np.testing.assert_array_equal(parts["lm_head.weight"].merged(np.ones_like(head)), 0.75 + 0.25 * head)
    assert len(read_adapter(save(tmp_path / "b", tensors, modules_to_save=["embed_tokens"]), base).parts) == 1


def test_whole_weights_that_fit_nothing(base: AdapterBase, tmp_path: Path) -> None:
    """Of layers, and of a vocabulary that grew."""
    grown = np.ones((base.config.vocab_size + 4, base.config.hidden_size), np.float32)
    for name, array, message in (
        ("model.layers.0.self_attn.q_proj", A, r"q_proj.weight' is not supported: a whole weight \(modules_to_save\)"),
        (
            "lm_head",
            grown,
            r"lm_head.weight' is \[100, 64\].*with added tokens needs a model that was resized for them",
        ),
        ("model.embed_tokens", grown, r"embed_tokens.weight' is \[64, 100\].*with added tokens"),
        ("lm_head", grown * np.inf, "lm_head.weight' has numbers that are not finite"),
    ):
        tensors = {**FACTORS, f"base_model.model.{name}.weight": array}
        with pytest.raises(ModelLoadError, match=message):
            read_adapter(save(tmp_path / "a", tensors, modules_to_save=["q_proj", "lm_head", "embed_tokens"]), base)


def test_half_the_effect_of_magnitudes(base: AdapterBase, tmp_path: Path) -> None:
    """A scale multiplies the change of the weight, W' - W."""
    weight = RNG.standard_normal((64, 64)).astype(np.float32)
    base = replace(base, weights={"layers.0.self_attn.q_proj.weight": DenseWeight(weight)})
    magnitudes = RNG.uniform(1, 2, 64).astype(np.float32)
    folder = save(tmp_path / "a", {**FACTORS, f"{MODULE}.lora_magnitude_vector": magnitudes}, use_dora=True)
    direction = weight + 1.5 * B @ A
    changed = magnitudes[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    for scale in (1.0, 0.5):
        [part] = read_adapter(folder, base, scale=scale).parts.values()
        np.testing.assert_allclose(part.merged(weight), weight + scale * (changed - weight), atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"lora_bias": True}, {"alora_invocation_tokens": [5, 6], "use_rslora": True}])
def test_descriptions(settings: dict[str, object], tmp_path: Path) -> None:
    """Of both formats, without a model; what no model takes says so."""
    folder = save(tmp_path / "sql", base_model_name_or_path="org/base", **settings)
    found = describe_adapter(folder)
    assert found == describe_adapter(folder / "adapter_config.json")
    assert found is not None
    assert (found.format, found.base, found.ranks, found.modules) == ("peft", "org/base", {2: 1}, {"q_proj": 1})
    assert (found.alpha, found.num_parameters, found.use_rslora) == (3.0, 256, "use_rslora" in settings)
    assert found.file_bytes == sum(each.stat().st_size for each in folder.iterdir())
    assert found.invocation_tokens == settings.get("alora_invocation_tokens", [])
    assert (found.problem is not None and "lora_bias" in found.problem) == ("lora_bias" in settings)
    tensors = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B}
    converted = describe_adapter(save_gguf(tmp_path / "sql.gguf", tensors))
    assert converted is not None
    assert (converted.format, converted.ranks, converted.modules, converted.alpha) == ("gguf", {2: 1}, {"attn_q": 1}, 3)
    unscaled = describe_adapter(save_gguf(tmp_path / "unscaled.gguf", tensors, alpha=None))
    assert unscaled is not None
    assert "adapter.lora.alpha is None; it must be a number" in str(unscaled.problem)
    assert describe_adapter(tmp_path) is None
    assert describe_adapter(save_gguf(tmp_path / "model.gguf", {}, kind="model")) is None


def test_descriptions_agree_with_reading(tmp_path: Path) -> None:
    tensors = {**FACTORS, "base_model.model.lm_head.weight": RNG.standard_normal((8, 4), np.float32)}
    plain, copied = (describe_adapter(save(tmp_path / "a", each)) for each in (FACTORS, tensors))
    assert plain is not None
    assert copied is not None
    assert (copied.problem, copied.num_parameters) == (None, plain.num_parameters)
    unscaled = describe_adapter(save(tmp_path / "a", lora_alpha="much"))
    assert unscaled is not None
    assert "lora_alpha is 'much'; it must be a number" in str(unscaled.problem)
    tensors["base_model.model.model.norm.weight"] = A[0]
    saved = describe_adapter(save(tmp_path / "a", tensors, modules_to_save=["lm_head", "norm"]))
    assert saved is not None
    assert "norm.weight' is not supported: a whole weight (modules_to_save)" in str(saved.problem)


def test_a_pickle_is_not_described(tmp_path: Path) -> None:
    (save(tmp_path / "a") / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model.bin is a pickle.*Save the adapter as safetensors"):
        describe_adapter(tmp_path / "a")


def test_refused_files(base: AdapterBase, tmp_path: Path) -> None:
    """A model is no adapter, and a pickle is never opened."""
    pair = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B}
    for message, path in {
        "not a LoRA adapter": save_gguf(tmp_path / "model.gguf", pair, kind="model"),
        "alpha is None": save_gguf(tmp_path / "alpha.gguf", pair, alpha=None),
        "comes without blk.0.attn_q.weight.lora_b": save_gguf(tmp_path / "half.gguf", dict([*pair.items()][:1])),
        r"\[64\] and \[64, 2\] do not fit": save_gguf(
            tmp_path / "row.gguf", {**pair, "blk.0.attn_q.weight.lora_a": A[0]}
        ),
        "not a low-rank part": save_gguf(tmp_path / "odd.gguf", {"blk.0.attn_q.weight": A}),
        "no such file": tmp_path / "nowhere",
        "not an adapter; a folder needs": tmp_path,
    }.items():
        with pytest.raises(ModelLoadError, match=message):
            read_adapter(path, base)
    folder = save(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.bin is a pickle"):
        read_adapter(folder, base)


@pytest.mark.parametrize("part", [Part(0, 16, 48), Part(1, 0, 32)])
def test_beside_a_part(part: Part) -> None:
    """The product beside a rank's part of a weight is that part of the whole product."""
    whole = LowRank(A, B, 2.0)
    cut = whole.beside(part)
    index = slice(part.begin, part.end)
    product = B @ A
    np.testing.assert_allclose(cut.b @ cut.a, product[index] if part.dimension == 0 else product[:, index], rtol=1e-5)
    assert cut.shape == (cut.b @ cut.a).shape


def test_activated_adapters(base: AdapterBase, tmp_path: Path) -> None:
    """They act from the last invocation on, and not without one."""
    adapter = read_adapter(save(tmp_path / "a", alora_invocation_tokens=[7, 8]), base)
    assert adapter.invocation_tokens == (7, 8)
    assert adapter.digest != read_adapter(save(tmp_path / "b"), base).digest
    assert [adapter.start_in(ids) for ids in ([7, 8, 1, 7, 8, 2], [7, 8], [8, 7], [7], [])] == [3, 0, None, None, None]
    assert read_adapter(tmp_path / "b", base).start_in([1, 2]) == 0
