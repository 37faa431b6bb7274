"""guidellm, which measures servers: a short run, every request of which must succeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import turns
from tests.support.scripted_server import ScriptedServer, scripted_server

pytest.importorskip("guidellm", reason="guidellm is not installed")


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", "health", "models") as running:
        yield running


def test_a_short_benchmark(server: ScriptedServer, smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of text completions: chat completions go the same way, and its start alone takes seconds."""
    server.script = turns(smollm2_tokenizer, "One, two, three.")
    prompts, report = tmp_path / "prompts.json", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {i}."}) + "\n" for i in range(5)))
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={server.url},model=fake,request_format=/v1/completions"]
    command += ["--constraint", "kind=max_requests,count=3", "--data", f"kind=json_file,path={prompts}"]
    command += ["--output", f"kind=json,path={report}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (3, [])
    assert all(request["output"] == "One, two, three." for request in requests["successful"])
