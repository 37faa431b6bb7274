"""`octavo ps` and `octavo stop`, with real servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.server.registry import registered, running_servers
from tests.support.processes import Terminal, octavo
from tests.support.server import START_S, running_server, start_server
from tests.support.witness import faulty


def listed(cache: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(octavo("ps", "--json", env={"OCTAVO_CACHE": str(cache)}).stdout)
    return found


def test_ps_and_stop(smollm2_path: Path, tmp_path: Path) -> None:
    env = {"OCTAVO_CACHE": str(tmp_path)}
    assert "No server is running" in octavo("ps", env=env).stdout
    refused = octavo("stop", env=env)
    assert (refused.returncode, "you have no running server" in refused.stderr) == (2, True)
    with running_server(smollm2_path, env=env) as server:
        [facts] = listed(tmp_path)
        assert (facts["pid"], facts["url"], facts["state"]) == (server.process.pid, server.url, "ready")
        assert (facts["models"], facts["requests"]) == ([smollm2_path.stem], 0)
        assert server.url in octavo("ps", env=env).stdout
        assert "'other' matches no server of yours" in octavo("stop", "other", env=env).stderr
        unnamed = octavo("stop", env=env)
        assert (unnamed.returncode, f"running: {server.process.pid} at" in unnamed.stderr) == (2, True)
        with Terminal("stop", env=env) as terminal:
            terminal.wait_for(f"Stop {server.process.pid} at {server.url}")
            terminal.type("n\r")
            assert terminal.wait() == 130
        stopped = octavo("stop", server.url.rpartition(":")[2], env=env)  # its port
        assert stopped.stdout.startswith(f"stopped {server.process.pid} ")
        assert server.wait() == 0
    assert listed(tmp_path) == []


SEEDS: list[dict[str, Any]] = [{}, {}, {"seed": 7}, {"seed": 8}]


def test_the_names_and_the_sampling_of_a_model(smollm2_path: Path, tmp_path: Path) -> None:
    """A file is served under its stem; its path, an alias and `default` mean it too."""
    env = {"OCTAVO_CACHE": str(tmp_path)}
    body = {"prompt": "a", "max_tokens": 1}
    with running_server(smollm2_path, env=env) as server, server.client as client:
        [card] = client.get("/v1/models").json()["data"]
        assert (card["id"], card["aliases"], card["root"]) == (smollm2_path.stem, [], str(smollm2_path))
        for name in (None, smollm2_path.stem, str(smollm2_path), "default"):
            answer = client.post("/v1/completions", json={**body, "model": name}).json()
            assert answer["model"] == smollm2_path.stem
        assert client.get(f"/v1/models/{smollm2_path}").json()["id"] == smollm2_path.stem
        assert client.post("/v1/completions", json={**body, "model": "gpt-4o"}).status_code == 404
        stopped = octavo("stop", str(smollm2_path), env=env)
        assert stopped.stdout.startswith(f"stopped {server.process.pid} ")
    sampling = ("--temp", "1.5", "--seed", "7", "--override-generation-config", '{"top_k": 40, "seed": 1}')
    with running_server(smollm2_path, "--alias", "gpt-4o, small", "-a", "other", *sampling, env=env) as server:
        [card] = server.client.get("/v1/models").json()["data"]
        assert (card["id"], card["aliases"]) == ("gpt-4o", ["small", "other"])
        defaults = card["default_sampling_params"]
        assert (defaults["temperature"], defaults["seed"], defaults["top_k"]) == (1.5, 7, 40)
        assert card["default_sampling_source"].endswith("but top_k, seed, temperature of override_generation_config")
        answers = [server.client.post("/v1/completions", json={"prompt": "a", **seed}).json() for seed in SEEDS]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] == texts[2] != texts[3]
        for name in ("gpt-4o", "small", "other", str(smollm2_path), "default"):
            answer = server.client.post("/v1/completions", json={**body, "model": name}).json()
            assert answer["model"] == "gpt-4o"
        chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": False, "options": {"num_predict": 1}}
        assert server.client.post("/api/chat", json={**chat, "model": "small:latest"}).json()["model"] == "gpt-4o"


def test_a_server_that_loads_and_one_that_was_killed(smollm2_path: Path, tmp_path: Path) -> None:
    env = {"OCTAVO_CACHE": str(tmp_path)}
    loading = start_server(smollm2_path, env={**faulty("load:sleep:1"), **env})
    killed = start_server(smollm2_path, env={**faulty("load:sleep:1"), **env})
    try:
        for server in (loading, killed):
            server.wait_listening()
            server.wait_for_line(" server ", START_S)
        assert len(running_servers_of(tmp_path, 2)) == 2
        assert "2 servers are running: name one or give --all" in octavo("stop", env=env).stderr
        killed.kill()
        [facts] = running_servers_of(tmp_path, 1)
        assert (facts["pid"], facts["state"]) == (loading.process.pid, "loading or ending")
        assert octavo("stop", "--all", env=env).returncode == 0
        assert loading.wait() == 0
    finally:
        loading.kill()
        killed.kill()


def running_servers_of(cache: Path, count: int) -> list[dict[str, Any]]:
    found = listed(cache)
    assert len(found) == count
    return found


def test_a_later_process_of_the_same_number_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with registered("http://127.0.0.1:1", ("m",), 0.0):
        [server] = running_servers()
        assert server.pid == os.getpid()
        file = tmp_path / "servers" / f"{server.pid}.json"
        text = file.read_text()
        file.write_text(text.replace(f'"started":{server.started}', f'"started":{server.started - 1}'))
        assert running_servers() == []
        assert not file.exists()


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "1.json").write_text("{")
    (tmp_path / "servers" / "2.json").write_text("[" * 100_000)
    assert running_servers() == []
