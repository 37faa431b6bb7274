"""Models larger than memory: the same answers from mapped weights, of which only a part is in memory."""

from __future__ import annotations

import logging
import os
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.backends import rates
from octavo.backends.cpu.paging import plan_paging
from octavo.backends.memory import MemoryBudget
from octavo.backends.rates import read_rate
from octavo.config import EngineConfig
from octavo.engine.loading.memory_needs import memory_needs
from octavo.errors import EngineDeadError, InsufficientMemoryError
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.loader.checkpoint import open_checkpoint
from tests.support import tiny_models
from tests.support.forked import in_fork
from tests.support.processes import octavo_here
from tests.support.waiting import wait_until

MIB = 1 << 20
PARAMS = SamplingParams(temperature=0, max_tokens=16, logprobs=5, prompt_logprobs=5)
PROMPTS = ["The sun is a star, and the moon", "One, two, three,"]


def answers(llm: LLM) -> list[object]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in llm.generate(PROMPTS, PARAMS)]


def resident_bytes(suffix: str) -> int:
    """Of the mapped files with this suffix, in this process."""
    found, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            is_wanted = line.endswith(suffix)
        elif is_wanted and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_the_same_answers_from_disk(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice: the first start packs, the second one maps. Every log-probability is equal to the last bit."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    options = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    with LLM(str(smollm2_path), **options) as llm:
        expected = answers(llm)
    # 256 MiB stay free for others; the packed weights are 92 MiB.
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget((256 + 60) * MIB))
    for start in range(2):
        caplog.clear()
        with closing(open_checkpoint(smollm2_path)) as checkpoint:
            config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
            planned = memory_needs(checkpoint, 256, 1, MemoryBudget((256 + 60) * MIB), config).from_disk
        with LLM(str(smollm2_path), **options) as llm:
            paging = llm._session.model().executor.paging
            assert planned is not None
            assert paging is not None
            for name in ("memory_bytes", "resident_bytes", "resident_layers", "bytes_per_token"):
                assert getattr(planned, name) == getattr(paging, name), name
            (record,) = [r for r in caplog.records if "too much to stay in memory" in r.getMessage()]
            assert answers(llm) == expected
            assert llm.max_model_len == 256
            # The reader may be behind. Pages that the system kept, though they were given back, go with further steps.
            wait_until(lambda: resident_bytes(".packed") < 75 * MIB or not answers(llm))
            if start == 0:
                executor = llm._session.model().executor
                assert in_fork(executor.close) == (b"", 0)  # its threads stayed in the parent
                del executor  # it keeps the weights mapped, and pages that are mapped twice stay in memory
                continue
            (file,) = tmp_path.glob("packed/*.packed")
            os.truncate(file, file.stat().st_size // 2)
            with pytest.raises(EngineDeadError, match="the packed weights could not be read: the file was truncated"):
                answers(llm)
    note = re.search(
        r"weights take 92\.\d MiB, .* (\d+) of 30 layers \((.*) MiB\) stay in memory, and each token reads (.*) MiB "
        r"from the disk at .*/s: expect at most [\d.e+]+ tokens/s",
        record.getMessage(),
    )
    assert note is not None, record.getMessage()
    assert 1 <= int(note[1]) < 30
    assert float(note[2]) + float(note[3]) == pytest.approx(92, abs=1.5)


def test_a_plan_of_it(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, so the exit code is 0. It is 3 where the disk, or the rest of the memory, has no room for it."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget((256 + 100) * MIB))
    plan = octavo_here("plan", smollm2_path, "--ctx", "256")
    assert plan.returncode == 0, plan.stderr
    found = re.search(
        r"runs from disk.*from disk +(\d+) of 30 layers \(.* MiB\) stay in memory; a token reads .* MiB at "
        r".*/s, measured: at most [\d.e+]+ tokens/s for each user",
        plan.stdout,
        re.DOTALL,
    )
    assert found is not None, plan.stdout
    assert 1 <= int(found[1]) < 30
    assert "--max-model-len 256" in plan.stdout
    assert octavo_here("plan", smollm2_path).returncode == 0  # with the context that is left
    small = octavo_here("plan", smollm2_path, "--pack-cache-size", "10MiB")
    assert small.returncode == 3
    assert "more than --pack-cache-size allows (10.0 MiB)" in small.stderr
    long = octavo_here("plan", smollm2_path, "--ctx", "8192")
    assert long.returncode == 3
    assert "because workspace and KV cache alone do not fit" in long.stderr


def test_an_option_against_it(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget(80 * MIB))
    with pytest.raises(InsufficientMemoryError, match=r"only 80.0 MiB .* or leave out --no-pack-cache to run it from"):
        LLM(str(smollm2_path), pack_cache=False)


def test_a_disk_without_room(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are never packed into the memory that they do not fit."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget((256 + 60) * MIB))
    caplog.set_level(logging.WARNING)
    with pytest.raises(InsufficientMemoryError, match="packed weights could not be saved to disk"):
        LLM(str(smollm2_path), max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, pack_cache_size="10MiB")
    assert "more than the limit for all such files (10 MB)" in caplog.text


def graph_and_bytes(name: str) -> tuple[Graph, dict[Parameter, int]]:
    graph, _ = tiny_models.tiny_graph(name)
    return graph, {p: 4 * int(np.prod(p.shape)) for p in graph.parameters}


def test_the_first_matrices_stay() -> None:
    graph, num_bytes = graph_and_bytes("llama")
    matrices = {p: n for p, n in num_bytes.items() if len(p.shape) > 1}
    table = next(p for p in matrices if "embed" in p.name)  # read by rows: left to the system
    previous = None
    for share in (0.9, 0.5, 0.1):
        plan = plan_paging(graph, num_bytes, int(share * sum(matrices.values())))
        order = [p for p in graph.parameters if p in matrices and p != table]
        assert list(plan.streamed) == order[len(order) - len(plan.streamed) :]
        assert plan.resident_bytes + sum(num_bytes[p] for p in plan.streamed) == sum(num_bytes[p] for p in order)
        assert plan.resident_bytes + plan.ahead_bytes <= plan.memory_bytes
        assert plan.bytes_per_token >= sum(num_bytes[p] for p in plan.streamed)
        assert previous is None or plan.bytes_per_token > previous
        previous = plan.bytes_per_token


def test_experts_are_left_to_the_system() -> None:
    graph, num_bytes = graph_and_bytes("mixtral")
    experts = {p for p in graph.parameters if ".experts." in p.name}
    whole = sum(n for p, n in num_bytes.items() if p not in experts)
    plan = plan_paging(graph, num_bytes, 2 * whole)
    assert not experts & set(plan.streamed)
    assert plan.resident_layers == 0
    assert 0 < plan.bytes_per_token < sum(num_bytes[p] for p in experts)


def test_the_rate_for_a_file_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hub model only the headers are here: little is written to measure the disk, and nothing is left."""
    file, measured = tmp_path / "x", []

    def rate_of(path: Path) -> float:
        measured.append((path.parent, path.stat().st_size))
        return 1e9

    with file.open("wb") as opened:
        opened.truncate(1 << 30)
    assert 1e6 < read_rate(file) < 1e12
    monkeypatch.setattr(rates, "_rate_of", rate_of)
    assert read_rate(file) == 1e9
    assert measured == [(tmp_path, 64 * MIB)]
    assert [*tmp_path.iterdir()] == [file]


def test_the_rate_of_reads(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(20 * MIB + 5))
    assert 1e6 < read_rate(file) < 1e12
