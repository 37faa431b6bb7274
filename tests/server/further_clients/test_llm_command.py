"""Simon Willison's `llm` command: prompts, conversations, schemas and tools, with the server as an extra model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import CALL, turns
from tests.support.scripted_server import ScriptedServer, scripted_server

llm_cli = pytest.importorskip("llm.cli", reason="llm is not installed")

FUNCTION = "def add(a: int, b: int) -> int:\n    'Adds two numbers.'\n    return a + b\n"


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", max_model_len=8192) as running:
        yield running


@pytest.fixture
def ask(fake: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command with these arguments and returns what it prints."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: fake\n  api_base: {fake.url}/v1\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(llm_cli.cli, arguments)  # a process of its own would import for seconds each time
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    return run


def test_a_conversation(ask: Callable[..., str], fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    fake.script = turns(smollm2_tokenizer, "Hello there.")
    assert ask("-m", "mine", "-s", "Be brief.", "-o", "temperature", "0.5", "Hi") == "Hello there."
    assert ask("-c", "--no-stream", "And?") == "Hello there."
    prompt = smollm2_tokenizer.decode(fake.last_request.prompt.token_ids, skip_special_tokens=False)
    assert prompt.count("Hello there.") == 1
    assert "Be brief." in prompt


def test_a_schema_and_a_tool(ask: Callable[..., str], fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    fake.script = turns(smollm2_tokenizer, '{"total": 5}')
    assert ask("-m", "mine", "--schema", "total int", "What is 2 + 3?") == '{"total": 5}'
    fake.script = turns(smollm2_tokenizer, CALL, "It is 5.")
    for stream in ((), ("--no-stream",)):
        assert ask("-m", "mine", *stream, "--functions", FUNCTION, "What is 2 + 3?") == "It is 5."
