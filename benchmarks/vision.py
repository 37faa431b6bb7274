"""Measure the bars of vision models with random weights in one run: encoders, the second question, streams.

    python benchmarks/vision.py [--models FOLDER] [--only PART] [--turns 3] [--record FILE] [--realtime]

- encoders: the time of llama.cpp's encoder (mtmd, by the package xllamacpp) over ours, on the same threads and the same
  files, with matrices in float16 as in published ones: Gemma 3's, which is of the shape of SigLIP-SO400M, at 896 x 896,
  and Qwen3-VL's at 1024 x 1024. At least 1.5. Skipped without xllamacpp.
- second: the time to the first token of a second question about an image relative to a second question about the same
  number of text tokens, with a text model of the shape of 0.6 B, at most 1.2.
- streams: the 50th and the 99th percentile of the time between tokens of nine streams while an image of 1024 x 1024 is
  encoded over those without; the 50th at most 1.1, the 99th at most 1.25.

The models are made in FOLDER if they are not there (two minutes), else in a temporary folder. The rest takes less than
eight minutes on two cores. --record writes the figures as docs/figures has them. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import repository  # noqa: F401 - tests.support is found
import torch
from compare import ahead
from numpy.typing import NDArray
from PIL import Image
from report import bar, bar_table, commit, machine, measurement, record
from transformers import AutoModelForImageTextToText, Gemma3Config, PreTrainedConfig, Qwen3VLConfig

from octavo import LLM, AsyncLLM, SamplingParams
from tests.support import tiny_vision
from tests.support.tiny_vision.family import SPECIALS, VOCAB_SIZE
from tests.support.tiny_vision.mmproj import save_gguf

PARTS = ("encoders", "second", "streams")
STREAMS, STREAM_TOKENS = 9, 100
TEXT = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192},
}
MIDDLE_TEXT = {
    **{**TEXT, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
GEMMA_SETTINGS = {"size": {"height": 896, "width": 896}, "image_seq_length": 256}
QWEN_SETTINGS = {
    **{"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1 << 24}},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}


def gemma() -> PreTrainedConfig:
    shape = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    text = {**TEXT, "sliding_window": 512, "query_pre_attn_scalar": 32, "layer_types": ["full_attention"] * 4}
    return Gemma3Config(
        text_config=text,
        vision_config={**shape, "patch_size": 14, "image_size": 896, "vision_use_head": False},
        mm_tokens_per_image=256,
        image_token_index=SPECIALS.index("<image_soft_token>"),
        boi_token_index=SPECIALS.index("<start_of_image>"),
        eoi_token_index=SPECIALS.index("<end_of_image>"),
    )


def qwen(text: Mapping[str, Any], sections: list[int], depth: int, width: int) -> PreTrainedConfig:
    """Return a configuration of Qwen's family.

    sections: sections of the rotary frequencies of a head.
    width: width of the encoder.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    shape = {"depth": depth, "hidden_size": width, "intermediate_size": 4 * width, "num_heads": width // 64}
    return Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            **{**shape, "patch_size": 16, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 2304},
            "deepstack_visual_indexes": [depth // 4, depth // 2, 3 * depth // 4],
        },
        image_token_id=SPECIALS.index("<|image_pad|>"),
        video_token_id=SPECIALS.index("<|video_pad|>"),
        vision_start_token_id=SPECIALS.index("<|vision_start|>"),
        vision_end_token_id=SPECIALS.index("<|vision_end|>"),
    )


def made(folder: Path, family: str, config: PreTrainedConfig, settings: Mapping[str, Any], *, is_pair: bool) -> Path:
    """Make a model in this folder unless it exists, and return the path to load.

    is_pair: write a GGUF file with its mmproj file.
    """
    pair = folder.with_name(f"{folder.name}-gguf")
    found = pair / "text.gguf" if is_pair else folder
    if found.exists():
        return found
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    tiny_vision.save(model, folder, family)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if is_pair:
        _save_pair(model, folder, family, config)
        shutil.rmtree(folder)
    return found


def _save_pair(model: Any, folder: Path, family: str, config: PreTrainedConfig) -> None:
    """Write a GGUF file and its mmproj file.

    The tests' writer has the sizes of its own tiny models; these are larger.
    """
    numbers = {
        "clip.vision.image_min_pixels": 65536,
        "clip.vision.image_max_pixels": 1 << 24,
        "clip.vision.projection_dim": config.text_config.hidden_size,
        "clip.vision.image_size": 896 if family == "gemma3" else 768,
    }
    written, added = gguf.GGUFWriter.add_uint32, gguf.GGUFWriter.add_tensor

    def add(self: gguf.GGUFWriter, key: str, value: int, *rest: Any) -> None:
        written(self, key, numbers.get(key, value), *rest)

    def add_tensor(self: gguf.GGUFWriter, name: str, tensor: NDArray[np.float32], *rest: Any) -> None:
        is_matrix = tensor.ndim == 2 and "embd" not in name
        added(self, name, tensor.astype(np.float16) if is_matrix else tensor, *rest)

    with patch.multiple(gguf.GGUFWriter, add_uint32=add, add_tensor=add_tensor):
        save_gguf(model, folder, family)


def middle(root: Path) -> Path:
    """Return a text model with the shape of 0.6 B and a small encoder."""
    config = qwen(MIDDLE_TEXT, [24, 20, 20], 8, 768)
    return made(root / "middle", "qwen3_vl", config, QWEN_SETTINGS, is_pair=False)


def picture(side: int, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).resize((side, side))


def octavo_s(path: Path, side: int, turns: int) -> float:
    """Return the encoder's seconds for an image, the shortest of several runs."""
    options = {"max_model_len": 2048, "enable_prefix_caching": False, "image_max_tokens": 4096}
    found, params = [], SamplingParams(max_tokens=1)
    with LLM(str(path), num_threads=machine()["cores"], **options) as llm:  # type: ignore[arg-type]
        for seed in range(turns):
            before = llm.metrics.encoder_s_total
            prompt = {"prompt": llm.image_mark, "multi_modal_data": {"image": picture(side, seed)}}
            llm.generate(prompt, params)  # type: ignore[arg-type]
            found.append(llm.metrics.encoder_s_total - before)
    return min(found)


def llama_s(path: Path, side: int, turns: int) -> float:
    """Return llama.cpp's time: a request with an image, minus one with about as much text."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = str(path), str(path.with_name("mmproj-tiny.gguf"))
    params.n_ctx, params.n_parallel, params.use_jinja, params.warmup = 4096, 1, True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = machine()["cores"]
    params.mmproj_use_gpu, params.verbosity = False, -1
    server = xllamacpp.Server(params)

    def seconds(part: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        answer = server.handle_chat_completions({"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
        if "choices" not in str(answer):
            raise SystemExit(f"llama.cpp: {answer}")
        return time.perf_counter() - start

    found = []
    for seed in range(turns):
        data = io.BytesIO()
        picture(side, seed).save(data, "PNG")
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        words = seconds({"type": "text", "text": f"{seed}" + "a" * 1000})
        found.append(seconds({"type": "image_url", "image_url": {"url": url}}) - words)
    return min(found)


def encoders(root: Path, turns: int) -> list[dict[str, Any]]:
    if find_spec("xllamacpp") is None:
        print("encoders: skipped, xllamacpp is not installed", flush=True)
        return []
    so400m = made(root / "so400m", "gemma3", gemma(), GEMMA_SETTINGS, is_pair=True)
    qwen3 = made(root / "qwen3", "qwen3_vl", qwen(TEXT, [6, 5, 5], 24, 1024), QWEN_SETTINGS, is_pair=True)
    found = []
    for name, path, side in (("SigLIP-SO400M", so400m, 896), ("Qwen3-VL", qwen3, 1024)):
        ours, theirs = octavo_s(path, side, turns), llama_s(path, side, turns)
        what = f"{name} at {side} x {side}: seconds of llama.cpp ({theirs:.1f}) / Octavo ({ours:.1f})"
        found.append(bar(what, theirs / ours, at_least=1.5))
    return found


def second(root: Path, turns: int) -> list[dict[str, Any]]:
    one, ratios = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), []
    with LLM(str(middle(root)), num_threads=machine()["cores"], max_model_len=4096) as llm:

        def first_token_s(prompt: Any) -> float:
            start = time.perf_counter()
            llm.generate(prompt, one)
            return time.perf_counter() - start

        for seed in range(turns + 2):
            image = {"image": picture(512, seed)}  # of 256 tokens
            begin, then = f"{llm.image_mark}Describe {seed}.", " And what else is there?" * 4
            first_token_s({"prompt": begin, "multi_modal_data": image})
            seen = first_token_s({"prompt": begin + then, "multi_modal_data": image})
            words = f"{seed}" + "b" * (256 + len(begin))
            first_token_s(words)
            ratios.append(seen / first_token_s(words + then))
    return [bar("first token of a second question: about an image / a text", statistics.median(ratios), at_most=1.2)]


def streams(root: Path, turns: int) -> list[dict[str, Any]]:
    cores, params = machine()["cores"], SamplingParams(max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
    path = str(middle(root))
    gaps: dict[bool, list[float]] = {False: [], True: []}

    async def stream(llm: AsyncLLM, words: str, found: list[float]) -> None:
        last = None
        async for _ in llm.generate(words + "c" * 60, params):
            now = time.perf_counter()
            found += [] if last is None else [now - last]
            last = now

    async def measured(llm: AsyncLLM, turn: int, has_image: bool) -> None:
        words = [f"{turn}{has_image}{i}" for i in range(STREAMS)]
        tasks = [asyncio.create_task(stream(llm, each, gaps[has_image])) for each in words]
        await asyncio.sleep(2)
        if has_image:
            prompt = {"prompt": llm.image_mark, "multi_modal_data": {"image": picture(1024, turn)}}
            async for _ in llm.generate(prompt, SamplingParams(max_tokens=1)):
                pass
        await asyncio.gather(*tasks)

    async def all_turns() -> None:
        with closing(AsyncLLM(path, num_threads=cores, max_model_len=4096, max_num_seqs=16)) as llm:
            for turn in range(turns):
                for has_image in (False, True):
                    await measured(llm, turn, has_image)

    asyncio.run(all_turns())
    alone, beside = (np.percentile(gaps[key], [50, 99]) for key in (False, True))
    what = "time between tokens of nine streams while an image is encoded / alone, percentile"
    return [
        bar(f"{what} 50", float(beside[0] / alone[0]), at_most=1.1),
        bar(f"{what} 99", float(beside[1] / alone[1]), at_most=1.25),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where models are made, or are already")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--record", type=Path, metavar="FILE", help="for example docs/figures/images.json")
    parser.add_argument("--realtime", action="store_true", help="run at real-time priority (needs root)")
    given = parser.parse_args()
    measures: Mapping[str, Callable[[Path, int], list[dict[str, Any]]]] = dict(
        zip(PARTS, (encoders, second, streams), strict=True)
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="octavo-vision-") as name, ahead((), given.realtime):
        root = given.models or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        for part in given.only or PARTS:
            found = measures[part](root, given.turns)
            print(*found, sep="\n", flush=True)
            rows += found
    print(f"{machine()}, commit {commit()}, {given.turns} turns")
    print(bar_table(rows))
    if given.record is not None:
        shown = [[row["what"], f"{row['value']:.2f}", row["bar"]] for row in rows]
        options = [f"--turns {given.turns}", *(f"--only {part}" for part in given.only or ())]
        command = " ".join(["python benchmarks/vision.py", *options, *(["--realtime"] if given.realtime else [])])
        record(given.record, "vision", measurement(command, ["what", "value", "bar"], shown))
    return int(any(row["met"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
