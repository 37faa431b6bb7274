"""Compare tokens per second of `octavo eval` and `llama-perplexity` on the same chunks, in turns.

    python benchmarks/scoring.py MODEL.gguf --llama FOLDER [--chunks 8] [--turns 3] [--text FILE]

FOLDER has llama-perplexity. Both score the same chunks of 512 tokens, cut from the beginning of the text, with the same
number of threads; neither counts the time of loading. The ratio is that of each turn. Every turn is two processes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from judged_types import CHUNK, run
from report import beginning, commit, machine, spread, table

TIME = r"(\d+\.\d+\.\d+\.\d+)"  # of a line of the log; the line before it may end on the other stream


def by_llama(options: argparse.Namespace, text: Path) -> tuple[float, str]:
    """Return tokens per second, from the times of the lines before the first and after the last chunk, and the
    perplexity.
    """
    sizes = ("-c", CHUNK, "-b", CHUNK, "--chunks", options.chunks, "-t", options.threads, "--log-timestamps")
    done = run(options.llama / "llama-perplexity", "-m", options.model, "-f", text, *sizes)
    said = done.stdout + done.stderr
    start = re.search(TIME + r" I perplexity: calculating perplexity over", said)
    end = re.search(TIME + r" I Final estimate: PPL = (\S+) \+/- (\S+)", said)
    if start is None or end is None:
        raise SystemExit("llama-perplexity printed no times or no estimate")
    seconds = moment(end[1]) - moment(start[1])
    return options.chunks * CHUNK / seconds, f"{float(end[2]):.3f} ± {float(end[3]):.3f}"


def moment(text: str) -> float:
    """Parse a time in llama.cpp's log to seconds: minutes, seconds, milliseconds and microseconds separated by
    points.
    """
    minutes, seconds, thousandths, millionths = map(int, text.split("."))
    return 60 * minutes + seconds + thousandths / 1e3 + millionths / 1e6


def by_octavo(options: argparse.Namespace, text: Path) -> tuple[float, str]:
    """Return tokens per second and the perplexity from `octavo eval`."""
    command = (sys.executable, "-m", "octavo", "eval", options.model, "--text", text, "--window", CHUNK)
    report = json.loads(run(*command, "--num-threads", options.threads, "--json").stdout)
    perplexity = report["perplexity"]
    return report["tokens_per_s"], f"{perplexity['perplexity']:.3f} ± {perplexity['standard_error']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's tools")
    parser.add_argument("--text", type=Path, help="[default: the built-in one]")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    ours, theirs, perplexities = [], [], ("", "")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        # At least this number of whole chunks, and not one more.
        text.write_text(beginning(options.model, options.text, options.chunks * CHUNK + CHUNK // 2))
        for _ in range(options.turns):
            (own, mine), (other, its) = by_octavo(options, text), by_llama(options, text)
            ours.append(own)
            theirs.append(other)
            perplexities = (mine, its)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(json.dumps({"commit": commit(), "machine": machine()}))
    cells = [("{median:.0f} ({min:.0f} to {max:.0f})", ours), ("{median:.0f} ({min:.0f} to {max:.0f})", theirs)]
    cells.append(("{median:.2f} ({min:.2f} to {max:.2f})", ratios))
    shown = [form.format(**spread(values)) for form, values in cells]
    titles = ("octavo, tokens/s", "llama-perplexity, tokens/s", "ratio", "perplexity", "llama-perplexity's")
    row = {"model": options.model.name, **dict(zip(titles, [*shown, *perplexities], strict=True))}
    print(table({name: name for name in row}, [row]))


if __name__ == "__main__":
    main()
