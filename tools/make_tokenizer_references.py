"""Write llama.cpp's token ids for difficult strings; the tests in `tests/tokenizer` compare Octavo's ids with them.

    python tools/make_tokenizer_references.py vocabularies       (needs `tokenizers` and `sentencepiece`)
    python tools/make_tokenizer_references.py ids MODEL.gguf ... (needs `llama-cpp-python`)

The byte-level vocabulary is learnt from the difficult strings without splitting them into words. Its merges therefore
cross every boundary that a pre-tokenizer could set, and each kind of pre-tokenizer gives different ids. The second
command writes this vocabulary as GGUF with each kind in turn and tokenizes with llama.cpp. It does the same with a
SentencePiece vocabulary, with and without the space before the text, and with the vocabularies of the given models.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "tokenizer"
STRINGS = TESTS / "difficult_strings.json"
VOCABULARY = TESTS / "superword_vocabulary.json"
SENTENCEPIECE = TESTS / "sentencepiece_vocabulary.json"
IDS = TESTS / "reference_ids.json"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>", "</s>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>"]
NUM_TOKENS = 2500
# One name for each kind of text splitting in which llama.cpp follows the published tokenizer.
KINDS = [
    "default", "llama-bpe", "dbrx", "gpt-2", "smollm", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder",
    "deepseek-v3", "falcon", "bloom", "viking", "tekken", "gpt-4o", "bailingmoe", "seed-coder",
]  # fmt: skip


def make_vocabularies() -> None:
    from tests.support.vocabularies import sentencepiece_metadata, sentencepiece_model

    make_superword_vocabulary()
    model = sentencepiece_model(
        user_defined_symbols=["<think>", "▁▁▁"],
        control_symbols=["<|im_end|>", "[INST]", "[/INST]"],
        remove_extra_whitespaces=False,
    )
    metadata = sentencepiece_metadata(model)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = metadata["tokenizer.ggml.token_type"].tolist()
    for token in ("<think>", "▁▁▁"):
        types[tokens.index(token)] = 4
    scores = metadata["tokenizer.ggml.scores"].tolist()
    content = {"tokens": tokens, "scores": scores, "token_type": types}
    SENTENCEPIECE.write_text(json.dumps(content, ensure_ascii=False))


def make_superword_vocabulary() -> None:
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
    for token in CONTROL:  # no merge may produce a control token
        texts = [piece for text in texts for piece in text.split(token)]
    tokenizer.train_from_iterator(filter(None, texts), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    VOCABULARY.write_text(json.dumps({"tokens": tokens, "merges": merges}, ensure_ascii=False, indent=0))


def make_ids(models: list[Path]) -> None:
    from tests.support.vocabularies import scored_metadata, superword_metadata

    references = {kind: ids_of(superword_metadata(kind)) for kind in KINDS}
    references["sentencepiece"] = ids_of(scored_metadata(add_space_prefix=True))
    references["sentencepiece, no prefix"] = ids_of(scored_metadata(add_space_prefix=False))
    references |= {path.name: reference_ids(path) for path in models}
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in references.items()
    )
    IDS.write_text("{\n" + lines + "\n}\n")


def ids_of(metadata: dict[str, object]) -> list[list[list[int]]]:
    """Return llama.cpp's ids for a file with this vocabulary and no tensors."""
    from tests.support.gguf_writer import gguf, key

    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    numbers |= {"attention.head_count": 1, "rope.dimension_count": 8}
    keys = [
        key("general.architecture", "llama"),
        *(key(f"llama.{name}", value) for name, value in numbers.items()),
        key("llama.attention.layer_norm_rms_epsilon", 1e-5),
        *(key(name, value) for name, value in metadata.items()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        path.write_bytes(gguf(keys, []))
        return reference_ids(path)


def reference_ids(path: Path) -> list[list[list[int]]]:
    """Return, for each string, its ids with control tokens read as text and, if they differ, with control tokens as
    tokens.
    """
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
    if sys.argv[1:2] == ["vocabularies"]:
        make_vocabularies()
    elif sys.argv[1:2] == ["ids"]:
        make_ids([Path(name) for name in sys.argv[2:]])
    else:
        sys.exit(__doc__)
