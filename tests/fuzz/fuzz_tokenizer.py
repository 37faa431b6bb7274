"""Coverage-guided fuzzing of the reader of tokenizer.json with atheris; `docs/fuzzing.md` has the command.

An input is a whole file. It must open, and then tokens lead back to text, or end in a ModelLoadError that names the
file; anything else is a finding.
"""

from __future__ import annotations

import atheris

with atheris.instrument_imports(include=["octavo.tokenizer"]):
    from octavo.tokenizer.directory_vocab import read_directory_tokenizer

from octavo.errors import ModelLoadError, UsageError
from tests.fuzz.json_mutator import json_mutator
from tests.fuzz.target import run, scratch
from tests.support.directory_tokenizers import KINDS

DIRECTORY = scratch()
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**64,
    1e308,
    "",
    "a",
    "<s>",
    "Ġ",
    "▁",
    "\U0010ffff",
    "(a+)+$",
    [],
    {},
    [["a"]],
    {"type": "BPE"},
]
TEXT = "Hello  wörld,\n\t42 <s><|im_end|>"


def read(content: bytes) -> None:
    (DIRECTORY / "tokenizer.json").write_bytes(content)
    try:
        tokenizer = read_directory_tokenizer(DIRECTORY)
    except ModelLoadError as error:
        if str(DIRECTORY) not in str(error) or len(str(error)) > 2000:
            raise AssertionError(f"a message without its file, or too long: {error}") from error
        return
    try:
        ids = tokenizer.encode(TEXT)
    except UsageError:
        return
    if any(not 0 <= i < tokenizer.vocab_size for i in ids):
        raise AssertionError(f"ids {ids} of {tokenizer.vocab_size} tokens")
    tokenizer.decode(ids)
    for i in ids:
        tokenizer.token_bytes(i)


if __name__ == "__main__":
    run(read, {name: make().encode() for name, make in KINDS.items()}, json_mutator(VALUES))
