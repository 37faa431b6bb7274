"""Tokenizers of every kind that `octavo convert` writes, as the files next to a safetensors checkpoint."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from tests.support.vocabularies import VALID_STRINGS, sentencepiece_model

# Of the published tokenizer.json files of Llama 3 and Qwen 2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def split(pattern: str) -> pre.PreTokenizer:
    whole = pre.Split(Regex(pattern), "isolated")
    return pre.Sequence([whole, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(step: pre.PreTokenizer, *, ignore_merges: bool = False, nfc: bool = False, bos: bool = False) -> str:
    """Train a tokenizer on the difficult strings, with four control tokens and one added token that is not one."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = step
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(VALID_STRINGS, trainer)
    tokenizer.add_special_tokens(["<|object_ref|>"])  # beyond the vocabulary, and before one that is no control token
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        tokenizer.post_processor = template(tokenizer, "<|im_start|>")
    return str(tokenizer.to_str())


def template(tokenizer: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, tokenizer.token_to_id(bos))])


@cache
def sentencepiece(*, prefix: bool) -> str:
    """Return a sentencepiece model as transformers converts it: Llama 2's with the prefix, Gemma's without."""
    model = sentencepiece_model()
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (model.get_score(i), cut, piece[:cut], piece[cut:])
        for i, piece in enumerate(pieces)
        if not (model.is_control(i) or model.is_byte(i) or model.is_unknown(i))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    pairs = [(left, right) for _, _, left, right in sorted(merges, key=lambda m: (m[0], m[1]), reverse=True)]
    bpe = models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = template(tokenizer, "<s>")
    return str(tokenizer.to_str())


KINDS = {
    "llama3": lambda: byte_level(split(LLAMA3), ignore_merges=True, bos=True),
    "qwen2": lambda: byte_level(split(QWEN2), nfc=True),
    "smollm": lambda: byte_level(
        pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    ),
    "gpt-2": lambda: byte_level(pre.ByteLevel(add_prefix_space=False)),
    "llama2": lambda: sentencepiece(prefix=True),
    "gemma": lambda: sentencepiece(prefix=False),
}


def save_tokenizer(kind: str, directory: Path) -> int:
    """Write the files and return the number of tokens."""
    text = KINDS[kind]()
    (directory / "tokenizer.json").write_text(text)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    if kind in ("llama2", "gemma"):
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return int(Tokenizer.from_str(text).get_vocab_size())
