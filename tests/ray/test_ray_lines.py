"""`octavo batch --ray`: all kinds of lines through actors of Ray Data, and the rest of them after an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.batches.lines import BatchLine, LineResult
from octavo.cli.batch import batch
from octavo.ray.batches import AnswerLines, answer_lines

LINES: list[dict[str, Any]] = [
    {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "abcd", "max_tokens": 3}},
    {"prompt": "ab", "max_tokens": 2},
    {"custom_id": "wrong", "url": "/v1/completions", "body": {"prompt": 7}},
    {"custom_id": "broken", "url": "/v1/elsewhere", "body": {}},
    *({"custom_id": f"n{i}", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}} for i in range(70)),
]
OPTIONS = ("--kv-cache-memory", "16MiB", "--ray", "--ray-cpus", "1", "--ray-actors", "2")


def records(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({record["custom_id"] for record in found}) == len(found)
    return {record["custom_id"]: record for record in found}


@pytest.mark.usefixtures("cluster")
def test_lines_are_answered_and_resumed_by_id(tiny_path: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    arguments = [str(source), str(output), "-m", str(tiny_path), *OPTIONS]
    run = CliRunner().invoke(batch, arguments, standalone_mode=False)
    assert type(run.exception).__name__ == "FailedLinesError", run.exception  # two are wrong
    answers = records(output)
    assert len(answers) == len(LINES)
    assert answers["text"]["response"]["body"]["usage"]["completion_tokens"] <= 3
    assert answers["wrong"]["response"]["status_code"] == 400
    assert answers["broken"]["error"]["code"] == "invalid_request"
    kept = output.read_bytes().splitlines(keepends=True)[:40]
    output.write_bytes(b"".join(kept) + b'{"id": "torn')
    CliRunner().invoke(batch, arguments, standalone_mode=False)
    again = records(output)
    assert again.keys() == answers.keys()
    assert output.read_bytes().splitlines(keepends=True)[:40] == kept
    texts = [{name: each["response"]["body"].get("choices") for name, each in found.items() if each["response"]}
             for found in (answers, again)]  # fmt: skip
    assert texts[0] == texts[1]  # although they are drawn


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for options, name in ((["--ray", "--rows", "2"], "--rows"), (["--ray-cpus", "2"], "--ray-cpus")):
        run = CliRunner().invoke(batch, [str(tmp_path / "in"), str(tmp_path / "out"), *options], standalone_mode=False)
        assert name in str(run.exception)


def test_an_actor_answers_its_block_without_a_cluster(tiny_path: Path) -> None:
    import numpy as np

    actor = AnswerLines(str(tiny_path), {"num_threads": 1, "kv_cache_memory": "16MiB"})
    block = {
        "number": np.array([1, 2]),
        "custom_id": np.array(["a", "b"], dtype=object),
        "url": np.array(["/v1/completions"] * 2, dtype=object),
        "body": np.array([json.dumps({"prompt": "ab", "max_tokens": 2}), json.dumps({"prompt": 7})], dtype=object),
    }
    results = {found["custom_id"]: found for found in map(json.loads, actor(block)["result"])}
    assert results["a"]["status"] == 200
    assert results["a"]["usage"]["output_tokens"] <= 2
    assert results["b"]["status"] == 400
    actor.close()


def test_without_ray_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    from octavo.errors import UsageError

    original = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    seen: list[LineResult] = []
    with pytest.raises(UsageError, match=r"pip install 'octavo\[ray\]'"):
        answer_lines([BatchLine(1, "a", "/v1/completions", {})], seen.append, "m", {}, num_actors=1, num_cpus=1)
