"""Checkpoints of `octavo quantize` in vLLM: the losses of the tokens of a text there, and by `octavo eval`.

    python benchmarks/vllm_reads.py FOLDER... --vllm PYTHON [--tokens 400] [--json FILE]

PYTHON has vLLM, its CPU build for example; all folders are read by one process of it, in bfloat16. The text is the
beginning of the built-in one, tokenized by both sides. Put the checkpoint that is not quantized first: its distance is
what bfloat16 costs. A checkpoint that vLLM refuses has its words in place of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = {
    "checkpoint": "checkpoint",
    "vLLM's method": "method",
    "loss in vLLM": "theirs",
    "in octavo": "ours",
    "mean distance": "mean",
    "largest": "largest",
}


def losses_in_vllm(folder: str, text: str) -> dict[str, Any]:
    """Return the token ids and losses of all tokens except the first. Runs in vLLM's Python."""
    import vllm

    llm = vllm.LLM(folder, dtype="bfloat16", max_model_len=1024, max_num_seqs=2, enforce_eager=True)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([text], params, use_tqdm=False)
    ids = output.prompt_token_ids[1:]
    losses = [-found[token].logprob for token, found in zip(ids, output.prompt_logprobs[1:], strict=True)]
    return {"ids": ids, "losses": losses, "method": str(llm.llm_engine.model_config.quantization)}


def serve(text: str, folders: list[str]) -> None:
    """Write a line of JSON for each folder to the descriptor that `ask_vllm` provides."""
    out = os.fdopen(int(os.environ["ANSWERS"]), "w")
    for folder in folders:
        try:
            answer = losses_in_vllm(folder, Path(text).read_text())
        except Exception as error:
            answer = {"error": str(error)[:200].replace("\n", " ")}
        print(json.dumps(answer), file=out, flush=True)


def ask_vllm(python: str, text: Path, folders: list[Path]) -> list[dict[str, Any]]:
    """Return the answer for each folder. If the process gives none, exit with the name of its log."""
    reader, writer = os.pipe()
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {**settings, "ANSWERS": str(writer), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [python, __file__, "--inside", str(text), *map(str, folders)]
    with tempfile.NamedTemporaryFile(prefix="octavo-vllm-", suffix=".log", delete=False) as said:
        process = subprocess.Popen(command, env=environment, pass_fds=[writer], stdout=said, stderr=said)
    os.close(writer)
    with os.fdopen(reader) as answers:
        found = [json.loads(line) for line in answers]
    if process.wait() or len(found) != len(folders):
        raise SystemExit(f"vLLM ended after {len(found)} of {len(folders)} checkpoints; see {said.name}")
    Path(said.name).unlink()
    return found


def losses_in_octavo(folder: Path, text: Path, lines: Path) -> tuple[list[int], list[float]]:
    """Return the token ids and losses of all tokens except the first."""
    command = [sys.executable, "-m", "octavo", "eval", str(folder), "--text", str(text), "--per-token", str(lines)]
    command += ["--convention", "strided", "--window", "1024", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    entries = [json.loads(line) for line in lines.read_text().splitlines()]
    return [entry["token_id"] for entry in entries], [entry["loss"] for entry in entries]


def compare(folder: Path, theirs: dict[str, Any], ids: list[int], losses: list[float]) -> dict[str, Any]:
    """Return one row of the table."""
    if "error" in theirs:
        return {"checkpoint": folder.name, "method": theirs["error"]}
    if theirs["ids"] != ids:
        raise SystemExit(f"{folder}: vLLM makes other tokens of the text than octavo")
    distances = [abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True)]
    return {
        "checkpoint": f"`{folder.name}`",
        "method": theirs["method"],
        "theirs": f"{sum(theirs['losses']) / len(ids):.4f}",
        "ours": f"{sum(losses) / len(ids):.4f}",
        "mean": f"{sum(distances) / len(ids):.4f}",
        "largest": f"{max(distances):.3f}",
    }


def main() -> None:
    from report import beginning, commit, machine, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        text, lines = Path(made) / "text.txt", Path(made) / "lines.jsonl"
        text.write_text(beginning(options.folders[0], None, options.tokens))
        answers = ask_vllm(options.vllm, text, [folder.resolve() for folder in options.folders])
        pairs = zip(options.folders, answers, strict=True)
        rows = [compare(folder, theirs, *losses_in_octavo(folder, text, lines)) for folder, theirs in pairs]
    print(table(COLUMNS, rows))
    if options.json:
        options.json.write_text(json.dumps({"commit": commit(), "machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        main()
