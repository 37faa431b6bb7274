"""The engine's configuration: names, sizes, limits."""

from __future__ import annotations

import dataclasses
import re

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig, parse_bytes
from octavo.errors import UsageError
from octavo.unknown_options import _ADVICE, _RENAMED, _SAME


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), ("2GiB", 2**31), ("2 gb", 2 * 10**9), ("500MB", 5 * 10**8), ("1.5 KiB", 1536), ("77", 77)],
)
def test_sizes_are_read(value: int | str, expected: int) -> None:
    assert parse_bytes("memory", value) == expected


@pytest.mark.parametrize("value", ["", "GiB", "-1GiB", "2 TiB", "1e999GB", "nan", "²", 0, -1, True, 1.5, "0"])
def test_what_is_no_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match="memory"):
        parse_bytes("memory", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "there is no option 'max_num_seq'; did you mean max_num_seqs"),
        (
            {"gpu_memory_utilization": 0.9, "gpu_memory": 0.5},
            "gpu_memory_utilization and gpu_memory are the same option",
        ),
        ({"swap_space": 4}, "there is no option 'swap_space'; host_cache_memory keeps"),
        ({"n_ctx": 4096}, "there is no option 'n_ctx'; use max_model_len"),
        ({"max_new_tokens": 8}, "there is no option 'max_new_tokens'; use max_tokens of SamplingParams"),
        ({"zebra": 4}, "there is no option 'zebra'; the options are model, revision"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be from 1 to 4096"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be an integer, not '4'"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "32, less than max_num_seqs 64"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
        ({"pack_cache": "yes"}, "pack_cache must be True or False"),
        ({"pack_cache_size": "much"}, "pack_cache_size is 'much'"),
        ({"backend": ""}, "backend must be a name"),
        ({"deterministic": "yes"}, "deterministic must be True or False, not 'yes'"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'; it must be float16, int8 or fp8"),
        ({"kv_dtype": "bf16"}, "kv_dtype 'bf16' is not supported"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype 'bfloat16' is not supported: float16 takes no more memory"),
        ({"kv_dtype": ["int8"]}, "kv_dtype is "),
        (
            {"quantization": "gptq"},
            "quantization is 'gptq'; it must be nf4, fp4, int8, int4 or fp8, for an unquantized",
        ),
        ({"dtype": "half"}, "dtype is 'half'; it must be auto, float32, float16 or bfloat16"),
        ({"revision": ""}, "revision must be a branch, tag or commit"),
        ({"trust_remote_code": "yes"}, "trust_remote_code must be True or False"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory is 'lots'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig.resolve("model", options)


def test_sizes_of_the_configuration_are_bytes() -> None:
    assert EngineConfig(kv_cache_memory="1MiB", pack_cache_size="2 kB").kv_cache_bytes == 2**20
    assert EngineConfig(kv_cache_memory="1MiB", pack_cache_size="2 kB").pack_cache_bytes == 2000


def test_every_field_says_what_it_is_for() -> None:
    for field in dataclasses.fields(EngineConfig):
        assert len(field.metadata["help"]) > 10, field.name
        assert field.default is not dataclasses.MISSING, field.name


def test_vllms_arguments_with_a_plain_counterpart_are_taken() -> None:
    options = {"gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8_e4m3"}
    config = EngineConfig.resolve("m", options)
    assert (config.gpu_memory, config.kv_dtype) == (0.9, "fp8")
    assert EngineConfig.resolve("m", {"kv_cache_dtype": "auto"}).kv_dtype == "float16"


def test_the_advice_on_arguments_of_others_names_what_is_there() -> None:
    engine, sampling = ({field.name for field in dataclasses.fields(kind)} for kind in (EngineConfig, SamplingParams))
    assert {*_RENAMED["LLM"].values()} | {own for own, _ in _SAME.values()} <= engine
    assert {*_RENAMED["SamplingParams"].values()} <= sampling
    for text in _ADVICE.values():
        for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text):
            assert word in engine | sampling or hasattr(LLM, word), text
