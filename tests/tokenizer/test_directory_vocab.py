"""tokenizer.json and the files beside it, compared with the `tokenizers` library and with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from octavo.errors import ModelLoadError, UsageError
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from octavo.tokenizer.template_files import (
    gguf_templates,
    read_directory_templates,
    read_gguf_templates,
    template_files,
)
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Detokenizer
from tests.support.vocabularies import (
    DIFFICULT_STRINGS,
    VALID_STRINGS,
    sentencepiece_metadata,
    sentencepiece_model,
    superword_metadata,
)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(kind: str) -> tokenizers.Tokenizer:
    """As the published byte-level tokenizers are written."""
    metadata = superword_metadata(kind)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}  # type: ignore[arg-type]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]  # type: ignore[attr-defined]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    patterns = PRE_TOKENIZERS[kind].patterns
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("<|new|>", normalized=False, rstrip=True)]
    )
    return tokenizer


def sentencepiece_style() -> tokenizers.Tokenizer:
    """As the published Llama 2 tokenizer is written."""
    model = read_gguf_tokenizer(sentencepiece_metadata(sentencepiece_model())).plain.model
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace_style() -> tokenizers.Tokenizer:
    """As newer conversions write it."""
    tokenizer = sentencepiece_style()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return tokenizer


STYLES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": lambda: byte_level("qwen2"),
    "byte level, llama 3": lambda: byte_level("llama-bpe"),
    "sentencepiece": sentencepiece_style,
    "metaspace": metaspace_style,
}


def save(directory: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    """files: content of `{name}.json`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("style", STYLES)
def test_as_the_library_and_transformers(style: str, tmp_path: Path) -> None:
    original = STYLES[style]()
    tokenizer = read_directory_tokenizer(save(tmp_path, original))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in VALID_STRINGS:
        expected = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True, add_special_tokens=False) == expected, text
        assert reference.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text, parse_special=True) == original.encode(text).ids or expected[:1] == [1]
        shown = original.decode(expected, skip_special_tokens=False)
        if "\ufffd" not in shown:  # the library replaces byte by byte
            assert tokenizer.decode(expected, skip_special_tokens=False) == shown
    for text in DIFFICULT_STRINGS:
        tokenizer.encode(text)


@pytest.mark.parametrize("style", STYLES)
def test_control_tokens_are_text_unless_parsed(style: str, tmp_path: Path) -> None:
    tokenizer = read_directory_tokenizer(save(tmp_path, STYLES[style]()))
    for text in ("a<|im_end|>b", "</s>", "<s>[INST]", "<|im_start|>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert not tokenizer.special_token_ids & set(ids)
        assert tokenizer.decode(ids) == text
        guarded = tokenizer.encode_chat(tokenizer.guard("x " + text))[1:]
        assert not tokenizer.special_token_ids & set(guarded)


def test_control_tokens_and_others_take_turns_after_the_vocabulary(tmp_path: Path) -> None:
    """As in the files of Qwen 2.5 and Qwen 3, whose vocabulary has none of them."""
    library = byte_level("qwen2")
    names = ("<|a|>", "<tool>", "<|b|>", "</tool>", "<|c|>")
    for name in names:
        token = AddedToken(name, normalized=False, special="|" in name)
        (library.add_special_tokens if token.special else library.add_tokens)([token])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_directory_tokenizer(tmp_path)
    assert tokenizer.tokens[-5:] == list(names)
    for text in [*VALID_STRINGS, "x<|a|><tool> y</tool>\n<|c|><|b|>", *names]:
        assert tokenizer.encode(text, parse_special=True) == library.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode(
            library.encode(text).ids, skip_special_tokens=False
        )
        assert not {*tokenizer.encode(text)} & tokenizer.special_token_ids
    bare = byte_level("qwen2")
    assert tokenizer.encode("x<|a|>y") == bare.encode("x<|a|>y").ids
    assert tokenizer.encode("<tool>") == [library.token_to_id("<tool>")]
    guarded = tokenizer.guard("x<|a|>y")
    assert tokenizer.encode_chat(guarded) == bare.encode("x<|a|>y").ids


def test_streams_make_the_text(tmp_path: Path) -> None:
    tokenizer = read_directory_tokenizer(save(tmp_path, byte_level("qwen2")))
    for text in VALID_STRINGS:
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer)
        assert "".join([stream.push([i]) for i in ids]) + stream.flush() == tokenizer.decode(ids)


def test_bos_comes_exactly_once(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    tokenizer = read_directory_tokenizer(save(tmp_path, sentencepiece_style(), tokenizer_config=config))
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("hello")[:2] != [1, 1]
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode_chat("<s>hello").count(1) == 1


@pytest.mark.parametrize("style", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_configuration_decides_on_bos(style: str, wanted: bool, tmp_path: Path) -> None:
    bos = "<|endoftext|>" if style == "byte level" else "<s>"
    config = {"bos_token": bos, "add_bos_token": wanted}
    tokenizer = read_directory_tokenizer(save(tmp_path, STYLES[style](), tokenizer_config=config))
    assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) is wanted


def test_all_end_of_turn_ids_stop(tmp_path: Path) -> None:
    config = {"eos_token": "<|endoftext|>"}
    save(tmp_path, byte_level("qwen2"), tokenizer_config=config, generation_config={"eos_token_id": [30, 31]})
    assert read_directory_tokenizer(tmp_path).eos_token_ids == {0, 2, 30, 31}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 40}))
    assert read_directory_tokenizer(tmp_path).eos_token_ids == {0, 2, 40}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "two"}]}}, "two"),
        ({"tokenizer_config": {"chat_template": [{"name": "tool_use", "template": "three"}]}}, "three"),
        ({"chat_template": {"chat_template": "of the processor"}}, "of the processor"),
        ({"tokenizer_config": {}}, ""),
        ({}, ""),
    ],
)
def test_chat_template(files: dict[str, Any], expected: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level("qwen2"), **files)
    assert read_directory_tokenizer(tmp_path).template_source() == expected
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_directory_tokenizer(tmp_path).template_source() == "file"


NAMED = TemplateSet("plain", {"tool_use": "with tools", "rag": "with documents"})


@pytest.mark.parametrize("where", ["list", "folder", "both"])
def test_named_templates_survive_every_file(where: str, tmp_path: Path) -> None:
    """A list of tokenizer_config.json, a folder of files, GGUF keys: the same templates under the same names."""
    entries = [{"name": name, "template": text} for name, text in {"default": "plain", **NAMED.named}.items()]
    inside = {"list": entries, "folder": "plain", "both": entries[:2]}[where]
    save(tmp_path, byte_level("qwen2"), tokenizer_config={"chat_template": inside, "eos_token": CONTROL[0]})
    if where != "list":
        (tmp_path / "additional_chat_templates").mkdir()
        for entry in entries[1 if where == "folder" else 2 :]:
            (tmp_path / "additional_chat_templates" / f"{entry['name']}.jinja").write_text(entry["template"])
    assert read_directory_tokenizer(tmp_path).chat_template == NAMED
    assert read_gguf_templates(gguf_templates(NAMED)) == NAMED
    for name, text in template_files(NAMED).items():
        (tmp_path / "written" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "written" / name).write_text(text)
    assert read_directory_templates(tmp_path / "written") == NAMED


def test_special_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "unk_token": "<|im_start|>"}
    save(
        tmp_path,
        byte_level("qwen2"),
        tokenizer_config={**config, "extra_special_tokens": {"image_token": "<think>"}},
        special_tokens_map={"sep_token": "<think>", "eos_token": "<|endoftext|>"},
    )
    assert read_directory_tokenizer(tmp_path).special_tokens == {
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<|im_start|>"},
        **{"sep_token": "<think>", "image_token": "<think>"},
    }


@pytest.mark.parametrize("file", ["generation_config", "config"])
@pytest.mark.parametrize("ids", [10**9, [10**9, 1], [-1, 1]])
def test_an_end_beyond_the_vocabulary_is_told(
    file: str, ids: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, byte_level("qwen2"), **{file: {"eos_token_id": ids}})
    tokenizer = read_directory_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {0, 2, *([1] if isinstance(ids, list) else [])}
    wrong = ids[0] if isinstance(ids, list) else ids
    assert f"{file}.json: eos_token_id is {wrong}, but the vocabulary has {tokenizer.vocab_size} tokens" in caplog.text


def changed(**parts: Any) -> bytes:
    return json.dumps({**json.loads(byte_level("qwen2").to_str()), **parts}).encode()


CHAIN = {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 10_000}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PIECES = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
PAIRS = {
    "type": "TemplateProcessing",
    "single": PIECES[:1],
    "pair": [PIECES[0], {"SpecialToken": {"id": "<none>", "type_id": 0}}, PIECES[1]],
}
FAR = {"id": 10**9, "content": "<far>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "tokenizer.json is missing"),
        (b"", "is not a tokenizer"),
        (b"{", "is not a tokenizer"),
        (b"\xff\xfe", "is not a tokenizer"),
        (b"[" * 100_000, "is not a tokenizer"),
        (b"{}", "is not a tokenizer"),
        (changed(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]), "1 to 1048576 tokens"),
        (changed(model={"type": "BPE", "vocab": {"a": 4_000_000_000}, "merges": []}), "ids go up to 4000000000"),
        (changed(normalizer=CHAIN), "more than 256 steps"),
        (changed(decoder=None), "the decoder is missing"),
        (changed(decoder={"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}),
         "the decoder is CTC"),
        (changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": "("}}),
         "is not a tokenizer"),
        (changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": "(a+)+$"}}),
         "cannot encode text"),
        (changed(post_processor={**PAIRS, "special_tokens": {}}), "cannot encode text: no entry found"),
    ],
)  # fmt: skip
def test_bad_tokenizer_files(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=words):
        read_directory_tokenizer(tmp_path)


def test_a_pattern_that_takes_forever_is_bounded(tmp_path: Path) -> None:
    pattern = {**SPLIT, "pattern": {"Regex": "(ä+)+$"}}
    (tmp_path / "tokenizer.json").write_bytes(changed(pre_tokenizer=pattern))
    tokenizer = read_directory_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="cannot split this text"):
        tokenizer.encode("ä" * 100 + "!")
    assert tokenizer.encode("a")


def test_an_added_token_far_away_does_not_count(tmp_path: Path) -> None:
    """The library gives it the next free id; so does Octavo, as the model was trained with the library."""
    parts = json.loads(changed())
    (tmp_path / "tokenizer.json").write_bytes(changed(added_tokens=[*parts["added_tokens"], {**FAR, "special": True}]))
    tokenizer = read_directory_tokenizer(tmp_path)
    assert tokenizer.vocab_size < 3000


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config": {"bos_token": "nowhere"}}, "bos_token is 'nowhere', which is not a token"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is 5"),
        ({"tokenizer_config": {"chat_template": {"a": 1}}}, "chat_template 'default' is a dict"),
        ({"tokenizer_config": {"chat_template": [{"name": "rag", "template": "x"}]}}, "no default template"),
        ({"generation_config": {"eos_token_id": ["x"]}}, "eos_token_id is 'x'"),
    ],
)
def test_bad_configurations(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level("qwen2"), **files)
    with pytest.raises(ModelLoadError, match=words):
        read_directory_tokenizer(tmp_path)
