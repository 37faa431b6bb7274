"""Compare decoding with a mixture of experts to the time its active bytes need, and write a model to measure.

    python benchmarks/mixture.py write TOKENIZER.gguf MIXTURE.gguf [--layers 12] [--experts 8] [--top-k 2]
    python benchmarks/mixture.py measure MIXTURE.gguf [--rows 1 4 16] [--turns 5] [--threads 2]

`write` (with a Python that has gguf) makes a Mixtral of random Q4_K blocks with the vocabulary of another file.
`measure` runs decode steps of any model, as `octavo bench --profile` does. The bytes of a step include its
weights, its cache and the values between operations. Experts count with the share that the rows choose if all are
equally likely, which is exact for one row. The read bandwidth is measured right before and after each turn. The turn
with the least time counts, because other programs can only slow a turn down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from report import commit, machine, table

from octavo.bench import StepProfile, profile

KV_HEADS, HEAD_DIM = 4, 128
CONTEXT = 128  # tokens in the cache of a sequence
COLUMNS = {
    "rows": "rows",
    "active, MB": "megabytes",
    "read bandwidth, GB/s": "bandwidth",
    "least time, ms": "least_ms",
    "step, ms": "step_ms",
    "ratio": "ratio",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a mixture; widths are multiples of 256, the values in a block of Q4_K."""

    hidden: int = 2048
    intermediate: int = 4096
    layers: int = 12
    experts: int = 8
    top_k: int = 2


def write(tokenizer: str, path: str, sizes: Sizes) -> None:
    """Write a GGUF file of random weights, with the vocabulary of the GGUF file `tokenizer`."""
    import gguf

    source, target = gguf.GGUFReader(tokenizer), gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            target.add_key_value(field.name, field.contents(), kind, sub_type=element)
    vocab, heads = len(source.fields["tokenizer.ggml.tokens"].data), sizes.hidden // HEAD_DIM
    target.add_context_length(4096)
    target.add_embedding_length(sizes.hidden)
    target.add_block_count(sizes.layers)
    target.add_feed_forward_length(sizes.intermediate)
    target.add_head_count(heads)
    target.add_head_count_kv(min(KV_HEADS, heads))
    target.add_layer_norm_rms_eps(1e-5)
    target.add_rope_freq_base(1e6)
    target.add_expert_count(sizes.experts)
    target.add_expert_used_count(sizes.top_k)
    for name, type_name, shape in _tensors(sizes, vocab, min(KV_HEADS, heads) * HEAD_DIM):
        if type_name == "F32":
            target.add_tensor(name, _floats(name, shape))
        else:
            target.add_tensor(name, _blocks(name, shape), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    target.write_header_to_file()
    target.write_kv_data_to_file()
    target.write_tensors_to_file()
    target.close()


def _tensors(sizes: Sizes, vocab: int, kv: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the name, type and shape [out, in] of every tensor."""
    hidden, width, experts = sizes.hidden, sizes.intermediate, sizes.experts
    layer = [
        ("attn_norm", "F32", (hidden,)),
        ("ffn_norm", "F32", (hidden,)),
        ("attn_q", "Q4_K", (hidden, hidden)),
        ("attn_k", "Q4_K", (kv, hidden)),
        ("attn_v", "Q4_K", (kv, hidden)),
        ("attn_output", "Q4_K", (hidden, hidden)),
        ("ffn_gate_inp", "F32", (experts, hidden)),
        ("ffn_gate_exps", "Q4_K", (experts, width, hidden)),
        ("ffn_up_exps", "Q4_K", (experts, width, hidden)),
        ("ffn_down_exps", "Q4_K", (experts, hidden, width)),
    ]
    ends = [
        ("token_embd", "Q4_K", (vocab, hidden)),
        ("output_norm", "F32", (hidden,)),
        ("output", "Q4_K", (vocab, hidden)),
    ]
    tensors = [*ends, *((f"blk.{i}.{name}", kind, shape) for i in range(sizes.layers) for name, kind, shape in layer)]
    return [(f"{name}.weight", kind, shape) for name, kind, shape in tensors]


def _floats(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return ones for norms, and random numbers for a router."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng(list(name.encode()))
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)


def _blocks(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random blocks of Q4_K, [..., bytes of a row]: numbers with mean 0 and magnitude about 1 / sqrt(in)."""
    rng = np.random.default_rng(list(name.encode()))
    *lead, width = shape
    blocks = rng.integers(0, 256, (*lead, width // 256, 144), dtype=np.uint8)
    # Codes and scales have the means 7.5 and 31.5, minimums 31.5.
    scale = 1.0 / (31.5 * 4.6 * width**0.5)
    blocks[..., :4] = np.frombuffer(np.array([scale, 7.5 * scale], np.float16).tobytes(), np.uint8)
    return blocks.reshape(*lead, width // 256 * 144)


def measure(model: str, rows: Sequence[int], turns: int, **options: Any) -> list[dict[str, float]]:
    """Return a line of the table for each number of rows.

    options: options of `octavo.bench.profile`.
    """
    report = profile(model, [n for n in rows for _ in range(turns)], prefill=(), context=CONTEXT, **options)
    best = [min(report.steps[i * turns : (i + 1) * turns], key=lambda step: step.seconds) for i in range(len(rows))]
    return [_line(step) for step in best]


def _line(step: StepProfile) -> dict[str, float]:
    moved = sum(operation.bytes_moved for operation in step.operations)
    bandwidth = step.ceilings.value("read from memory")
    return {
        "rows": step.num_rows,
        "megabytes": moved / 1e6,
        "bandwidth": bandwidth / 1e9,
        "least_ms": 1e3 * moved / bandwidth,
        "step_ms": 1e3 * step.seconds,
        "ratio": step.seconds * bandwidth / moved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("tokenizer", help="GGUF file whose vocabulary the model gets")
    writing.add_argument("path")
    for name in ("hidden", "intermediate", "layers", "experts", "top_k"):
        writing.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Sizes(), name))
    measuring = commands.add_parser("measure")
    measuring.add_argument("model")
    measuring.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    measuring.add_argument("--turns", type=int, default=5)
    measuring.add_argument("--threads", type=int, default=0, help="default: the engine's own number")
    options = vars(parser.parse_args())
    if options.pop("command") == "write":
        write(options.pop("tokenizer"), options.pop("path"), Sizes(**options))
        return
    print(json.dumps({"commit": commit(), "machine": machine(), "model": options["model"]}))
    lines = measure(options["model"], options["rows"], options["turns"], num_threads=options["threads"])
    print(table(COLUMNS, lines))


if __name__ == "__main__":
    main()
