"""Compare checkpoint formats with transformers in bfloat16, CTranslate2 in int8, and a GGUF file of the same model.

    python benchmarks/formats.py CHECKPOINT --gguf MODEL.gguf [--transformers PYTHON] [--ctranslate2 PYTHON]
        [--folder FOLDER] [--turns 3] [--format gptq --format nf4 ...] [--isa avx2]

CHECKPOINT is a directory in bfloat16, as `convert.py` writes it; CTranslate2 reads the one that it writes next to it.
`gptq`, `awq` and `w8a8` are also written there, in groups of 128, by the rounding of the tests
(`tests/support/quantized_checkpoints.py`). Heads stay plain, as those tools leave them; `gptq-head8` has one of eight
bits (`lm_head` and `dynamic` of GPTQModel). `nf4`, `int8` and `fp8` are made while the model is loaded
(`--quantization`). Run it with a Python that has octavo's test extra. The engines take turns. Below the table are the
versions of the engines and the instruction sets that they used; `--isa avx2` caps all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import repository  # noqa: F401
import torch
from protocol import Peer
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.quantized_checkpoints import Packer, as_tensor, awq, gptq, integer_case

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@dataclasses.dataclass(frozen=True)
class Written:
    """A format of a checkpoint: its configuration, the packer of its linears, and of its head unless that is plain."""

    config: dict[str, object]
    packer: Packer
    head: Packer | None = None


WRITTEN = {
    "gptq": Written(_GPTQ, gptq(4, 128, symmetric=True)),
    "gptq-head8": Written(
        {**_GPTQ, "lm_head": True, "dynamic": {"+:lm_head": {"bits": 8}}},
        gptq(4, 128, symmetric=True),
        gptq(8, 128, symmetric=True),
    ),
    "awq": Written(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, awq(128)
    ),
    "w8a8": Written(*integer_case(8, None, packed=False)),
}
AT_LOAD = ("nf4", "int8", "fp8")
PROMPT, STEPS = 512, 48
# CTranslate2 and torch multiply with oneDNN, which chooses for itself: CT2_FORCE_CPU_ISA alone leaves it on VNNI.
CAPS = {
    "avx2": {
        "OCTAVO_ISA": "avx2",
        "CT2_FORCE_CPU_ISA": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
}


@dataclasses.dataclass
class Speeds:
    """Tokens per second of one engine, one figure per turn."""

    prefill: list[float] = dataclasses.field(default_factory=list)
    decode: list[float] = dataclasses.field(default_factory=list)


def write(source: Path, target: Path, written: Written) -> None:
    """Write the checkpoint with its linears quantized; it is either complete or absent."""
    if target.exists():
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": written.config}
    if written.head:
        config["tie_word_embeddings"] = False
    rng = np.random.default_rng(0)
    index: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                tensor = opened.get_tensor(name)
                stem = name.removesuffix(".weight")
                if stem.endswith("_proj") and name.endswith(".weight"):
                    tensors |= quantized(stem, tensor, written.packer, rng)
                    continue
                if not (written.head and stem == "lm_head"):
                    tensors[name] = tensor
                if written.head and stem == "model.embed_tokens":  # the head of a tied model
                    tensors |= quantized("lm_head", tensor, written.head, rng)
        save_file(tensors, unfinished / file.name)
        index |= dict.fromkeys(tensors, file.name)
    (unfinished / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (unfinished / "config.json").write_text(json.dumps(config))
    unfinished.rename(target)


def quantized(stem: str, tensor: torch.Tensor, packer: Packer, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return the stored tensors of one layer."""
    weights = tensor.float().numpy()
    # The rounding of the tests has no scale of zero.
    packed = packer(np.copysign(np.maximum(np.abs(weights), 1e-5), weights), rng).tensors
    return {f"{stem}.{part}": as_tensor(array).contiguous() for part, array in packed.items()}


def measure(engines: dict[str, Peer], turns: int) -> dict[str, Speeds]:
    """Measure a long prompt and a few steps after a short one in turns, engine by engine.

    The engines are already loaded.
    """
    rng = np.random.default_rng(1)
    prompt = rng.integers(100, 20_000, PROMPT).tolist()
    speeds = {name: Speeds() for name in engines}
    for peer in engines.values():
        peer.ask("decode", prompt=prompt[:32], count=4)
    for _ in range(turns):
        for name, peer in engines.items():
            first = peer.ask("decode", prompt=prompt, count=1)
            steps = peer.ask("decode", prompt=prompt[:32], count=STEPS)
            speeds[name].prefill.append(PROMPT / first["first_s"])
            speeds[name].decode.append(STEPS / steps["steps_s"])
    return speeds


def row(name: str, speeds: dict[str, Speeds]) -> str:
    """Return one line of the table: medians, and ratios to the other engines with their ranges."""
    ours = speeds[name]
    cells = [name]
    for kind in ("prefill", "decode"):
        mine = getattr(ours, kind)
        cells.append(f"{statistics.median(mine):.1f}")
        for other in [other for other in speeds if other != name]:
            ratios = [a / b for a, b in zip(mine, getattr(speeds[other], kind), strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--transformers", metavar="PYTHON", help="a Python with transformers [default: without]")
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="a Python with ctranslate2 [default: without]")
    parser.add_argument("--folder", type=Path, help="for the written formats [default: next to the checkpoint]")
    parser.add_argument("--format", action="append", choices=[*WRITTEN, *AT_LOAD])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--isa", choices=CAPS, help="the highest instruction set of every engine [default: the best]")
    options = parser.parse_args(arguments)
    os.environ.update(CAPS.get(options.isa, {}))
    folder = options.folder or options.checkpoint.parent
    others = [("gguf", "octavo", sys.executable, options.gguf, None)]
    if options.ctranslate2:
        converted = options.checkpoint.parent / "ctranslate2"
        others.insert(0, ("ctranslate2", "ctranslate2", options.ctranslate2, converted, None))
    if options.transformers:
        others.insert(0, ("transformers", "transformers", options.transformers, options.checkpoint, None))
    columns = ("tokens/s", *(f"/ {name}" for name, *_ in others))
    head = ["format", *(f"{kind} {column}" for kind in ("prefill", "decode") for column in columns)]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    versions: dict[str, None] = {}
    for name in options.format or [*WRITTEN, *AT_LOAD]:
        target = options.checkpoint
        if name in WRITTEN:
            target = folder / name
            write(options.checkpoint, target, WRITTEN[name])
        kinds = [(name, "octavo", sys.executable, target, name if name in AT_LOAD else None), *others]
        with ExitStack() as stack:
            log = Path(stack.enter_context(tempfile.NamedTemporaryFile()).name)
            engines: dict[str, Peer] = {}
            for label, kind, python, model, quantization in kinds:
                peer = Peer(kind, python, log)
                stack.callback(peer.close)
                load = {"model": str(model), "threads": len(os.sched_getaffinity(0)), "quantization": quantization}
                loaded = peer.ask("load", **load, context=PROMPT + STEPS + 2, sequences=1)
                versions[loaded["version"]] = None
                engines[label] = peer
            print(row(name, measure(engines, options.turns)), flush=True)
    print(f"\n{'; '.join(versions)}")


if __name__ == "__main__":
    main()
