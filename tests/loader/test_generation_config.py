"""Sampling defaults: the model's own, from its files or by the name of its base model."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.errors import ModelLoadError, UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.generation_config import SamplingDefaults, sampling_defaults
from octavo.sampling_params import BeamSearchParams, SamplingParams
from tests.support import tiny_models
from tests.support.tiny_gguf import tiny_gguf


def defaults_of(path: Path, choice: str = "auto") -> SamplingDefaults:
    with closing(open_checkpoint(path)) as checkpoint:
        return sampling_defaults(checkpoint, choice)


def gguf(folder: Path, file: str = "model.gguf", /, **keys: Any) -> Path:
    path = folder / file
    path.write_bytes(tiny_gguf({f"general.{key}": value for key, value in keys.items()}))
    return path


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    keys = {"sampling.temp": 0.8, "sampling.top_k": 40, "sampling.min_p": 0.05, "sampling.penalty_repeat": 1.1}
    found = defaults_of(gguf(tmp_path, **keys))  # float32 in the file
    assert found.values == {"temperature": 0.8, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    assert "general.sampling" in found.source
    assert defaults_of(gguf(tmp_path, **keys), "none") == SamplingDefaults() == defaults_of(gguf(tmp_path), "vllm")


@pytest.mark.parametrize(
    ("keys", "file", "temperature"),
    [
        ({"name": "Qwen2.5 Coder 0.5B Instruct"}, "x.gguf", 0.7),
        ({"name": "a tune of mine", "base_model.0.name": "Qwen3 4B"}, "x.gguf", 0.6),
        ({"basename": "Llama-3.2"}, "x.gguf", 0.6),
        ({}, "SmolLM2-135M-Instruct.Q4_1.gguf", 0.2),
        ({"name": "smollm21"}, "x.gguf", None),
        ({}, "x.gguf", None),
        ({"name": "SmolLM2", "sampling.temp": 0.5}, "x.gguf", 0.5),
    ],
)
def test_the_table_by_base_model(tmp_path: Path, keys: dict[str, object], file: str, temperature: float | None) -> None:
    assert defaults_of(gguf(tmp_path, file, **keys)).values.get("temperature") == temperature


def test_the_longest_name_counts(tmp_path: Path) -> None:
    for size, penalty in (("0.5B", 1.1), ("7B", 1.05)):
        path = gguf(tmp_path, name=f"Qwen2.5 {size} Instruct")
        assert defaults_of(path).values["repetition_penalty"] == penalty


def test_generation_config_json(tmp_path: Path) -> None:
    path = tiny_models.save_safetensors(tiny_models.tiny_model("llama"), tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20}))
    assert defaults_of(path) == SamplingDefaults({"temperature": 0.6, "top_k": 20}, "generation_config.json")
    (path / "generation_config.json").write_text('{"do_sample": false}')
    assert defaults_of(path).values == {"temperature": 0.0}
    other = tmp_path / "other.json"
    other.write_text('{"top_p": 0.5}')
    assert defaults_of(path, str(other)).values == {"top_p": 0.5}
    with pytest.raises(ModelLoadError, match=r"missing\.json"):
        defaults_of(path, str(tmp_path / "missing.json"))


def test_a_value_that_cannot_be_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"general\.sampling\.top_p.*1\.5.*--generation-config none"):
        defaults_of(gguf(tmp_path, **{"sampling.top_p": 1.5}))


def test_explicit_fields_win_and_beams_stay() -> None:
    defaults = SamplingDefaults({"temperature": 0.2, "top_p": 0.9})
    filled = SamplingParams(temperature=1.0).with_defaults(defaults.without({"temperature"}))
    assert (filled.temperature, filled.top_p) == (1.0, 0.9)
    beams = BeamSearchParams(beam_width=2)
    assert beams.with_defaults(defaults.values) is beams


def test_an_llm_without_parameters_takes_them(tmp_path: Path) -> None:
    path = str(gguf(tmp_path, **{"sampling.temp": 0.0}))
    with LLM(path) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
        [default] = llm.generate("abcd")
        [greedy] = llm.generate("abcd", SamplingParams(temperature=0))
        assert default.outputs[0].token_ids == greedy.outputs[0].token_ids
        [streamed] = [[i for part in llm.stream("abcd") for i in part.outputs[0].token_ids]]
        assert streamed == list(greedy.outputs[0].token_ids)
    with LLM(path, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_smollm2(smollm2_path: Path) -> None:
    assert defaults_of(smollm2_path).values == {"temperature": 0.2, "top_p": 0.9}


def test_values_in_place_of_those_of_the_model(tmp_path: Path) -> None:
    """vLLM's option, as its command line and its Python API take it."""
    text = '{"temperature": 0.3, "seed": 5, "top_p": null}'
    assert EngineConfig(override_generation_config=text).sampling_overrides == {"temperature": 0.3, "seed": 5}
    found = SamplingDefaults({"temperature": 0.8, "top_k": 9}, "it").overridden({"temperature": 0.3, "seed": 5})
    assert found.values == {"temperature": 0.3, "top_k": 9, "seed": 5}
    assert found.source == "it, but temperature, seed of override_generation_config"
    with LLM(str(gguf(tmp_path)), override_generation_config={"min_p": 0.5}, kv_cache_memory="16MiB") as llm:
        assert llm.get_default_sampling_params().min_p == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "write an object"),
        ('{"temprature": 1}', "temprature"),
        ('{"temperature": 9}', "temperature is 9"),
        ('{"bad_words": ["a"]}', "it may have temperature, top_p"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_wrong_values_in_place_of_the_models(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EngineConfig(override_generation_config=text)
