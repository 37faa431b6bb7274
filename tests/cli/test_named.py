"""`octavo create` and `octavo cp`, and the commands that know the names they make."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from octavo import LLM, SamplingParams
from octavo.cli.serve import configs_of
from octavo.errors import UsageError
from octavo.loader.modelfile import read_modelfile
from octavo.loader.named_models import expanded, find
from tests.support.processes import octavo_here
from tests.support.server import running_server

MODELFILE = '''# a comment
FROM ./model.gguf
PARAMETER temperature 0
PARAMETER num_predict 5
PARAMETER num_ctx 48
PARAMETER stop "x y"
PARAMETER stop zz
SYSTEM """ab
cd"""
TEMPLATE """{% for m in messages %}{{ m.content }}b{% endfor %}"""
LICENSE whatever
'''


@pytest.fixture
def modelfile(tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").symlink_to(tiny_chat)
    path = tmp_path / "Modelfile"
    path.write_text(MODELFILE)
    return path


def test_a_modelfile_makes_a_name_that_every_command_knows(modelfile: Path) -> None:
    made = octavo_here("create", "mine", "-f", modelfile)
    assert made.returncode == 0, made.stderr
    assert "octavo run mine" in made.stdout
    base = str(modelfile.parent / "model.gguf")
    report = json.loads(octavo_here("run", "mine", "abab", "--json").stdout)
    same = octavo_here("run", base, "ab\ncdbababb", "--raw", "--temperature", "0", "-n", "5", "--json")
    assert report["token_ids"] == json.loads(same.stdout)["token_ids"]
    assert len(report["token_ids"]) <= 5
    longer = json.loads(octavo_here("run", "mine", "abab", "--json", "-n", "7", "--ignore-eos").stdout)
    assert len(longer["token_ids"]) == 7  # what is given wins
    assert f"made from {base}" in octavo_here("list").stdout
    shown = json.loads(octavo_here("show", "mine", "--json").stdout)
    assert (shown["made_from"], shown["made_with"]["max_model_len"]) == (base, 48)
    assert "system prompt" in octavo_here("show", "mine").stdout
    config = configs_of(["mine"], {}, [])["mine"]
    assert (config.model, config.max_model_len, config.system_prompt) == (base, 48, "ab\ncd")
    assert config.sampling_overrides == {"temperature": 0.0, "max_tokens": 5, "stop": ("x y", "zz")}
    with LLM("mine") as llm:
        assert llm.max_model_len == 48
        [answer] = llm.chat("abab", SamplingParams(temperature=0, max_tokens=5))
        assert answer.outputs[0].token_ids == report["token_ids"]


def test_a_copy_has_the_settings_and_a_name_is_deleted_alone(modelfile: Path) -> None:
    octavo_here("create", "mine", "-f", modelfile)
    assert octavo_here("cp", "mine", "other").returncode == 0
    first, second = find("mine"), find("other:latest")
    assert first is not None
    assert second is not None
    assert (first.model, first.options) == (second.model, second.options)
    said = octavo_here("rm", "mine").stdout
    assert said == f"deleted the name mine; {first.model} is kept\n"
    assert find("mine") is None
    assert Path(first.model).exists()
    assert octavo_here("cp", "qwen3:4b", "big").returncode == 0
    assert find("big") is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("PARAMETER mirostat 1", "line 1: PARAMETER mirostat is not supported; leave it out"),
        ("PARAMETER temperature warm", "PARAMETER temperature is 'warm'; it must be a number"),
        ("TEMPLATE {{ .Prompt }}", "TEMPLATE is in Go's template language, but Octavo uses Jinja; leave it out"),
        ("MESSAGE user hi", "line 1: MESSAGE is not supported; the supported instructions are FROM"),
        ("SYSTEM", "line 1: SYSTEM has no value"),
        ('FROM smollm2\nSYSTEM """a\nPARAMETER top_k 3', 'line 2: the text has no closing """'),
        ('FROM smollm2\nSYSTEM """a\nb""" c\n', 'line 3: there is text after the closing """'),
        ("# nothing", "the instruction FROM is missing; begin with FROM"),
        ("FROM qwen9:4b", "qwen9:4b: no such file or model; did you mean qwen"),
        ("FROM smollm2\nPARAMETER top_p 7", "Modelfile: --top-p is 7; it must be"),
    ],
)
def test_a_modelfile_that_cannot_be_had(modelfile: Path, line: str, said: str) -> None:
    modelfile.write_text(line + "\n")
    result = octavo_here("create", "mine", "-f", modelfile)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert find("mine") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../x", "is not a valid name; use letters"),
        ("smollm2", "choose another name"),
        ("qwen3:4b", "choose another name"),
    ],
)
def test_a_name_that_cannot_be_taken(modelfile: Path, name: str, said: str) -> None:
    result = octavo_here("create", name, "-f", modelfile)
    assert (result.returncode, said in result.stderr) == (2, True)


def test_tabs_a_byte_order_mark_and_quotes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    path.write_text('\ufeffFROM\tsmollm2\nPARAMETER\ttop_k\t3\nSYSTEM """say\u2028"hi""""\n', "utf-8")
    model, options = read_modelfile(path, "mine")
    assert model == "smollm2"
    assert options == {"system_prompt": 'say\u2028"hi"', "override_generation_config": {"top_k": 3}}


def test_names_are_where_they_are_looked_for(modelfile: Path, tmp_path: Path) -> None:
    """`models` that others may write to is no reason to write elsewhere; `models/named` is refused then."""
    named = tmp_path / "cache" / "models" / "named"
    named.mkdir(parents=True)
    named.chmod(0o777)
    refused = octavo_here("create", "mine", "-f", modelfile)
    assert refused.returncode != 0
    assert "other users may write to it; run chmod 700 on it, or set OCTAVO_CACHE" in refused.stderr
    named.chmod(0o700)
    named.parent.chmod(0o777)
    assert octavo_here("create", "mine:latest", "-f", modelfile).returncode == 0
    assert find("mine") is not None
    unknown = octavo_here("rm", "his").stderr
    assert "there is no model 'his'; available: mine" in unknown


def test_given_options_over_those_of_a_name(modelfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modelfile.write_text(MODELFILE + "ADAPTER ./adapter\n")
    octavo_here("create", "mine", "-f", modelfile)
    _, stored = expanded("mine", {})
    assert stored["default_lora"] in stored["lora_modules"]
    _, options = expanded("mine", {"lora_modules": {"x": "y"}, "override_generation_config": '{"top_k": 3}'})
    assert (options["lora_modules"], "default_lora" in options) == ({"x": "y"}, False)
    assert {"top_k": 3, "max_tokens": 5}.items() <= options["override_generation_config"].items()
    assert expanded("mine", {"lora_modules": {"x": "y"}, "default_lora": "x"})[1]["default_lora"] == "x"
    for wrong in ("{", "[1]"):
        with pytest.raises(UsageError, match="override_generation_config is"):
            expanded("mine", {"override_generation_config": wrong})
    with pytest.raises(UsageError, match="model must be a name"):
        LLM(tmp_path / "model.gguf")  # type: ignore[arg-type]
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    octavo_here("cp", "smollm2", "small")
    assert expanded("small", {}) == ("smollm2", {})


def test_a_server_gives_a_name_its_settings(modelfile: Path, tmp_path: Path) -> None:
    octavo_here("create", "mine", "-f", modelfile)
    report = json.loads(octavo_here("run", "mine", "abab", "--json").stdout)
    environment = {"OCTAVO_CACHE": str(tmp_path / "cache")}
    with running_server("mine", env=environment) as server:
        body = {"model": "mine", "messages": [{"role": "user", "content": "abab"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(report["prompt_token_ids"])
    assert answer["choices"][0]["message"]["content"] == report["text"]
