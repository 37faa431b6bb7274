"""Speed of checkpoint formats beside transformers in bfloat16, and beside a GGUF file of the same model.

    python benchmarks/formats.py CHECKPOINT --gguf MODEL.gguf --transformers PYTHON [--folder FOLDER] [--turns 3]
        [--format gptq --format nf4 ...]

CHECKPOINT is a directory in bfloat16, as `convert.py` writes it. `gptq`, `awq` and `w8a8` are written beside it, in
groups of 128, by the rounding of the tests (`tests/support/quantized_checkpoints.py`); `nf4`, `int8` and `fp8` are made
while the model is loaded (`--quantization`). Run it with a Python that has octavo's test extra. The engines take turns.
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
from typing import Any

import numpy as np
import torch
from protocol import Peer
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.quantized_checkpoints import Packer, as_tensor, awq, gptq, integer_case

WRITTEN: dict[str, tuple[dict[str, object], Packer]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        gptq(4, 128, symmetric=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, awq(128)),
    "w8a8": integer_case(8, None, packed=False),
}
AT_LOAD = ("nf4", "int8", "fp8")
PROMPT, STEPS = 512, 48


@dataclasses.dataclass
class Speeds:
    """Tokens a second of one engine, one figure a turn."""

    prefill: list[float] = dataclasses.field(default_factory=list)
    decode: list[float] = dataclasses.field(default_factory=list)


def write(source: Path, target: Path, config: dict[str, object], packer: Packer) -> None:
    """The checkpoint with its linears quantized, complete or absent."""
    if target.exists():
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    rng = np.random.default_rng(0)
    index: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                stem = name.removesuffix(".weight")
                if not stem.endswith("_proj"):
                    tensors[name] = opened.get_tensor(name)
                    continue
                if not name.endswith(".weight"):
                    tensors[name] = opened.get_tensor(name)
                    continue
                weights = opened.get_tensor(name).float().numpy()
                # The rounding of the tests has no scale of zero.
                packed = packer(np.copysign(np.maximum(np.abs(weights), 1e-5), weights), rng).tensors
                tensors |= {f"{stem}.{part}": as_tensor(array).contiguous() for part, array in packed.items()}
        save_file(tensors, unfinished / file.name)
        index |= dict.fromkeys(tensors, file.name)
    (unfinished / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    text = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (unfinished / "config.json").write_text(json.dumps(text))
    unfinished.rename(target)


def measure(engines: dict[str, tuple[Peer, dict[str, Any]]], turns: int) -> dict[str, Speeds]:
    """Turns of one long prompt and a few steps after a short one, engine after engine."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(100, 20_000, PROMPT).tolist()
    speeds = {name: Speeds() for name in engines}
    for peer, load in engines.values():
        peer.ask("load", **load)
        peer.ask("decode", prompt=prompt[:32], count=4)
    for _ in range(turns):
        for name, (peer, _load) in engines.items():
            first = peer.ask("decode", prompt=prompt, count=1)
            steps = peer.ask("decode", prompt=prompt[:32], count=STEPS)
            speeds[name].prefill.append(PROMPT / first["first_s"])
            speeds[name].decode.append(STEPS / steps["steps_s"])
    return speeds


def row(name: str, speeds: dict[str, Speeds]) -> str:
    """One line of the table: medians, and ratios to the two others with their ranges."""
    ours = speeds[name]
    cells = [name]
    for kind in ("prefill", "decode"):
        mine = getattr(ours, kind)
        cells.append(f"{statistics.median(mine):.1f}")
        for other in ("transformers", "gguf"):
            if other in speeds:
                ratios = [a / b for a, b in zip(mine, getattr(speeds[other], kind), strict=True)]
                cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--transformers", metavar="PYTHON", help="a Python with transformers [default: only the gguf]")
    parser.add_argument("--folder", type=Path, help="for the written formats [default: beside the checkpoint]")
    parser.add_argument("--format", action="append", choices=[*WRITTEN, *AT_LOAD])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args(arguments)
    folder = options.folder or options.checkpoint.parent
    others = ["transformers"] if options.transformers else []
    columns = ("tokens/s", *(f"/ {other}" for other in others), "/ gguf")
    head = ["format", *(f"{kind} {column}" for kind in ("prefill", "decode") for column in columns)]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name in options.format or [*WRITTEN, *AT_LOAD]:
        target = options.checkpoint
        if name in WRITTEN:
            target = folder / name
            write(options.checkpoint, target, *WRITTEN[name])
        kinds = [(name, "octavo", sys.executable, target, name if name in AT_LOAD else None)]
        if options.transformers:
            kinds.append(("transformers", "transformers", options.transformers, options.checkpoint, None))
        kinds.append(("gguf", "octavo", sys.executable, options.gguf, None))
        with ExitStack() as stack:
            log = Path(stack.enter_context(tempfile.NamedTemporaryFile()).name)
            engines: dict[str, tuple[Peer, dict[str, Any]]] = {}
            for label, kind, python, model, quantization in kinds:
                peer = Peer(kind, python, log)
                stack.callback(peer.close)
                load = {"model": str(model), "threads": len(os.sched_getaffinity(0)), "quantization": quantization}
                engines[label] = (peer, {**load, "context": PROMPT + STEPS + 2, "sequences": 1})
            print(row(name, measure(engines, options.turns)), flush=True)


if __name__ == "__main__":
    main()
