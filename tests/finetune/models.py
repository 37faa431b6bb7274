"""Tiny models with tokenizers and a chat template, and data for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from click.testing import CliRunner

from octavo.cli.finetune import finetune
from octavo.cli.quantize import convert, quantize
from tests.compress.test_convert import save

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, name: str = "llama-tied-biased", template: str = TEMPLATE) -> Path:
    """A safetensors checkpoint with the tokenizer of its family, which is learnt, and this template."""
    save(name, folder)
    for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if path.name.endswith("jinja"):
            path.write_text(template)
        else:
            config = json.loads(path.read_text())
            path.write_text(json.dumps(config | {"chat_template": template}))
    return folder


def as_gguf(folder: Path, path: Path, type_name: str | None = None) -> Path:
    """The same as a GGUF file, of this type if it is given."""
    command = [str(folder), str(path)]
    result = CliRunner().invoke(*((quantize, [*command, "--type", type_name]) if type_name else (convert, command)))
    assert result.exit_code == 0, result.output
    return path


def write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(*turns: str) -> dict[str, object]:
    """A conversation of these messages, the user's and the assistant's in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(finetune, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")
