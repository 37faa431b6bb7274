"""Reads calibration texts as pieces of tokens, from plain text or from JSON lines with texts or conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.backends.layers import Tokens
from octavo.compress.importance import CHUNK_TOKENS, split_text
from octavo.engine.texts.prompt_encoder import PromptEncoder
from octavo.errors import ModelLoadError, UsageError
from octavo.loader.checkpoint import Checkpoint
from octavo.tokenizer import load_tokenizer

MAX_FILE_BYTES = 1 << 28
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's roles -> ours


def read_calibration(path: Path, checkpoint: Checkpoint, max_chunks: int) -> list[Tokens]:
    """Return at most `max_chunks` pieces of `CHUNK_TOKENS` tokens, spread evenly over the file.

    A file with fewer tokens gives one shorter piece. A `.jsonl` file has one object per line: `text`; `prompt` with
    `completion`; or `messages` or `conversations`. The model's chat template is applied to the last two. Raises
    UsageError naming file, line and reason.
    """
    text = _read(path)
    tokenizer = load_tokenizer(checkpoint)
    if path.suffix in (".jsonl", ".ndjson"):
        encoder = PromptEncoder(tokenizer, None)
        ids = [token for number, line in _lines(text) for token in _encoded(f"{path}:{number}", line, encoder)]
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    first = tokenizer.prefix_ids[0] if tokenizer.prefix_ids else None
    try:
        chunks = split_text(ids, len(ids) // CHUNK_TOKENS + 1, first)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", param="calibration") from error
    count = min(max_chunks, len(chunks))
    return [chunks[i * len(chunks) // count] for i in range(count)]


def _read(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UsageError(f"{path} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; give a text or JSON lines") from error
    if not text.strip():
        raise UsageError(f"{path} is empty; give a few pages of text like the model will see")
    return text


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _encoded(where: str, line: str, encoder: PromptEncoder) -> list[int]:
    """Return the tokens of one line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from error
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return encoder.tokenizer.encode(record["text"])
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion", ""), str):
            return encoder.tokenizer.encode(record["prompt"] + record.get("completion", ""))
        for key in ("messages", "conversations"):
            if isinstance(record.get(key), list):
                return _conversation(where, record[key], encoder)
    raise UsageError(f"{where}: write an object with text, prompt and completion, messages or conversations")


def _conversation(where: str, messages: Sequence[Any], encoder: PromptEncoder) -> list[int]:
    try:
        turns = [_message(message) for message in messages]
        return encoder.encode_chat(turns, add_generation_prompt=False)
    except (UsageError, ModelLoadError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from error


def _message(message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping) and isinstance(message.get("from"), str):
        return {"role": _ROLES.get(message["from"], message["from"]), "content": message.get("value")}
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is {message!r:.40}; it must be an object with role and content")
    return dict(message)
