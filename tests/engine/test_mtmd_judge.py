"""Models with an mmproj file in llama.cpp itself, through xllamacpp: the tokens it counts and its probabilities."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from octavo import LLM, SamplingParams
from tests.support import tiny_vision
from tests.support.pictures import encoded
from tests.support.seeing import base64_of
from tests.support.tiny_vision.family import VOCAB_SIZE
from tests.support.tiny_vision.mmproj import save_gguf, save_mmproj

llama = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed", exc_type=ImportError)
pytestmark = pytest.mark.slow

# Width and height of a picture that no processor resizes: llama.cpp rounds and filters otherwise. Windows of Qwen 2.5
# VL have 112 pixels, which llama.cpp takes whatever the file says.
SIZES = {
    "qwen2_vl": (40, 24),
    "qwen2_5_vl-wide": (40, 24),
    "qwen3_vl": (40, 24),
    "gemma3": (24, 24),
    "internvl": (16, 16),
}
QUESTION = "What is this?"
TOLERANCE = 0.03  # of log-probabilities: llama.cpp takes GELU and the patches' weights from tables and in float16


@contextmanager
def served(text: Path) -> Iterator[Any]:
    """llama.cpp's server over a GGUF file and the mmproj file beside it, on one thread, with a float32 cache."""
    params = llama.CommonParams()
    params.model.path, params.mmproj.path = str(text), str(text.with_name("mmproj-tiny.gguf"))
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.mmproj_use_gpu = 512, 1, 0, False
    params.cpuparams.n_threads, params.use_jinja, params.warmup, params.verbosity = 1, True, False, -1
    params.image_min_tokens = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(params)
    yield server
    del server


def post(server: Any, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.listening_address + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def asked(server: Any, data: bytes) -> tuple[dict[int, float], int]:
    """The log-probabilities of the token after a picture and a question by id, and the tokens of the prompt."""
    marker = post(server, "/props", None).get("media_marker", "<__media__>")
    letter = post(server, "/tokenize", {"content": "a"})["tokens"][-1]  # text by itself, which llama.cpp shows
    prompt = {"prompt_string": marker + QUESTION, "multimodal_data": [base64_of(data)]}
    body = {"prompt": prompt, "n_predict": 1, "n_probs": VOCAB_SIZE, "temperature": 0}
    answer = post(server, "/completion", {**body, "logit_bias": [[letter, 1000.0]]})
    top = answer["completion_probabilities"][0]["top_logprobs"]
    return {entry["id"]: entry["logprob"] for entry in top}, answer["tokens_evaluated"]


@pytest.mark.parametrize("name", SIZES)
def test_llama_cpp_sees_the_same(name: str, tmp_path: Path) -> None:
    model = tiny_vision.tiny_model(name)
    text = save_gguf(model, tiny_vision.save(model, tmp_path / "model", name), name)
    width, height = SIZES[name]
    pixels = tiny_vision.picture(3, height, width).pixels
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    with LLM(str(text), num_threads=1, max_model_len=512, kv_cache_memory="8MiB") as llm:
        mark = llm.image_mark.removesuffix("\n")  # llama.cpp leaves out the line feed after an image, too
        prompt = llm._session.to_prompt({"prompt": mark + QUESTION, "multi_modal_data": {"image": pixels}})
        if name == "gemma3":  # llama.cpp leaves out the line feeds around an image
            (span,) = prompt.spans
            prompt = prompt.without(span.end + 1, span.end + 3).without(span.start - 3, span.start - 1)
        (output,) = llm.generate([prompt], params)
    if name == "internvl":  # llama.cpp puts the row of the whole image last, but its place stays the first
        table = model.model.vision_tower.embeddings.position_embeddings
        table.data = table.data.roll(-1, dims=1)
        save_mmproj(model, text.with_name("mmproj-tiny.gguf"), name)
    with served(text) as server:
        found, num_tokens = asked(server, encoded(Image.fromarray(pixels), "PNG"))
    own = {token: entry.logprob for token, entry in (output.outputs[0].logprobs or [])[0].items()}
    assert num_tokens == len(output.prompt_token_ids)
    assert own.keys() <= found.keys()
    assert max(abs(own[token] - found[token]) for token in own) < TOLERANCE
