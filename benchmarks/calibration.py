"""GPTQ and AWQ from calibration texts of three kinds, judged on prose and on code.

Each type is made from prose (the pages of `docs`), from code (modules of Python's library) and from tokens drawn at
random, written out as text; for comparison it is rounded without a text. The divergence from the float model is that of
the two halves of the built-in text, which is none of these.

    python benchmarks/calibration.py CHECKPOINT FOLDER --group-size 64 --chunks 6 --tokens 1024
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import sysconfig
from contextlib import closing
from importlib import resources
from pathlib import Path

import numpy as np
from report import table

from octavo.loader.checkpoint import open_checkpoint
from octavo.quality.evaluation import ReferenceOptions, WindowOptions, evaluate_text
from octavo.quality.texts import read_text
from octavo.tokenizer import load_tokenizer

TYPES = {"gptq-4bit": ("rtn-4bit",), "awq": ("rtn-4bit", "--asymmetric")}
"""Each method -> what it is compared with: rounding on the same kind of grid."""
RANDOM_TOKENS = 20_000
COLUMNS = {"type": "type", "calibration": "calibration", "KL of prose": "prose", "KL of code": "code"}


def write_texts(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Write the texts, and return them by kind."""
    docs = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    with closing(open_checkpoint(checkpoint)) as model:
        tokenizer = load_tokenizer(model)
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, RANDOM_TOKENS)
    texts = {
        "prose": "".join(path.read_text() for path in docs),
        "code": "".join(path.read_text() for path in modules),
        "random tokens": tokenizer.decode(ids.tolist()),
    }
    paths = {kind: folder / f"{kind.replace(' ', '_')}.txt" for kind in texts}
    for kind, text in texts.items():
        if not paths[kind].exists() or paths[kind].read_text() != text:  # models of the same text stay
            paths[kind].write_text(text)
    return paths


def quantize(source: Path, folder: Path, name: str, *options: object) -> Path:
    """Quantize a model, unless an earlier run did so with the same files and options: its name contains their
    digest.
    """
    files = [source / "config.json", *source.glob("*.safetensors"), *(o for o in options if isinstance(o, Path))]
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    result = folder / f"{name}-{hashlib.sha256(repr((state, *map(str, options))).encode()).hexdigest()[:12]}"
    if not result.exists():
        command = [sys.executable, "-m", "octavo", "quantize", source, result, "--type", *options]
        subprocess.run([str(part) for part in command], check=True)
    return result


def divergences(model: Path, reference: Path, tokens: int) -> dict[str, str]:
    """Return the mean KL divergence for each half of the built-in text."""
    found = {}
    for half in ("prose", "code"):
        with resources.as_file(resources.files("octavo.quality") / "data" / f"{half}.txt") as path:
            report, _ = evaluate_text(
                str(model),
                read_text(path),
                WindowOptions(max_tokens=tokens),
                reference=ReferenceOptions(str(reference)),
            )
        assert report.divergence is not None
        found[half] = f"{report.divergence.mean_kl:.4f} ± {report.divergence.mean_kl_standard_error:.4f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024, help="of each half of the text that is judged")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    texts = write_texts(arguments.checkpoint, arguments.folder)
    group = ("--group-size", arguments.group_size)
    rows = []
    for name, rounded in TYPES.items():
        plain = quantize(arguments.checkpoint, arguments.folder, f"none-{name}", *rounded, *group)
        made = {f"none: `{' '.join(rounded)}`": plain}
        for kind, text in texts.items():
            options = (name, *group, "--calibration", text, "--calibration-chunks", arguments.chunks)
            made[kind] = quantize(arguments.checkpoint, arguments.folder, f"{text.stem}-{name}", *options)
        for kind, model in made.items():
            found = divergences(model, arguments.checkpoint, arguments.tokens)
            rows.append({"type": f"`{name}`", "calibration": kind, **found})
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
