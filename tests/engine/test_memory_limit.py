"""A model larger than the memory of its control group runs there, and is not killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
CODE = """
import json, sys
from octavo import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
with LLM(sys.argv[1], max_model_len=256, max_num_seqs=1, max_num_batched_tokens=16) as llm:
    output = llm.generate("The sun is a star, and the moon", params, use_tqdm=False)[0].outputs[0]
    paging = llm._session.model().executor.paging
    expected = None if paging is None else paging.tokens_per_s
    print(json.dumps({"tokens": output.token_ids, "expected": expected}))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """An empty control group with a limit on memory, of version 1 or 2."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    for root in roots:
        folder = root / f"octavo-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group can be made here")


def run(model: Path, cache: Path, group: Path | None = None) -> dict[str, object]:
    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    environment = {**os.environ, "OCTAVO_CACHE": str(cache)}
    command = [sys.executable, "-c", CODE, str(model)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, preexec_fn=enter, check=False
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout), stderr=result.stderr)


@pytest.mark.slow
def test_in_a_control_group(smollm2_path: Path, tmp_path: Path, group: Path) -> None:
    """The limit is 256 MiB of headroom, about 90 MiB of the process itself, and less than the 92 MiB of weights."""
    limit = next(group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
    limit.write_text(str(380 * MIB))
    expected = run(smollm2_path, tmp_path)
    assert expected["expected"] is None
    found = run(smollm2_path, tmp_path, group)
    assert found["tokens"] == expected["tokens"]
    assert "too much to stay in memory" in str(found["stderr"])
    assert found["expected"] is not None
