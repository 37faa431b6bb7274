"""guidellm, which measures servers: a short run against the real server, every request of which must succeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import running_server

pytest.importorskip("guidellm", reason="guidellm is not installed")


def test_a_short_benchmark(smollm2_path: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # It wants the tokenizer as a directory, to make prompts of a given length.
    AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name).save_pretrained(tmp_path / "tokens")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {i}."}) + "\n" for i in range(5)))
    report = tmp_path / "report.json"
    with running_server(f"smollm2={smollm2_path}") as server:
        command = [sys.executable, "-m", "guidellm", "benchmark", "--target", server.url, "--rate-type", "synchronous"]
        command += ["--max-requests", "3", "--data", str(prompts), "--disable-progress"]
        command += ["--processor", str(tmp_path / "tokens"), "--output-path", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (3, [])
    assert all(request["output_tokens"] > 0 for request in requests["successful"])
