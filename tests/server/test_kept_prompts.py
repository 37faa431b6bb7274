"""Prompts that outlive a server: `octavo serve --prompt-cache-dir`, ended by force and started again."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.support.server import RunningServer, running_server
from tests.support.waiting import wait_until

PROMPT = "The sky is blue because of the way in which air scatters light. " * 6


def num_cached(server: RunningServer, key: str | None = None) -> int:
    """The cached tokens of the prompt, as the answer's usage says."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def written(server: RunningServer) -> float:
    """The bytes that the store has written."""
    rows = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if "prompt_store_written_bytes_total{" in row)


def test_a_prompt_outlives_a_server_that_is_killed(smollm2_path: Path, tmp_path: Path) -> None:
    arguments = (
        f"smollm2={smollm2_path}",
        "--prompt-cache-dir",
        str(tmp_path / "kept"),
        "--prompt-cache-size",
        "64MiB",
    )
    with running_server(*arguments, exit_code=-signal.SIGKILL) as server:
        assert num_cached(server) == 0
        wait_until(lambda: written(server) > 0, "nothing was written")
        for process in (server.process, *server.children()):
            process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running_server(*arguments) as server:
        assert num_cached(server) > 16


@pytest.mark.parametrize("is_kept", [False, True])
def test_prompts_of_keys_are_written_only_if_asked(smollm2_path: Path, tmp_path: Path, is_kept: bool) -> None:
    folder = tmp_path / "kept"
    arguments = (f"smollm2={smollm2_path}", "--api-key", "one", "--protect-health", "--prompt-cache-dir", str(folder))
    more = ("--prompt-cache-private", "--batch-store", str(tmp_path / "store")) if is_kept else ()
    for expected in (False, is_kept):
        with running_server(*arguments, *more) as server:
            assert (num_cached(server, "one") > 16) is expected
