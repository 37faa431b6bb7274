"""Safetensors checkpoints as GGUF files: the same logits, tokens, template and sampling, and what is refused."""

from __future__ import annotations

import json
import pkgutil
import sys
import unicodedata
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.cli.quantize import convert, quantize
from octavo.compress import forms
from octavo.compress.forms import gguf_form, hf_form
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.generation_config import sampling_defaults
from octavo.loader.gguf import open_gguf
from octavo.loader.transforms import restored
from octavo.models import known_architectures, load_architecture, weight_table
from octavo.models._weights import Heads, HeadSums, OneRow, Ones, Permute, Split, TokenShares, Transpose
from octavo.tokenizer import load_tokenizer
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support import converted_gguf
from tests.support.directory_tokenizers import KINDS, TEMPLATE, save_tokenizer
from tests.support.tiny_models import expected_logits, tiny_model
from tests.support.vocabularies import VALID_STRINGS

# Tiny models with the tokenizers of their families.
CASES = {
    "llama": "llama3",
    "llama-tied-biased": "smollm",
    "llama-llama3-rope": "llama3",
    "llama-yarn": "llama2",
    "llama-linear": "llama2",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "smollm3": "gpt-2",
    "gemma3": "gemma",
    "gemma3-softcap": "gemma",
    "mistral-window": "llama2",
    "ministral3": "llama2",
    "mixtral": "llama2",
    "qwen2moe": "qwen2",
    "qwen3moe": "qwen2",
    "phi3": "llama2",
    "phi3-longrope": "llama2",
    "gemma": "gemma",
    "gemma2": "gemma",
    "granite": "gpt-2",
    "olmo2": "gpt-2",
    "olmo3": "gpt-2",
    "stablelm": "gpt-2",
    "stablelm-parallel": "gpt-2",
    "stablelm-qk-norm": "gpt-2",
    "starcoder2": "gpt-2",
    "gpt2": "gpt-2",
    "seed-oss": "qwen2",
    "arcee": "llama3",
    "bitnet": "llama3",
    "bitnet-silu": "llama3",
    "ernie4-5": "llama2",
    "ernie4-5-moe": "llama2",
    "hunyuan-dense-alpha": "qwen2",
    "hunyuan-moe": "qwen2",
    "minimax-m2": "qwen2",
    "olmoe-clipped": "gpt-2",
    "granitemoe": "gpt-2",
    "granitemoe-shared": "gpt-2",
    "dots1": "qwen2",
    "glm4moe": "qwen2",
    "glm4moe-groups": "qwen2",
    "cohere-normed": "gpt-2",
    "glm": "qwen2",
    "exaone": "gpt-2",
    "internlm3": "llama2",
    "olmo": "gpt-2",
    "olmo-clipped": "gpt-2",
    "bailingmoe2": "qwen2",
    "gpt-bigcode": "gpt-2",
    "nemotron": "llama2",
    "cohere2": "gpt-2",
    "exaone4": "gpt-2",
    "exaone4-window": "gpt-2",
    "jamba": "gpt-2",
    "jamba-dense": "gpt-2",
    "mamba": "gpt-2",
    "mamba-biased": "gpt-2",
    "falcon-mamba": "gpt-2",
    "mamba2": "gpt-2",
    "mamba2-biased": "gpt-2",
    "nemotron-h": "gpt-2",
    "nemotron-h-moe": "gpt-2",
    "nemotron-h-latent": "gpt-2",
    "phi": "gpt-2",
    "gpt-neox": "gpt-2",
    "gpt-neox-sequential": "gpt-2",
    "falcon": "gpt-2",
    "falcon-grouped": "gpt-2",
    "falcon-one-norm": "gpt-2",
    "bloom": "gpt-2",
    "mpt-clipped": "gpt-2",
    "glm4": "qwen2",
    "gpt-oss": "gpt-2",
    "deepseek2": "qwen2",
    "deepseek2-groups": "qwen2",
    "deepseek3": "qwen2",
    "glm4moe-lite": "qwen2",
    "granitehybrid": "gpt-2",
    "granitehybrid-dense": "gpt-2",
    "granitehybrid-groups": "gpt-2",
    "granitehybrid-rope": "gpt-2",
    "qwen3next": "qwen2",
    "llama4": "qwen2",
    "gemma3n": "gemma",
    "qwen35": "qwen2",
    "qwen35moe": "qwen2",
    "gemma4": "gemma",
    "gemma4-few-keys": "gemma",
    "gemma4-experts": "gemma",
    "lfm2": "gpt-2",
    "lfm2moe": "gpt-2",
    "falcon-h1": "gpt-2",
    "falcon-h1-normed": "gpt-2",
    "minicpm3": "llama2",
    "phimoe": "llama2",
    "apertus": "gpt-2",
    "apertus-biased": "gpt-2",
    "glm-dsa": "qwen2",
    "mimo-v2-flash": "qwen2",
    "step35": "qwen2",
}
_WITH_A_WAY_BACK = Permute | Split | OneRow | Ones | Transpose | Heads | HeadSums | TokenShares
UNUSED_ROWS = 3
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


def save(name: str, directory: Path, kind: str | None = None, dtype: torch.dtype = torch.float32) -> Path:
    directory.mkdir(exist_ok=True)
    num_tokens = save_tokenizer(kind or CASES[name], directory)
    model = tiny_model(name, vocab_size=num_tokens + UNUSED_ROWS).to(dtype)
    model.save_pretrained(directory, max_shard_size="100KB" if name == "qwen3" else "1GB")
    assert (directory / "model.safetensors.index.json").exists() == (name == "qwen3")
    (directory / "generation_config.json").write_text(json.dumps(SAMPLING))
    return directory


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(convert, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


@pytest.mark.parametrize("name", CASES)
def test_both_files_have_the_same_logits_and_the_judges_tensors(name: str, tmp_path: Path) -> None:
    source, path = save(name, tmp_path / "model"), tmp_path / "m.gguf"
    code, _, error = run(source, path, "--to", "gguf")
    assert code == 0, error
    with closing(open_checkpoint(source)) as before, closing(open_checkpoint(path)) as after:
        logits = logits_of(after)
        np.testing.assert_allclose(logits, logits_of(before), rtol=0, atol=1e-5 * np.abs(logits).max())
        assert_close(logits, expected_logits(tiny_model(name, vocab_size=logits.shape[1]), TOKENS))
    # The judge has the names of the gguf package, and permutes and folds by itself.
    judge = gguf.GGUFReader(
        converted_gguf.save_gguf(tiny_model(name, vocab_size=logits.shape[1]), tmp_path / "judge.gguf")
    )
    found = gguf.GGUFReader(path)
    expected = {tensor.name: tensor.data for tensor in judge.tensors}
    assert sorted(tensor.name for tensor in found.tensors) == sorted(expected)
    for tensor in found.tensors:
        np.testing.assert_allclose(tensor.data, expected[tensor.name], rtol=1e-6)
    ours = {key: field.contents() for key, field in found.fields.items()}
    shared = [key for key in judge.fields if key in ours and not key.startswith(("GGUF.", "tokenizer."))]
    assert len(shared) >= 7
    for key in shared:
        value = judge.fields[key].contents()
        assert ours[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6, abs=5e-7)), key


@pytest.mark.parametrize("kind", KINDS)
def test_both_files_have_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    source, path = save("llama", tmp_path / "model", kind), tmp_path / "m.gguf"
    code, _, error = run(source, path)
    assert code == 0, error
    with closing(open_checkpoint(source)) as before, closing(open_checkpoint(path)) as after:
        original, written = load_tokenizer(before), load_tokenizer(after)
        assert after.file.metadata.get("tokenizer.ggml.pre") == (None if kind in ("llama2", "gemma") else kind)
        values = sampling_defaults(after).values
        assert values == sampling_defaults(before).values == SAMPLING
    compared = 0
    for text in VALID_STRINGS:
        if kind == "qwen2" and not unicodedata.is_normalized("NFC", text):
            continue
        for parse in (False, True):
            ids = original.encode(text, parse_special=parse)
            assert written.encode(text, parse_special=parse) == ids, text
        assert written.decode(ids) == original.decode(ids)
        compared += 1
    assert compared > 400
    assert written.template_source() == TEMPLATE
    assert written.eos_token_ids == original.eos_token_ids
    assert written.bos_token_id == original.bos_token_id
    assert written.prefix_ids == original.prefix_ids
    assert written.special_token_ids == original.special_token_ids
    assert written.tokens[: original.vocab_size] == original.tokens
    assert written.vocab_size == original.vocab_size + UNUSED_ROWS


def test_half_precision_stays_and_vectors_become_float32(tmp_path: Path) -> None:
    source, path = save("llama", tmp_path / "model", dtype=torch.bfloat16), tmp_path / "m.gguf"
    assert run(source, path)[0] == 0
    with closing(open_checkpoint(source)) as before, closing(open_checkpoint(path)) as after:
        np.testing.assert_array_equal(logits_of(after), logits_of(before))
        types = {info.name: info.type_name for info in after.file.tensors.values()}
    assert {kind for name, kind in types.items() if "norm" not in name} == {"BF16"}
    assert {kind for name, kind in types.items() if "norm" in name} == {"F32"}
    assert open_gguf(path).metadata["general.file_type"] == 32
    half = tmp_path / "half.gguf"
    assert run(path, half, "--dtype", "f16")[0] == 0  # from GGUF
    for name, info in open_gguf(half).tensors.items():
        values = open_gguf(path).weight(name).dequantize()
        assert info.type_name == ("F32" if values.ndim == 1 else "F16")
        np.testing.assert_array_equal(open_gguf(half).weight(name).dequantize(), values.astype(np.float16))


def test_quantize_takes_the_checkpoint_itself(tmp_path: Path) -> None:
    source, plain = save("llama", tmp_path / "model"), tmp_path / "plain.gguf"
    assert run(source, plain)[0] == 0
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    for options in ((), ("--imatrix", text)):
        direct, through = tmp_path / "direct.gguf", tmp_path / "through.gguf"
        for origin, path in ((source, direct), (plain, through)):
            arguments = [origin, path, "--type", "q4_0", "--force", *options]
            result = CliRunner().invoke(quantize, [str(a) for a in arguments])
            assert result.exit_code == 0, result.exception
        assert direct.read_bytes() == through.read_bytes()
        assert "Q4_0" in {info.type_name for info in open_gguf(direct).tensors.values()}


def test_an_architecture_that_is_not_declared_is_refused_with_the_list(tmp_path: Path) -> None:
    source = save("helium", tmp_path / "model", "llama2")
    code, _, error = run(source, tmp_path / "m.gguf")
    assert code != 0
    assert "'helium' cannot be written as GGUF yet; supported are apertus, arcee, " in error
    assert " gemma3, " in error
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("qwen2-window", "attention.windows"),
        ("smollm3-list", "rope.rotates"),
        ("ministral", "attention.windows"),
        ("gpt2-scales", "activation"),
        ("phimoe-long", "mlp.experts.jitter"),
        ("minicpm3-long", "embedding_multiplier"),
        ("gemma4-biased", "rope.local"),
    ],
)
def test_a_configuration_that_the_keys_cannot_say(name: str, field: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "model", "llama2")
    assert f"GGUF files cannot express this model's {field}" in run(source, tmp_path / "m.gguf")[2]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "no key for the normalizer 'Lowercase'"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
            "no name for this use of the pre-tokenizer 'ByteLevel'",
        ),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}},
            "no pre-tokenizer of GGUF files splits by 'x'",
        ),
        ("generation_config.json", {"typical_p": 0.5}, "no key for typical_p, 0.5"),
        ("generation_config.json", {"eos_token_id": [1, 2, 3, 4]}, "GGUF files have only 2 keys for them"),
    ],
)
def test_what_has_no_place_in_a_gguf_file(file: str, change: dict[str, object], message: str, tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    path = source / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, _, error = run(source, tmp_path / "m.gguf")
    assert code != 0
    assert message in error
    assert not (tmp_path / "m.gguf").exists()


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "model")
    quantized = CliRunner().invoke(quantize, [str(tmp_path / "model"), str(tmp_path / "fp8"), "--type", "fp8"])
    assert quantized.exit_code == 0, quantized.stderr
    code, _, error = run(tmp_path / "fp8", tmp_path / "m.gguf")
    assert code != 0
    assert "quantized by compressed-tensors; use a checkpoint with float weights" in error
    assert not (tmp_path / "m.gguf").exists()


def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path: Path) -> None:
    """The same vocabulary and merges, but words are cut at every x, which no key says."""
    source = save("llama", tmp_path / "model", "llama2")
    path = source / "tokenizer.json"
    step = {"type": "Split", "pattern": {"Regex": "e"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": step}))
    assert "would have other tokens" in run(source, tmp_path / "m.gguf")[2]


def test_a_token_that_takes_spaces_is_refused(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model", "llama2")
    path = source / "tokenizer.json"
    form = json.loads(path.read_text())
    form["added_tokens"][-1]["rstrip"] = True
    path.write_text(json.dumps(form))
    assert "token '</s>' depends on the text around it" in run(source, tmp_path / "m.gguf")[2]


def test_tokens_beyond_the_embedding_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save("llama", tmp_path / "model", "llama2")
    path = source / "tokenizer.json"
    form = json.loads(path.read_text())
    last = max(form["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    form["added_tokens"] += [{"id": last + i, "content": f"<extra{i}>", **flags} for i in range(UNUSED_ROWS + 1)]
    path.write_text(json.dumps(form))
    assert run(source, tmp_path / "m.gguf")[0] == 0
    assert "1 tokens without a row in the embedding are left out: <extra3>" in caplog.text


def test_every_declared_form_has_a_way_back() -> None:
    """The tables of these architectures change GGUF files by what `restored` can undo."""
    declared = [name for name in sorted(set(known_architectures().values())) if _has_form(name)]
    assert len(declared) >= 16
    for name in declared:
        form = gguf_form(name)
        transforms = weight_table(load_architecture(form.name if isinstance(form.name, str) else name)).transforms
        back = [t for t in transforms if isinstance(t, _WITH_A_WAY_BACK) or getattr(t, "rows", None) is not None]
        assert all(t in back or t.only == "safetensors" or getattr(t, "one_way", False) for t in transforms), name
    with pytest.raises(ModelLoadError, match="cannot be converted back"):
        restored({}, weight_table(load_architecture("recurrent_gemma")).transforms, None)  # type: ignore[arg-type]


def test_forms_are_found_by_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is that of an architecture, whose own file has none; a made-up one needs no entry in a list."""
    found = {module.name for module in pkgutil.iter_modules(forms.__path__) if not module.name.startswith("_")}
    assert found <= set(known_architectures().values())
    for name in found:
        assert not {"GGUF", "HF"} & vars(load_architecture(name)).keys()
    with pytest.raises(ModelLoadError, match="'helium' cannot be written as safetensors yet"):
        hf_form("helium")
    (tmp_path / "helium.py").write_text(
        "from octavo.compress.forms._hf import HFForm\n"
        "HF = HFForm('helium', 'HeliumForCausalLM', lambda cfg, reader: {})\n"
    )
    monkeypatch.setattr(forms, "__path__", [*forms.__path__, str(tmp_path)])
    assert hf_form("helium").class_name == "HeliumForCausalLM"
    with pytest.raises(ModelLoadError, match="'helium' cannot be written as GGUF yet"):
        gguf_form("helium")
    monkeypatch.delitem(sys.modules, "octavo.compress.forms.helium")


def _has_form(name: str) -> bool:
    try:
        gguf_form(name)
    except ModelLoadError:
        return False
    return True


VISION = {name: torch.full((8, 8), 7.0) for name in ("vision_tower.blocks.0.weight", "multi_modal_projector.weight")}
WRAPPERS = {"gemma3": "gemma3", "mistral-window": "mistral3", "ministral3": "mistral3"}


def wrapped(name: str, directory: Path) -> tuple[Path, PreTrainedModel]:
    """A model that also sees, as it is published: the text part under a prefix and in a section, and others beside."""
    num_tokens = save_tokenizer("gemma" if name == "gemma3" else "llama2", directory)
    model = tiny_model(name, vocab_size=num_tokens)
    tensors = {f"language_model.{key}": value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["language_model.lm_head.weight"]
    save_file({**tensors, **VISION}, directory / "model.safetensors")
    config = {"model_type": WRAPPERS[name], "text_config": model.config.to_dict(), "vision_config": {"depth": 1}}
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return directory, model


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_model_that_sees(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, model = wrapped(name, tmp_path)
    expected = expected_logits(model, TOKENS)
    caplog.set_level("INFO", "octavo")
    code, _, error = run(source, tmp_path / "m.gguf")
    assert code == 0, error
    assert "2 tensors that do not read text are left out" in caplog.text
    with closing(open_checkpoint(tmp_path / "m.gguf")) as after:
        assert_close(logits_of(after), expected)
        assert after.file.metadata["general.architecture"] == {"mistral-window": "llama"}.get(name, WRAPPERS[name])
        assert not any("vision" in tensor or "modal" in tensor for tensor in after.file.tensors)
    result = CliRunner().invoke(quantize, [str(source), str(tmp_path / "q.gguf"), "--type", "q8_0"])
    assert result.exit_code == 0, result.stderr
    with closing(open_checkpoint(tmp_path / "q.gguf")) as quantized:
        assert_close(logits_of(quantized), expected, 0.05)


def test_a_tie_that_is_said_beside_the_text_part(tmp_path: Path) -> None:
    source, model = wrapped("ministral3", tmp_path)
    tensors = load_file(source / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    assert run(source, tmp_path / "m.gguf")[0] == 0
    for path in (source, tmp_path / "m.gguf"):
        with closing(open_checkpoint(path)) as checkpoint:
            assert_close(logits_of(checkpoint), expected_logits(model, TOKENS))


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_stored_head_wins_over_the_configuration(is_copy: bool, tmp_path: Path) -> None:
    """config.json ties the head; the file has one: with other numbers it counts, as in transformers 5."""
    source = tmp_path / "model"
    source.mkdir()
    num_tokens = save_tokenizer("qwen2", source)
    model = tiny_model("qwen2", vocab_size=num_tokens)
    model.config.tie_word_embeddings = False
    if is_copy:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    expected = expected_logits(model, TOKENS)
    model.save_pretrained(source)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    assert_close(expected_logits(AutoModelForCausalLM.from_pretrained(source).eval(), TOKENS), expected)
    for target, kind in ((source, None), (tmp_path / "m.gguf", "gguf"), (tmp_path / "copy", "safetensors")):
        if kind is not None:
            code, _, error = run(source, target, "--to", kind)
            assert code == 0, error
        with closing(open_checkpoint(target)) as checkpoint:
            assert_close(logits_of(checkpoint), expected)
            assert checkpoint.config.tie_word_embeddings is is_copy  # type: ignore[attr-defined]
            assert ("lm_head.weight" in checkpoint.weights) is not is_copy
    said = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert said["tie_word_embeddings"] is is_copy
    result = CliRunner().invoke(quantize, [str(source), str(tmp_path / "q.gguf"), "--type", "q8_0"])
    assert result.exit_code == 0, result.stderr
    with closing(open_checkpoint(tmp_path / "q.gguf")) as quantized:
        assert_close(logits_of(quantized), expected, 0.05)


def test_layers_without_experts_are_refused(tmp_path: Path) -> None:
    source = save("qwen3moe-mixed", tmp_path / "model", "qwen2")
    assert "cannot express that some layers have no experts" in run(source, tmp_path / "m.gguf")[2]
