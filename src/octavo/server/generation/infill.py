"""Fill-in-the-middle: a prompt made of a prefix and a suffix, with the control tokens that the model was trained on.

The layout is prefix, suffix, middle ("PSM", Bavarian et al. 2022). Other files of the project come first, as in Qwen
2.5 Coder's training (Hui et al. 2024, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.server.errors import refuse
from octavo.tokenizer.tokenizer import Tokenizer, TooManyTokensError

# The tokens before the prefix, the suffix and the middle, in the vocabularies that have them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
# Before the project's name and before each file.
_FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
# Tokens that only occur around files, so they end a middle.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "<repo_name>", "<|file_separator|>")
_PROJECT, _THIS_FILE = "myproject", "filename"  # the same names as in llama.cpp's server


@dataclass(frozen=True, slots=True)
class Infill:
    """A prefix and a suffix, and the gap between them for the model to fill.

    begin: the beginning of the text in the gap
    files: (name, text) of other files
    """

    prefix: str
    suffix: str
    begin: str = ""
    files: Sequence[tuple[str, str]] = ()


def supports_infill(tokenizer: Tokenizer) -> bool:
    """Return True if the vocabulary contains the control tokens for infilling."""
    return _find(tokenizer, _MARKS) is not None


def encode_infill(tokenizer: Tokenizer, infill: Infill, max_tokens: int | None = None) -> list[int]:
    """Return the prompt's token ids. Control tokens in the caller's texts are treated as plain text.

    Raises UsageError naming `suffix` if the model has no tokens for infilling, and TooManyTokensError if the prompt has
    more than `max_tokens` tokens.
    """
    marks = _find(tokenizer, _MARKS)
    if marks is None:
        reason = "needs a model with fill-in-the-middle tokens, but this model has none; request a completion"
        raise refuse("suffix", reason, "unsupported_parameter")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens) if text else []

    before, suffix, middle = marks
    files: list[int] = []
    if infill.files:
        file_marks = _find(tokenizer, _FILE_MARKS)
        if file_marks is None:
            files = encode("".join(text for _, text in infill.files))
        else:
            repository, separator = file_marks
            files = [repository, *encode(f"{_PROJECT}\n")]
            for name, text in infill.files:
                files += [separator, *encode(f"{name}\n{text}\n")]
                if max_tokens is not None and len(files) > max_tokens:
                    raise TooManyTokensError(len(files), max_tokens)
            files += [separator, *encode(f"{_THIS_FILE}\n")]
    ids = [before, *encode(infill.prefix), suffix, *encode(infill.suffix), middle, *encode(infill.begin)]
    return [*tokenizer.prefix_ids, *files, *ids]


def infill_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens, besides the end-of-text token, that end the text between prefix and suffix."""
    ids = _special_ids(tokenizer)
    return [ids[name] for name in _ENDS if name in ids]


def _find(tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]]) -> list[int] | None:
    """Return the ids of the first row whose tokens are all in the vocabulary."""
    ids = _special_ids(tokenizer)
    return next(([ids[name] for name in row] for row in rows if all(name in ids for name in row)), None)


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {tokenizer.tokens[token_id]: token_id for token_id in tokenizer.literal_ids}
