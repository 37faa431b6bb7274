"""The difficult strings, and small vocabularies of every kind."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import sentencepiece

HERE = Path(__file__).parents[1] / "tokenizer"
DIFFICULT_STRINGS: list[str] = json.loads((HERE / "difficult_strings.json").read_text())
# What a lone surrogate is taken for, which no other program accepts at all.
VALID_STRINGS = [s.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for s in DIFFICULT_STRINGS]
NUM_CONTROL, NUM_USER_DEFINED = 6, 3  # at the start of the superword vocabulary
IM_END = 2


def superword_metadata(pre: str | None, **changes: object) -> dict[str, object]:
    """Return a byte-level vocabulary whose merges cross word boundaries.

    changes: keys under `tokenizer.ggml`; None removes a key.
    """
    vocabulary = json.loads((HERE / "superword_vocabulary.json").read_text())
    types = np.ones(len(vocabulary["tokens"]), np.int32)
    types[:NUM_CONTROL] = 3
    types[NUM_CONTROL : NUM_CONTROL + NUM_USER_DEFINED] = 4
    keys: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": vocabulary["tokens"],
        "merges": vocabulary["merges"],
        "token_type": types,
        "bos_token_id": 4,
        "eos_token_id": IM_END,
    }
    return _metadata({**keys, **changes})


def scored_metadata(**changes: object) -> dict[str, object]:
    """Return the stored SentencePiece vocabulary with control and user-defined tokens.

    changes: as in `superword_metadata`.
    """
    vocabulary = json.loads((HERE / "sentencepiece_vocabulary.json").read_text())
    keys: dict[str, object] = {
        "model": "llama",
        "tokens": vocabulary["tokens"],
        "scores": np.array(vocabulary["scores"], np.float32),
        "token_type": np.array(vocabulary["token_type"], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata({**keys, **changes})


def sentencepiece_model(**settings: object) -> sentencepiece.SentencePieceProcessor:
    """Train a BPE model with byte fallback on the difficult strings."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([s.replace("\n", " ") for s in VALID_STRINGS * 3 if s.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=1500,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
        **{"normalization_rule_name": "identity", **settings},
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor, **changes: object) -> dict[str, object]:
    """Return the model in the form in which a converter writes it to a GGUF file."""
    ids = range(model.get_piece_size())

    def token_type(i: int) -> int:
        kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6)]
        return next((number for is_kind, number in kinds if is_kind(i)), 1)

    keys: dict[str, object] = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": np.array([model.get_score(i) for i in ids], np.float32),
        "token_type": np.array([token_type(i) for i in ids], np.int32),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
    }
    return _metadata({**keys, **changes})


def _metadata(keys: dict[str, object]) -> dict[str, object]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
