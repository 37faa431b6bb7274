"""Reads Ollama's Modelfiles: a model with parameters, a system message, a template and an adapter.

Source: Ollama, docs/modelfile.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo import env
from octavo.errors import UsageError

_QUOTES = '"""'
_MAX_BYTES = 1 << 20
# Parameters by the field of `SamplingParams` or of `EngineConfig`.
_SAMPLING: dict[str, tuple[str, Callable[[str], Any]]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "typical_p": ("typical_p", float),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "seed": ("seed", int),
    "num_predict": ("max_tokens", int),
}
_ENGINE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "num_ctx": ("max_model_len", int),
    "num_thread": ("num_threads", int),
    "num_gpu": ("gpu_layers", int),
    "num_batch": ("max_num_batched_tokens", int),
}
_GO = re.compile(r"\{\{-?\s*(?:\.|range\b|if\s+\.|if\s+(?:and|or|eq)\b|\$|end\b)")


def read_modelfile(path: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Return the model that a Modelfile names, and the fields of `EngineConfig` that it sets.

    name: name of the model being created.

    Raises UsageError naming the line of an unknown or unsupported instruction.
    """
    model, options, sampling = "", dict[str, Any](), dict[str, Any]()
    for number, instruction, value in _instructions(path):
        where = f"{path}, line {number}"
        if instruction == "FROM":
            model = _path_or_name(path, value)
        elif instruction == "PARAMETER":
            _set_parameter(where, value, options, sampling)
        elif instruction == "SYSTEM":
            options["system_prompt"] = value
        elif instruction == "TEMPLATE":
            if _GO.search(value):
                raise UsageError(
                    f"{where}: TEMPLATE is in Go's template language, but Octavo uses Jinja; leave it out to use the "
                    "model's own template"
                )
            options["chat_template"] = value
        elif instruction == "ADAPTER":
            adapter = f"{name}-adapter"
            options |= {"lora_modules": {adapter: _path_or_name(path, value)}, "default_lora": adapter}
        elif instruction != "LICENSE":  # a license changes nothing
            raise UsageError(
                f"{where}: {instruction} is not supported; the supported instructions are FROM, PARAMETER, SYSTEM, "
                "TEMPLATE, ADAPTER, LICENSE"
            )
    if not model:
        raise UsageError(f"{path}: the instruction FROM is missing; begin with FROM and a model")
    return model, options | ({"override_generation_config": sampling} if sampling else {})


def _set_parameter(where: str, text: str, options: dict[str, Any], sampling: dict[str, Any]) -> None:
    key, value = _split(text)
    key, value = key.lower(), value.strip('"')
    if key == "stop":
        sampling["stop"] = [*sampling.get("stop", []), value]
        return
    known = {**_SAMPLING, **_ENGINE}
    if key not in known:
        raise UsageError(f"{where}: PARAMETER {key} is not supported; leave it out, or use {', '.join(known)} or stop")
    field, kind = known[key]
    try:
        number = kind(value)
    except ValueError:
        raise UsageError(f"{where}: PARAMETER {key} is {value!r:.80}; it must be a number") from None
    if key == "num_predict" and number < 0:  # no limit, as when it is not set
        return
    (sampling if key in _SAMPLING else options)[field] = number


def _path_or_name(modelfile: Path, value: str) -> str:
    """Return a path relative to the Modelfile's folder. Names of models are returned unchanged."""
    path = env.user_path(value)
    beside = modelfile.resolve().parent / path
    return str(beside) if path.is_absolute() or value.startswith((".", "~")) or beside.exists() else value


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, name and value of each instruction. A value in triple quotes may span several lines."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; this is not a Modelfile")
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; a Modelfile is a text file") from error
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        instruction, value = _split(line)
        if value.startswith(_QUOTES):
            value, at = _quoted(path, [value.removeprefix(_QUOTES), *lines[at:]], number)
        elif len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        if not value:
            raise UsageError(f"{path}, line {number}: {instruction} has no value")
        yield number, instruction.upper(), value


def _split(line: str) -> tuple[str, str]:
    """Return the first word and the text after it."""
    word, *rest = re.split(r"[ \t]+", line, maxsplit=1)
    return word, "".join(rest).strip()


def _quoted(path: Path, lines: Sequence[str], number: int) -> tuple[str, int]:
    """Return the text up to the closing triple quotes, and the number of the line that contains them.

    number: number of the first line.
    """
    for end, line in enumerate(lines):
        last, quotes, rest = line.partition(_QUOTES)
        if not quotes:
            continue
        rest = rest.rstrip()
        if rest.strip('"'):
            raise UsageError(f"{path}, line {number + end}: there is text after the closing {_QUOTES}; remove it")
        return "\n".join([*lines[:end], last + rest]).strip("\n"), number + end
    raise UsageError(f"{path}, line {number}: the text has no closing {_QUOTES}")
