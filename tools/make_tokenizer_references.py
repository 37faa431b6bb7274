"""Writes what `tests/tokenizer` compares with: the ids that llama.cpp gives to the difficult strings.

    python tools/make_tokenizer_references.py vocabulary         (needs `tokenizers`)
    python tools/make_tokenizer_references.py ids MODEL.gguf ... (needs `llama-cpp-python`)

The vocabulary is learnt from the difficult strings without cutting them into words, so its merges reach across
every border that a pre-tokenizer could draw: each kind of pre-tokenizer gives ids of its own. The second command
writes it as GGUF with each kind in turn, and asks llama.cpp; then it asks for the vocabularies of the models given.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1] / "tests" / "tokenizer"
STRINGS = TESTS / "difficult_strings.json"
VOCABULARY = TESTS / "superword_vocabulary.json"
IDS = TESTS / "reference_ids.json"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>", "</s>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>"]
NUM_TOKENS = 2500
# One name of each kind that llama.cpp cuts with the patterns of the published tokenizer.
KINDS = [
    "default", "llama-bpe", "dbrx", "gpt-2", "smollm", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder",
    "deepseek-v3", "falcon", "bloom", "viking", "tekken", "gpt-4o", "bailingmoe", "seed-coder",
]  # fmt: skip


def make_vocabulary() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        min_frequency=1,
        max_token_length=12,
        special_tokens=CONTROL + USER_DEFINED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in strings()]
    for token in CONTROL:  # no merge may make one of them
        texts = [piece for text in texts for piece in text.split(token)]
    tokenizer.train_from_iterator(filter(None, texts), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    VOCABULARY.write_text(json.dumps({"tokens": tokens, "merges": merges}, ensure_ascii=False, indent=0))


def make_ids(models: list[Path]) -> None:
    vocabulary = json.loads(VOCABULARY.read_text())
    types = np.ones(len(vocabulary["tokens"]), np.int32)
    types[: len(CONTROL)] = 3
    types[len(CONTROL) : len(CONTROL) + len(USER_DEFINED)] = 4
    references = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            write_vocabulary(path, kind, vocabulary, types)
            references[kind] = reference_ids(path)
    for path in models:
        references[path.name] = reference_ids(path)
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in references.items()
    )
    IDS.write_text("{\n" + lines + "\n}\n")


def write_vocabulary(path: Path, kind: str, vocabulary: dict[str, list[str]], types: np.ndarray) -> None:
    from tests.support.gguf_writer import gguf, key

    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    numbers |= {"attention.head_count": 1, "rope.dimension_count": 8}
    keys = [
        key("general.architecture", "llama"),
        *(key(f"llama.{name}", value) for name, value in numbers.items()),
        key("llama.attention.layer_norm_rms_epsilon", 1e-5),
        key("tokenizer.ggml.model", "gpt2"),
        key("tokenizer.ggml.pre", kind),
        key("tokenizer.ggml.tokens", vocabulary["tokens"]),
        key("tokenizer.ggml.merges", vocabulary["merges"]),
        key("tokenizer.ggml.token_type", types),
        key("tokenizer.ggml.bos_token_id", 0),
        key("tokenizer.ggml.eos_token_id", 2),
    ]
    path.write_bytes(gguf(keys, []))


def reference_ids(path: Path) -> list[list[list[int]]]:
    """For each string the ids with control tokens as text and, where they differ, as tokens."""
    from llama_cpp import Llama

    llama = Llama(str(path), vocab_only=True, verbose=False)
    pairs = []
    for text in strings():
        data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        plain, special = (llama.tokenize(data, add_bos=False, special=special) for special in (False, True))
        pairs.append([plain] if plain == special else [plain, special])
    return pairs


def strings() -> list[str]:
    return json.loads(STRINGS.read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["vocabulary"]:
        make_vocabulary()
    elif sys.argv[1:2] == ["ids"]:
        make_ids([Path(name) for name in sys.argv[2:]])
    else:
        sys.exit(__doc__)
