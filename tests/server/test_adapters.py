"""Adapters by name in every protocol, loaded and unloaded at run time, and found in a folder. The engine is real."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.adapters.resolve import resolve_adapter
from octavo.cli.serve import configs_of as serve_configs
from octavo.cli.serve import serve as serve_command
from octavo.config import EngineConfig
from octavo.errors import ModelLoadError, UsageError
from octavo.server.config import ServerConfig
from octavo.server.models.served_adapters import AdapterGiven, AdapterQuota, ServedAdapters
from tests.adapters.test_engine import OPTIONS, save_adapter
from tests.support.text_models import save_decoder
from tests.support.wired import WiredClient, wired_app

PROMPT = "ab ba abc"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ADMIN = {"authorization": "Bearer admin"}
KEYS = [{"authorization": f"Bearer key{i}"} for i in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters `sql` and `poem`, and beside the folder one that its names must not reach."""
    root = tmp_path_factory.mktemp("root")
    (root / "adapters").mkdir()
    for seed, name in enumerate(("adapters/sql", "adapters/poem", "outside")):
        save_adapter(model, root / name, seed)
    (root / "adapters" / "link").symlink_to(root / "outside")
    (root / "adapters" / ".hidden").symlink_to(root / "adapters" / "sql")
    return root / "adapters"


@asynccontextmanager
async def serving(
    model: Path, known: dict[str, Path] | None = None, keys: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, WiredClient]]:
    """known: adapters of the server's options. options: of `ServedAdapters`."""
    adapters = ServedAdapters(["model"], **options)
    for name, path in (known or {}).items():
        adapters.put(adapters.new(AdapterGiven(name, str(path)), path))
    server = ServerConfig(api_key=keys, admin_key=("admin",) if keys else ())
    config = EngineConfig(model=str(model), enable_lora=True, **OPTIONS)  # type: ignore[arg-type]
    async with wired_app(config, server, adapters) as (http, client):
        yield http, client


async def text_of(http: httpx.AsyncClient, name: str, headers: dict[str, str] | None = None, **fields: Any) -> str:
    body = {"model": name, "prompt": PROMPT, **GREEDY, **fields}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return str(answer.json()["choices"][0]["text"])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_every_protocol_finds_an_adapter_by_name(model: Path, folder: Path) -> None:
    async def work() -> None:
        async with serving(model, {"sql": folder / "sql"}) as (http, client):
            expected, base = await text_of(http, "sql"), await text_of(http, "model")
            assert expected != base
            assert await text_of(http, "model", adapter="sql") == expected
            options = {"num_predict": 8, "temperature": 0}
            requests: dict[str, Any] = {
                "/completion": {"model": "sql", "prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True},
                "/api/generate": {
                    "model": "sql:latest",
                    "prompt": PROMPT,
                    "raw": True,
                    "stream": False,
                    "options": options,
                },
                "/generate": {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "adapter_id": "sql"}},
            }
            for path, body in requests.items():
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                found = answer.json()
                text = found.get("content") or found.get("response") or found.get("generated_text")
                assert text, path
                assert expected.startswith(text), path
            assert {request.options.adapter for request in client.requests} == {"0:1:sql", ""}
            unknown = {"inputs": PROMPT, "parameters": {"adapter_id": "poem"}}
            answer = await http.post("/generate", json=unknown)
            assert (answer.status_code, "available: sql" in answer.text) == (400, True)
            answer = await http.post("/v1/completions", json={"model": "model", "prompt": PROMPT, "adapter": "poem"})
            assert (answer.status_code, "there is no adapter 'poem'" in answer.text) == (400, True)

    run(work)


def test_the_list_of_models_and_the_metrics(model: Path, folder: Path) -> None:
    async def work() -> None:
        async with serving(model, {"sql": folder / "sql"}) as (http, _):
            await text_of(http, "sql")
            cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
            assert cards["model"]["parent"] is None
            assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("model", str(folder / "sql"))
            assert (await http.get("/v1/models/sql")).json() == cards["sql"]
            figures = (await http.get("/metrics")).text
            assert 'vllm:lora_loads_total{adapter="sql"} 1.0' in figures
            assert 'vllm:lora_requests_total{adapter="sql"} 1.0' in figures
            assert "vllm:lora_requests_info{" in figures

    run(work)


def test_loading_and_unloading(model: Path, folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(model, allows_all=True) as (http, _):
            load = {"lora_name": "sql", "lora_path": str(folder / "sql")}
            answer = await http.post("/v1/load_lora_adapter", json=load)
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
            first = await text_of(http, "sql")
            answer = await http.post("/v1/load_lora_adapter", json=load)
            assert (answer.status_code, "has been loaded already" in answer.text) == (400, True)
            other = {**load, "lora_path": str(folder / "poem"), "load_inplace": True}
            assert (await http.post("/v1/load_lora_adapter", json=other)).status_code == 200
            second = await text_of(http, "sql")
            assert second != first
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
            body = {"model": "sql", "prompt": PROMPT}
            assert (await http.post("/v1/completions", json=body)).status_code == 404
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404
            assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200
            assert await text_of(http, "sql") == first
            wrong = "not an adapter"
            for path, reason in ((tmp_path / "no", "no such file"), (tmp_path, wrong), (model, wrong)):
                answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(path)})
                assert (answer.status_code, reason in answer.text) == (400, True), answer.text
            named = {**load, "lora_name": "model"}
            assert "is the name of a model" in (await http.post("/v1/load_lora_adapter", json=named)).text

    run(work)


def test_an_adapter_that_is_not_supported_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    wrong = save_adapter(model, tmp_path / "wrong", 5)
    settings = json.loads((wrong / "adapter_config.json").read_text())
    (wrong / "adapter_config.json").write_text(json.dumps(settings | {"lora_bias": True}))

    async def work() -> None:
        async with serving(model, allows_all=True) as (http, _):
            answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(wrong)})
            assert answer.status_code == 400
            assert "lora_bias" in answer.text
            assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["model"]

    run(work)


def test_unloading_lets_a_running_request_end(model: Path, folder: Path) -> None:
    async def work() -> None:
        async with serving(model, {"sql": folder / "sql"}, allows_all=True) as (http, client):
            expected = await text_of(http, "sql", max_tokens=40)
            await text_of(http, "sql", max_tokens=1)  # the next one is not the first of the engine
            request = asyncio.create_task(text_of(http, "sql", max_tokens=40))
            while len(client.requests) < 3:
                await asyncio.sleep(0)
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
            assert await request == expected

    run(work)


def test_an_engine_that_was_restarted_is_told_again(model: Path, folder: Path) -> None:
    async def work() -> None:
        async with serving(model, {"sql": folder / "sql"}) as (http, client):
            expected = await text_of(http, "sql")
            await client.remove_adapter("0:1:sql")
            assert await text_of(http, "sql") == expected

    run(work)


def test_keys_and_quotas(model: Path, folder: Path) -> None:
    """Without leave, only an administrator's key loads; with it, each key has its own number and bytes."""

    async def work() -> None:
        load = {"lora_name": "sql", "lora_path": str(folder / "sql")}
        async with serving(model, keys=("key0", "key1")) as (http, _):
            for headers, status in ((KEYS[0], 403), ({}, 401), (ADMIN, 200)):
                answer = await http.post("/v1/load_lora_adapter", json=load, headers=headers)
                assert answer.status_code == status, answer.text
            assert await text_of(http, "sql", KEYS[0])
            answer = await http.post("/lora-adapters", json=[], headers=KEYS[0])
            assert answer.status_code == 403
        quota = AdapterQuota(1, 1 << 20)
        async with serving(model, keys=("key0", "key1"), allows_all=True, quota=quota) as (http, _):
            other = {"lora_name": "poem", "lora_path": str(folder / "poem")}
            for body, headers, status in ((load, KEYS[0], 200), (other, KEYS[0], 429), (other, KEYS[1], 200)):
                answer = await http.post("/v1/load_lora_adapter", json=body, headers=headers)
                assert answer.status_code == status, answer.text
            replace = {**load, "load_inplace": True}
            assert (await http.post("/v1/load_lora_adapter", json=replace, headers=KEYS[0])).status_code == 200
            for headers, status in ((KEYS[1], 403), (KEYS[0], 200)):
                answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=headers)
                assert answer.status_code == status, answer.text
        async with serving(model, keys=("key0",), allows_all=True, quota=AdapterQuota(9, 100)) as (http, _):
            answer = await http.post("/v1/load_lora_adapter", json=load, headers=KEYS[0])
            assert (answer.status_code, "--lora-quota-bytes" in answer.text) == (429, True)

    run(work)


def test_a_folder_of_adapters(model: Path, folder: Path) -> None:
    """Its names need no loading. Nothing leads out of it, and only an admin's key loads what is not in it."""

    async def work() -> None:
        async with serving(model, {"known": folder / "sql"}, folder=folder, allows_all=True) as (http, _):
            assert await text_of(http, "sql") == await text_of(http, "known")
            assert await text_of(http, "poem") != await text_of(http, "known")
            names = ("../outside", "link", ".hidden", "..", ".", "sql/../sql", str(folder / "sql"), "sql\0", "no", "")
            for name in names:
                answer = await http.post("/v1/completions", json={"model": name, "prompt": PROMPT})
                assert answer.status_code == 404, (name, answer.text)
            for path in ("../outside", str(folder.parent / "outside"), "link"):
                answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
                assert answer.status_code == 403, answer.text
            answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "poem"})
            assert answer.status_code == 200, answer.text
            assert await text_of(http, "x") == await text_of(http, "poem")

    run(work)


def test_new_files_in_the_folder_are_read_at_the_next_request(model: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "sql", tmp_path / "mine")

    async def work() -> None:
        async with serving(model, {"sql": folder / "sql", "poem": folder / "poem"}, folder=tmp_path) as (http, _):
            assert await text_of(http, "mine") == await text_of(http, "sql")
            shutil.rmtree(tmp_path / "mine")
            shutil.copytree(folder / "poem", tmp_path / "mine")
            assert await text_of(http, "mine") == await text_of(http, "poem")
            shutil.rmtree(tmp_path / "mine")
            answer = await http.post("/v1/completions", json={"model": "mine", "prompt": PROMPT})
            assert answer.status_code == 404
            tags = (await http.post("/api/show", json={"model": "sql"})).json()
            assert tags["modelfile"].endswith(f"ADAPTER {folder / 'sql'}\n")
            listed = (await http.get("/api/tags")).json()["models"]
            assert {"model", "sql", "poem"} <= {each["name"] for each in listed}
            assert {each["name"]: each["details"]["parent_model"] for each in listed}["sql"] == "model"

    run(work)


def test_numbers_and_scales_of_llama_cpp(model: Path, folder: Path) -> None:
    async def work() -> None:
        known = {"sql": folder / "sql", "poem": folder / "poem"}
        async with serving(model, known, allows_all=True) as (http, _):

            async def completion(**fields: Any) -> httpx.Response:
                body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True, **fields}
                return await http.post("/completion", json=body)

            base, sql, poem = [await text_of(http, name) for name in ("model", "sql", "poem")]
            listed = (await http.get("/lora-adapters")).json()
            assert [(each["id"], each["path"], each["scale"]) for each in listed] == [
                (0, str(folder / "sql"), 0.0),
                (1, str(folder / "poem"), 0.0),
            ]
            assert (await completion(lora=[{"id": 1, "scale": 1.0}])).json()["content"] == poem
            half = (await completion(lora=[{"id": 1, "scale": 0.25}])).json()["content"]
            assert half != poem
            assert (await completion(lora=[{"id": 0, "scale": 0.0}])).json()["content"] == base
            answer = await completion(lora=[{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}])
            assert (answer.status_code, "sql and poem at once" in answer.text) == (400, True)
            answer = await completion(lora=[{"id": 7, "scale": 1.0}])
            assert (answer.status_code, "no adapter with id 7" in answer.text) == (400, True)
            answer = await http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}])
            assert [each["scale"] for each in answer.json()] == [1.0, 0.0]
            assert (await completion()).json()["content"] == sql
            assert await text_of(http, "model") == sql
            assert (await completion(lora=[])).json()["content"] == base
            large = " " * 200_000
            repeated = '[{"id": 0, "scale": 1, "scale": 2}]'
            for wrong in ('{"id": 0}', "[{}]", "[", '[{"id": 0, "scale": "x"}]', repeated, "[" * 100_000, large):
                answer = await http.post("/lora-adapters", content=wrong, headers={"content-type": "application/json"})
                assert answer.status_code == (413 if wrong is large else 400), answer.text
            await http.post("/lora-adapters", json=[])
            assert await text_of(http, "model") == base

    run(work)


def test_adapters_of_the_command_line() -> None:
    """Several values behind the flag, JSON, scales, and the model that each is for."""
    words = ["base.gguf", "--lora-modules", "sql=./a:0.5", "chat=org/name", '{"name": "x", "path": "p"}', "--port", "1"]
    context = serve_command.make_context("serve", words)
    assert context.params["models"] == ("base.gguf",)
    assert context.params["port"] == 1
    found = AdapterGiven.parse_all(context.params["lora_modules"])
    expected = [("sql", "./a", None, 0.5), ("chat", "org/name", None, 1.0), ("x", "p", None, 1.0)]
    assert [(each.name, each.source, each.parent, each.scale) for each in found] == expected
    configs = serve_configs(
        ["a=m1", "b=m2"], {"lora_modules": '[{"name": "x", "path": "p", "base_model_name": "b"}]'}, ()
    )
    assert configs["a"].adapters == {}
    assert configs["b"].adapters == {"x": ("p", 1.0)}
    for text, reason in (
        ("sql", "write NAME=PATH"),
        ("[1]", "write NAME=PATH"),
        ("[", "not valid JSON"),
        ('{"name": "x"}', "an object must have name and path"),
        ('{"name": "x", "path": "p", "rank": 4}', "an object must have name and path"),
    ):
        with pytest.raises(UsageError, match=reason):
            AdapterGiven.parse_all(text)
    with pytest.raises(UsageError, match="two adapters named 'x'"):
        serve_configs(["m"], {"lora_modules": "x=a x=b"}, ())


def test_an_adapter_of_a_modelfile(model: Path, folder: Path, tmp_path: Path) -> None:
    """Ollama's `ADAPTER`, relative to the file; and what cannot be found is said."""
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM llama3\n# a comment\nADAPTER {os.path.relpath(folder / 'sql', tmp_path)}\n")
    assert resolve_adapter(str(modelfile)).resolve() == (folder / "sql").resolve()
    modelfile.write_text("FROM llama3\nADAPTER ./a\nADAPTER ./b\n")
    with pytest.raises(ModelLoadError, match="2 instructions ADAPTER"):
        resolve_adapter(str(modelfile))
    modelfile.write_text("FROM llama3\nADAPTER ./a\n")
    with pytest.raises(ModelLoadError, match=r"ADAPTER \./a: no such file"):
        resolve_adapter(str(modelfile))
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        resolve_adapter(str(tmp_path / "nothing"))

    async def work() -> None:
        modelfile.write_text(f"FROM llama3\nADAPTER {folder / 'sql'}\n")
        async with serving(model, {"sql": folder / "sql"}, allows_all=True) as (http, _):
            answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(modelfile)})
            assert answer.status_code == 200, answer.text
            assert await text_of(http, "x") == await text_of(http, "sql")
            shown = (await http.post("/api/show", json={"model": "x"})).json()
            assert shown["modelfile"] == f"FROM {model}\nADAPTER {modelfile}\n"

    run(work)
