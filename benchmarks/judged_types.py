"""GGUF files of every type by `octavo quantize` and `llama-quantize`, judged by llama.cpp; ours by `octavo eval`, too.

    python benchmarks/judged_types.py MODEL.gguf --llama FOLDER [--types q4_k_m,...] [--imatrix FILE] [--text FILE]
        [--chunks 4] [--work FOLDER] [--json FILE]

MODEL has float weights; FOLDER has llama-quantize and llama-perplexity. The same chunks of 512 tokens, cut from the
text, go through all three; the tokens after the middle of a chunk count. `llama-perplexity --save-all-logits` keeps the
log-probabilities of each position in 65,536 steps of the range below the most likely token: 1e-4 to 3e-4 nats each. It
cuts them off 16 nats below that token; such tokens count as missing. A type is a mixture, or NAME=TYPE for the type
of the tensors whose name contains NAME, with float16 for the rest; `llama-quantize` leaves that unchanged, so
its columns equal MODEL's. tq1_0 and tq2_0 need a model from `ternary.py`; its embedding, which is not
ternary, stays float16 in both files. Each file is deleted when it has been judged.

Columns: the perplexity by llama.cpp of our file and of theirs, the difference of their losses token by token with its
standard error (below zero: ours is better), the perplexity of our file by `octavo eval`, and the mean and the largest
distance of its log-probabilities from llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import beginning, commit, machine, table

from octavo.compress.mixtures import MIXTURES

CHUNK = 512
COUNTED = CHUNK - 1 - CHUNK // 2
COLUMNS = {
    "type": "type",
    "bits per weight": "bits",
    "octavo's file": "ours",
    "llama.cpp's file": "theirs",
    "difference of the loss": "difference",
    "by octavo eval": "eval",
    "mean distance": "mean",
    "largest": "largest",
}
Floats = NDArray[np.float64]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Return the output of a command. If it fails, exit with its last lines."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("\n".join([*(done.stdout + done.stderr).splitlines()[-5:], f"{command[0]} failed"]))
    return done


def saved_losses(path: Path) -> Floats:
    """Return the negative log-probabilities of the counted tokens from a `--save-all-logits` file; NaN where they are
    cut off.

    The file contains `_logits_`, n_ctx, n_vocab, n_chunk, and the tokens. For each counted position of each chunk, two
    float32 follow, the step and the smallest value, and then each token's steps as uint16, padded to an even number.
    """
    size, vocab, chunks = np.fromfile(path, np.int32, 3, offset=8)
    tokens = np.fromfile(path, np.int32, chunks * size, offset=20).reshape(chunks, size)
    width = 4 + (vocab + 1) // 2 * 2
    rows = np.memmap(path, np.uint16, "r", 20 + tokens.nbytes, (chunks * (size - 1 - size // 2), width))
    targets = tokens[:, size // 2 + 1 :].reshape(-1)
    steps = rows[np.arange(len(targets)), 4 + targets].astype(np.float64)
    scales = np.ascontiguousarray(rows[:, :4]).view(np.float32).astype(np.float64)
    return np.where(steps > 0, -(scales[:, 0] * steps + scales[:, 1]), np.nan)


def llama_perplexity(tools: Path, model: Path, text: Path, chunks: int, threads: int) -> tuple[str, Floats]:
    """Return its estimate as printed, and the losses of the tokens."""
    with tempfile.NamedTemporaryFile(dir=text.parent) as logits:
        sizes = ("-c", CHUNK, "-b", CHUNK, "--chunks", chunks, "-t", threads)
        said = run(tools / "llama-perplexity", "-m", model, "-f", text, *sizes, "--save-all-logits", logits.name)
        found = re.search(r"Final estimate: PPL = (\S+) \+/- (\S+)", said.stdout + said.stderr)
        if found is None:
            raise SystemExit(f"llama-perplexity gave no estimate for {model}")
        return f"{float(found[1]):.3f} ± {float(found[2]):.3f}", saved_losses(Path(logits.name))


def octavo_eval(model: Path, text: Path, threads: int) -> tuple[str, Floats]:
    """Return the estimate and the losses of `octavo eval`."""
    with tempfile.NamedTemporaryFile(dir=text.parent) as lines:
        command = (sys.executable, "-m", "octavo", "eval", model, "--text", text, "--window", CHUNK)
        said = run(*command, "--per-token", lines.name, "--num-threads", threads, "--json")
        perplexity = json.loads(said.stdout)["perplexity"]
        losses = [json.loads(line)["loss"] for line in Path(lines.name).read_text().splitlines()]
    return f"{perplexity['perplexity']:.3f} ± {perplexity['standard_error']:.3f}", np.array(losses)


def quantize(name: str, options: argparse.Namespace, folder: Path) -> tuple[Path, Path, float]:
    """Return our file, theirs, and the bits per weight of ours."""
    ours, theirs = folder / "octavo.gguf", folder / "llama.gguf"
    _, _, type_name = name.partition("=")
    override = ("--tensor-type", name) if type_name else ()
    mixture = "f16" if type_name else name
    importance = ("--imatrix", options.imatrix) if options.imatrix else ()
    is_ternary = name.startswith("tq")
    command = (sys.executable, "-m", "octavo", "quantize", options.model, ours, "--force", "--type", mixture)
    kept = ("--keep", "token_embd") if is_ternary else ()
    said = run(*command, *override, *kept, *importance, "--threads", options.threads, "--json")
    kept = ("--token-embedding-type", "f16") if is_ternary else ()
    command = (options.llama / "llama-quantize", *importance, *override, *kept, options.model, theirs, mixture.upper())
    run(*command, options.threads)
    return ours, theirs, json.loads(said.stdout)["bits_per_weight"]


def judge(name: str, options: argparse.Namespace, folder: Path, text: Path) -> dict[str, Any]:
    """Return one row of the table."""
    ours, theirs, bits = quantize(name, options, folder)
    row: dict[str, Any] = {"type": f"`{name}`", "bits": f"{bits:.2f}"}
    row["ours"], mine = llama_perplexity(options.llama, ours, text, options.chunks, options.threads)
    row["theirs"], other = llama_perplexity(options.llama, theirs, text, options.chunks, options.threads)
    row["eval"], evaluated = octavo_eval(ours, text, options.threads)
    row["bytes"], row["their bytes"] = ours.stat().st_size, theirs.stat().st_size
    difference = (mine - other)[~np.isnan(mine - other)]
    error = difference.std() / len(difference) ** 0.5
    distance = np.abs(evaluated - mine)
    row["difference"] = f"{difference.mean():+.4f} ± {error:.4f}"
    row["mean"], row["largest"] = f"{np.nanmean(distance):.4f}", f"{np.nanmax(distance):.3f}"
    row["cut off"] = int(np.isnan(distance).sum())
    ours.unlink()
    theirs.unlink()
    return row


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's tools")
    parser.add_argument("--types", help="comma-separated [default: all mixtures but the ternary ones]")
    parser.add_argument("--imatrix", type=Path, help="importance for both")
    parser.add_argument("--text", type=Path, help="[default: the built-in one]")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for the files [default: a temporary one]")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    types = (options.types or ",".join(name for name in MIXTURES if not name.startswith("tq"))).split(",")
    rows = []
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        text = Path(folder) / "text.txt"
        # At least this number of whole chunks, and not one more.
        text.write_text(beginning(options.model, options.text, options.chunks * CHUNK + CHUNK // 2))
        for name in types:
            rows.append(judge(name, options, Path(folder), text))
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(COLUMNS, rows))
    if options.json:
        report = {"commit": commit(), "machine": machine(), "model": options.model.name, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
