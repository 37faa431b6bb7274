"""The small examples run from start to end, with a tiny model or a server that answers by script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.generation_request import GenerationRequest
from tests.support.fake_client import Script, read_tokenizer
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.text_models import save_decoder

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = (
    "{% if tools %}Call tools as <tool_call>\\n{json}\\n</tool_call>: {{ tools | tojson }}\\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\\n"
    "{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_decoder(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def run(name: str, *arguments: object, typed: str = "", **environment: str) -> str:
    """The output of an example, which has to end without an error."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chat_answers_and_ends_with_an_empty_line(model: str) -> None:
    """One question: a random model answers at any length, and its context is small."""
    output = run("chat.py", model, typed="Hi\n\n")
    assert output.startswith("> ")
    assert output.endswith("\n> ")


def test_answers_are_streamed_side_by_side(model: str) -> None:
    lines = run("streaming.py", model).splitlines()
    assert {line[:3] for line in lines} == {"[0]", "[1]", "[2]"}


def test_an_answer_becomes_an_object(model: str) -> None:
    assert "years old." in run("structured_output.py", model)


def test_the_nearest_texts_come_first(model: str) -> None:
    scores = [float(line.split()[0]) for line in run("semantic_search.py", "rice", model).splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 4


def test_a_column_of_a_data_frame_is_answered(model: str, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    source, target = tmp_path / "reviews.csv", tmp_path / "answers.csv"
    pd.DataFrame({"review": ["Great.", "Awful.", "Fine, but loud."]}).to_csv(source, index=False)
    run("dataframe_batch.py", source, target, model)
    assert pd.read_csv(target)["kind"].isin(["positive", "negative", "mixed"]).all()


def test_the_application_streams_an_answer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    from tests.support.scripts import load_script

    monkeypatch.setenv("MODEL", model)
    with TestClient(load_script(EXAMPLES / "fastapi_app.py").app) as client:
        answer = client.get("/ask", params={"question": "Why?", "max_tokens": 8})
    assert answer.status_code == 200
    assert answer.text


def test_the_cells_of_the_notebook_run(model: str, tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "MODEL": model}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "What is a leap year?" in done.stdout


@pytest.fixture
def server(model: str) -> Iterator[ScriptedServer]:
    with scripted_server(read_tokenizer(Path(model)), "openai", max_model_len=8192) as running:
        yield running


def test_an_agent_calls_tools_until_it_has_an_answer(server: ScriptedServer) -> None:
    pytest.importorskip("openai")
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>'

    tokenizer = server.client.tokenizer

    def answer(request: GenerationRequest) -> Script:
        seen = tokenizer.decode(request.prompt.token_ids)
        return Script(["It is 391."] if "391" in seen else [call])

    server.script = answer
    output = run("tool_agent.py", "What is 17 times 23?", "--url", f"{server.url}/v1")
    assert "= 391" in output
    assert output.rstrip().endswith("It is 391.")


def test_a_chain_streams_its_answer(server: ScriptedServer) -> None:
    pytest.importorskip("langchain_openai")
    server.script = Script(["Rain ", "falls."])
    assert run("langchain_chain.py", "rain", f"{server.url}/v1").strip() == "Rain falls."
