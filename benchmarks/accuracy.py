"""Agreement of Octavo and other engines with transformers in float32, on the same weights and tokens.

    python benchmarks/accuracy.py MODEL.gguf --reference PYTHON --peer octavo=PYTHON --peer llama.cpp=PYTHON
    python benchmarks/accuracy.py CHECKPOINT --quantization fp8 --reference PYTHON --peer octavo=PYTHON

A directory is an unquantized checkpoint (`convert.py` writes one). With `--quantization`, Octavo quantizes it during
loading, and the reference uses the numbers of the published formula (`tests/support/at_load_formulas.py`) in float32.

For every position of the text it computes KL(reference || engine) of the next-token distribution, the agreement on the
most likely token, and the perplexity of the text that follows. The reference runs once for each file and text; its
logits stay in the cache folder (about 0.6 MB per position for a vocabulary of 150,000).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from protocol import Peer, PeerError
from report import commit, machine, table

from tests.support.at_load_formulas import FORMULAS

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "src" / "octavo" / "quality" / "data"
TEXT = [DATA / "prose.txt", DATA / "code.txt"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--quantization", choices=sorted(FORMULAS), help="quantize a directory's weights at load")
    parser.add_argument("--reference", required=True, metavar="PYTHON", help="a Python with torch and transformers")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="octavo or llama.cpp")
    parser.add_argument(
        "--kv-dtype", action="append", choices=["float16", "int8"], help="cache type; may be given several times"
    )
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512, help="tokens in a window; each starts from an empty cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "octavo-benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser.parse_args()


def reference_folder(model: Path, options: argparse.Namespace) -> Path:
    """Return the folder of the reference's logits for this file, text and windows, computing them if they are
    missing.
    """
    digest = hashlib.sha256()
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    for each in files:
        with each.open("rb") as file:
            digest.update(file.read(1 << 22))  # the header and the first tensors tell one file from another
    for path in TEXT:
        digest.update(path.read_bytes())
    digest.update(f"{sum(f.stat().st_size for f in files)} {options.positions} {options.window}".encode())
    digest.update((options.quantization or "").encode())
    folder = options.cache / f"{model.stem}-{digest.hexdigest()[:16]}"
    if not (folder / "logits.npy").exists():
        print(f"{model.name}: running the reference (once)", flush=True)
        windows = -(-options.positions // options.window)
        command = [options.reference, str(HERE / "reference_transformers.py"), str(model), *map(str, TEXT)]
        if options.quantization:
            command += ["--quantization", options.quantization]
        command += ["--folder", str(folder), "--windows", str(windows), "--length", str(options.window)]
        subprocess.run([*command, "--threads", str(options.threads)], check=True, stderr=subprocess.DEVNULL)
    return folder


def measure(
    name: str, python: str, kv_dtype: str, model: Path, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return one engine's figures for one model."""
    log = Path(tempfile.gettempdir()) / f"octavo-accuracy-{name}.log"
    peer = Peer(name, python, log)
    try:
        load = {"model": str(model), "threads": options.threads, "context": options.window, "kv_dtype": kv_dtype}
        load["quantization"] = options.quantization
        loaded = peer.ask("load", sequences=1, **load)
        figures = peer.ask("agreement", folder=str(folder))
    finally:
        peer.close()
    label = f"{model.name}, {options.quantization}" if options.quantization else model.name
    return {"model": label, "engine": name, "version": loaded["version"], "cache": kv_dtype, **figures}


def main() -> int:
    options = arguments()
    results = []
    for model in options.models:
        folder = reference_folder(model, options)
        for pair, kv_dtype in itertools.product(options.peer, options.kv_dtype or ["float16"]):
            name, _, python = pair.partition("=")
            try:
                results.append(measure(name, python, kv_dtype, model, folder, options))
            except PeerError as error:
                print(f"{model.name}: {name} skipped: {error}", file=sys.stderr)
    columns = {
        "model": "model",
        "engine": "engine",
        "cache": "cache",
        "positions": "positions",
        "greedy agreement": "greedy_agreement",
        "mean KL": "mean_kl",
        "± (s.e.)": "mean_kl_standard_error",
        "median KL": "median_kl",
        "p99 KL": "p99_kl",
        "perplexity": "perplexity",
        "reference": "reference_perplexity",
    }
    print(table(columns, results))
    if options.json:
        header = {"commit": commit(), "machine": machine(), "window": options.window}
        options.json.write_text(json.dumps({**header, "results": results}, indent=2) + "\n")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
