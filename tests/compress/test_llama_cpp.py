"""GGUF files of `octavo convert` in llama.cpp itself, through the server of xllamacpp: its logits and tokens."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from octavo.graph.ops.rowwise import ACTIVATIONS, gelu_tanh
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from tests.compress import test_convert
from tests.models.test_parity import TOKENS, logits_of
from tests.support import tiny_rwkv
from tests.support.tiny_models import tiny_model

llama = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed", exc_type=ImportError)
pytestmark = pytest.mark.slow

EXACT, WITH_TABLES = 2e-5, 1e-3  # relative to the largest logit; llama.cpp takes GELU from a table of float16 numbers
GEMMA3N_WIDTH = 96
LEAST = -80.0  # log-probabilities below are those of denormal numbers, or of zero, in llama.cpp
LENGTHS = (1, 7, len(TOKENS))  # of the prompts

_LOCAL_AND_GLOBAL = (["sliding_attention"] * 4 + ["full_attention"]) * 6
# llama.cpp knows some sizes and numbers of layers only.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek32": {"index_head_dim": 128},
    "deepseek2": {"num_hidden_layers": 27},  # the number by which it knows those without a latent of queries
    "deepseek2-groups": {"attention_bias": False, "topk_method": "greedy"},  # it has V3's choice of groups alone
    "dots1": {"num_key_value_heads": 4},
    "exaone4-window": {"num_hidden_layers": 64, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
    "gemma3n": {
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 10,
        "layer_types": _LOCAL_AND_GLOBAL,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "intermediate_size": [GEMMA3N_WIDTH] * 30,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
    },
    "lfm2moe": {"routed_scaling_factor": 1.0},  # that of the published models, whatever the key says
    **{name: {"linear_value_head_dim": 16} for name in ("qwen3next", "qwen35", "qwen35moe")},  # that of keys
}
# What llama.cpp reads otherwise or refuses: docs/lab/quantization.md says why.
UNLIKE = {
    "phimoe",
    "apertus-biased",
    "bitnet",
    "phi3",
    "mistral-window",
    "cohere-normed",
    "olmo-clipped",
    "olmoe-clipped",
    "gpt-neox-sequential",
}
UNLIKE |= {"granitehybrid-rope", "mamba-biased", "mamba2-biased", "jamba-dense", "nemotron-h-latent"}
GELU = ("gemma", "starcoder2", "gpt2", "gpt-bigcode", "phi", "gpt-neox", "falcon", "bloom", "mpt")


@contextmanager
def served(path: Path, *adapters: Path) -> Iterator[Any]:
    """llama.cpp's server over a file and its adapters, on one thread, with a float32 cache."""
    params = llama.CommonParams()
    params.model.path = str(path)
    params.lora_adapters = [llama.CommonAdapterLoraInfo(str(adapter)) for adapter in adapters]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.cpuparams.n_threads = 1
    params.warmup, params.verbosity = False, -1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(params)
    yield server
    del server


def post(server: Any, path: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def logprobs(server: Any, tokens: list[int], vocab_size: int) -> dict[int, float]:
    """Those of the token after a prompt by id, before all sampling; the sampled one is text by itself."""
    letter = post(server, "/tokenize", {"content": "a"})["tokens"][-1]
    body = {"prompt": tokens, "n_predict": 1, "n_probs": vocab_size, "temperature": 0, "cache_prompt": False}
    answer = post(server, "/completion", {**body, "logit_bias": [[letter, 1000.0]]})
    return {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}


def add_unused_keys(path: Path) -> None:
    """Those of the layers that share keys and values, which published models have and llama.cpp asks for."""
    tensors = load_file(path)
    kinds = {name.split(".self_attn.")[1] for name in tensors if ".0.self_attn." in name}
    for kind in kinds:
        for layer in range(20, 30):
            tensors.setdefault(f"model.layers.{layer}.self_attn.{kind}", tensors[f"model.layers.0.self_attn.{kind}"])
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"format": "pt"})


def with_sample_deviations(checkpoint: Checkpoint) -> Checkpoint:
    """llama.cpp divides the squares of sparse gates by one less than their number, which counts in narrow models."""
    factor = math.sqrt(GEMMA3N_WIDTH / (GEMMA3N_WIDTH - 1))
    config: Any = checkpoint.config
    deviations = tuple(None if value is None else value * factor for value in config.deviations)
    return replace(checkpoint, config=replace(config, deviations=deviations))


def gelu_of_table(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """llama.cpp's: from a table with an entry for each float16 number, itself in float16."""
    rounded = gelu_tanh(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
    return np.where(x <= -10, 0, np.where(x >= 10, x, rounded)).astype(np.float32)


def normalized(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    values = logits.astype(np.float64) - logits.max()
    return values - np.log(np.exp(values).sum())


@pytest.mark.parametrize("name", [*(name for name in test_convert.CASES if name not in UNLIKE), "deepseek32"])
def test_llama_cpp_has_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = CHANGES.get(name, {})

    def changed(case: str, vocab_size: int) -> Any:
        own = {"vocab_size_per_layer_input": vocab_size} if case.startswith(("gemma3n", "gemma4")) else {}
        return tiny_model(case, vocab_size=vocab_size, **changes, **own)

    monkeypatch.setattr(test_convert, "tiny_model", changed)
    # The gguf package has no names of this one.
    monkeypatch.setitem(test_convert.CASES, "deepseek32", "qwen2")
    source, path = test_convert.save(name, tmp_path / "model"), tmp_path / "m.gguf"
    if name == "gemma3n":
        add_unused_keys(source / "model.safetensors")
    code, _, error = test_convert.run(source, path, "--to", "gguf")
    assert code == 0, error
    with closing(open_checkpoint(path)) as checkpoint:
        if name in ("gemma3n", "gemma4-experts"):
            # Thirty layers with sparse gates make an error two thousand times as large, and that of the table 0.3.
            monkeypatch.setitem(ACTIVATIONS, "gelu_tanh", gelu_of_table)
        if name == "gemma3n":
            checkpoint = with_sample_deviations(checkpoint)
        logits = logits_of(checkpoint)
    tolerance = WITH_TABLES if name.startswith(GELU) else EXACT
    compare(path, logits, tolerance)


def test_llama_cpp_has_the_same_logits_of_rwkv7(tmp_path: Path) -> None:
    tiny_rwkv.save(tmp_path)
    code, _, error = test_convert.run(tmp_path, tmp_path / "m.gguf", "--to", "gguf")
    assert code == 0, error
    compare(tmp_path / "m.gguf", tiny_rwkv.expected_logits(TOKENS), EXACT)


def compare(path: Path, logits: NDArray[np.float32], tolerance: float) -> None:
    """The logits of llama.cpp, and its most likely tokens."""
    with served(path) as server:
        for length in LENGTHS:
            found, own = logprobs(server, TOKENS[:length], logits.shape[1]), normalized(logits[length - 1])
            assert len(found) == len(own)
            errors = [abs(own[token] - value) for token, value in found.items() if own[token] > LEAST]
            assert max(errors) < tolerance * np.abs(logits[length - 1]).max()
            assert max(found, key=lambda token: found[token]) == own.argmax()
