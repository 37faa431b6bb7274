#!/usr/bin/env python3
"""Compare the logits of published checkpoints with those of transformers, one small checkpoint for each family.

    python tools/real_models.py [FAMILY ...] [--local] [--folder DIR] [--report FILE]

Each checkpoint is downloaded from the hub into DIR (by default a temporary folder, emptied after each one), loaded by
Octavo and by transformers in float32, and compared on 24 tokens. `--local` compares the GGUF files below
~/.cache/octavo-models instead and needs no network. Run it with the Python environment of the tests. It exits with 1 if
a family differs or could not be compared. `.github/workflows/real_models.yml` runs it every week.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel  # noqa: E402

from octavo.backends import ExecutorLimits, reference  # noqa: E402
from octavo.backends.cpu.lowering import PASSES  # noqa: E402
from octavo.graph.passes import optimize  # noqa: E402
from octavo.loader.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from octavo.models import build_graph  # noqa: E402
from tests.support.batches import Request, step  # noqa: E402

# Family (module in octavo.models) -> a small public safetensors checkpoint.
MODELS = {
    "llama": "HuggingFaceTB/SmolLM2-135M",
    "qwen2": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3": "Qwen/Qwen3-0.6B",
    "qwen3next": "Qwen/Qwen3.5-0.8B",
    "gemma": "unsloth/gemma-2b",
    "gemma2": "unsloth/gemma-2-2b",
    "gemma3": "unsloth/gemma-3-270m-it",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "phi2": "microsoft/phi-1_5",
    "olmo": "allenai/OLMo-1B-hf",
    "olmo2": "allenai/OLMo-2-0425-1B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "granite": "ibm-granite/granite-3.1-2b-base",
    "granitemoe": "ibm-granite/granite-3.1-1b-a400m-base",
    "granitehybrid": "ibm-granite/granite-4.0-h-350m",
    "smollm3": "HuggingFaceTB/SmolLM3-3B-Base",
    "starcoder2": "bigcode/starcoder2-3b",
    "stablelm": "stabilityai/stablelm-2-1_6b",
    "exaone4": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "ernie4_5": "baidu/ERNIE-4.5-0.3B-PT",
    "hunyuan_dense": "tencent/Hunyuan-0.5B-Instruct",
    "lfm2": "LiquidAI/LFM2-350M",
    "bitnet": "microsoft/bitnet-b1.58-2B-4T",
    "falcon_h1": "tiiuae/Falcon-H1-0.5B-Base",
    "mamba": "state-spaces/mamba-130m-hf",
    "zamba2": "Zyphra/Zamba2-1.2B",
    "gpt2": "openai-community/gpt2",
    "gpt_neo": "EleutherAI/gpt-neo-125m",
    "gptneox": "EleutherAI/pythia-160m",
    "opt": "facebook/opt-125m",
    "bloom": "bigscience/bloom-560m",
    "falcon": "tiiuae/falcon-rw-1b",
    "starcoder": "bigcode/tiny_starcoder_py",
    "helium": "kyutai/helium-1-2b",
}
LOCAL = Path.home() / ".cache" / "octavo-models"
FILES = ["*.json", "*.safetensors"]
NUM_TOKENS = 24
TOLERANCE = 1e-3  # relative to the largest logit; both compute in float32


@dataclass(frozen=True)
class Result:
    """The result for one family.

    error: the largest difference, relative to the largest logit.
    problem: the reason why there is no such number.
    """

    family: str
    model: str
    error: float | None
    seconds: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error < TOLERANCE

    def row(self) -> str:
        """Return this row of the report as Markdown."""
        found = "not compared" if self.error is None else f"{self.error:.1e}"
        words = self.problem.replace("|", "/").replace("\n", " ")[:300]
        return f"| `{self.family}` | {self.model} | {found} | {self.seconds:.0f} | {words} |"


def own_logits(checkpoint: Checkpoint, tokens: list[int]) -> NDArray[np.float32]:
    """Return the reference backend's logits, [tokens, vocab]."""
    graph = optimize(build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes), PASSES)
    executor = reference.compile(graph, checkpoint.weights, ExecutorLimits(NUM_TOKENS, 1, NUM_TOKENS, NUM_TOKENS))
    with contextlib.closing(executor):
        groups = len(graph.cache_layout.groups)
        executor.allocate_cache(groups, 32, 2)
        batch = step([(Request(tokens, [0]), len(tokens))], block_size=32, num_groups=max(groups, 1))
        logits = executor.submit(batch).wait().logits
    assert logits is not None
    return logits


def judge(path: Path) -> PreTrainedModel:
    """Load a checkpoint into transformers, in float32."""
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", {}).get("quant_method") == "bitnet":
        return plain_bitnet(path, config)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain_bitnet(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Load BitNet with its weights unpacked; a byte stores the codes (-1 to 1) of four rows.

    The linear layers of transformers round activations to eight bits, and the reference backend does not.
    """
    divides = config.quantization_config.get("linear_class", "bitlinear") == "bitlinear"
    del config.quantization_config
    stored = {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    weights = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.uint8:
            codes = torch.cat([(tensor >> 2 * i) & 3 for i in range(4)]).float() - 1
            scale = stored[f"{name}_scale"].float()
            weights[name] = codes / scale if divides else codes * scale
        elif not name.endswith(".weight_scale"):
            weights[name] = tensor
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"tensors that do not fit: {unexpected[:3]}; missing ones: {missing[:3]}")
    model.tie_weights()
    return model


def difference(path: Path) -> tuple[str, float]:
    """Return the family of a checkpoint, and the largest difference from transformers relative to the largest logit."""
    with contextlib.closing(open_checkpoint(path)) as checkpoint:
        low, high = 3, min(checkpoint.config.vocab_size, 40000)
        tokens = np.random.default_rng(0).integers(low, high, NUM_TOKENS).tolist()
        found, family = own_logits(checkpoint, tokens), checkpoint.architecture
    model = judge(path).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()
    return family, float(np.abs(found - expected).max() / np.abs(expected).max())


def compared(family: str, model: str, path: Path) -> Result:
    begin = time.monotonic()
    try:
        architecture, error = difference(path)
        problem = "" if family in ("", architecture) else f"its architecture is {architecture}"
        return Result(family or architecture, model, error, time.monotonic() - begin, problem)
    except Exception as error:  # one failing family must not end the run
        return Result(family, model, None, time.monotonic() - begin, f"{type(error).__name__}: {error}")


def published(families: list[str], folder: Path | None) -> Iterator[Result]:
    """Compare the hub's checkpoints. They are kept in `folder`; if it is None, each is removed after its comparison."""
    from huggingface_hub import snapshot_download

    for family in families:
        with contextlib.ExitStack() as stack:
            place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                path = snapshot_download(MODELS[family], allow_patterns=FILES, local_dir=place / family)
            except Exception as error:  # there is no network, or the checkpoint no longer exists
                yield Result(family, MODELS[family], None, 0.0, f"{type(error).__name__}: {error}")
                continue
            yield compared(family, MODELS[family], Path(path))


def local() -> Iterator[Result]:
    for path in sorted(LOCAL.rglob("*.gguf")):
        yield compared("", path.name, path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(MODELS)} [default: all of them]")
    parser.add_argument("--local", action="store_true", help=f"compare the GGUF files below {LOCAL}")
    parser.add_argument("--folder", type=Path, help="keep the downloads here")
    parser.add_argument("--report", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.families) - MODELS.keys()):
        parser.error(f"no checkpoint is known for {', '.join(unknown)}")
    lines = ["| family | checkpoint | largest difference | seconds | |", "|---|---|---|---|---|"]
    results = []
    print("\n".join(lines), flush=True)
    for result in local() if options.local else published(options.families or [*MODELS], options.folder):
        results.append(result)
        print(result.row(), flush=True)
    if options.report:
        options.report.write_text("\n".join([*lines, *(result.row() for result in results)]) + "\n")
    return int(not results or not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
