"""Bounds on what a tokenizer.json makes of texts, judged by the tokenizers library itself."""

from __future__ import annotations

import base64
import inspect
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ModelLoadError, UsageError
from octavo.tokenizer import text_growth
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.quiet_thread import run_quietly
from octavo.tokenizer.text_growth import GrowthError, TextGrowth, growth_of
from tests.support.vocabularies import sentencepiece_model
from tests.tokenizer.test_directory_vocab import SPLIT, changed

# Texts that grow: ligatures, accents, capitals with dots, Chinese characters, spaces.
TEXTS = st.text(
    st.sampled_from("aA İȺ\ufdfa\u1f82\u0390é中\n!▁\u00a0\u2126ß") | st.characters(codec="utf-8"), max_size=40
)
WITHOUT_ARGUMENTS = ["NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents", "Nmt", "Lowercase", "ByteLevel"]
NORMALIZERS = {
    **{name: getattr(normalizers, name)() for name in WITHOUT_ARGUMENTS},
    "BertNormalizer": normalizers.BertNormalizer(),
    "Prepend": normalizers.Prepend("▁"),
    "Replace": normalizers.Replace(" ", "▁"),
    "Replace, longer": normalizers.Replace("aa", "xyz中é"),
    "Replace, nothing": normalizers.Replace(Regex("a*"), "xy"),
    "Replace, away": normalizers.Replace("a", ""),
}
SPLITTERS = {
    "ByteLevel": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "ByteLevel, prefix": pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
    "Metaspace": pre_tokenizers.Metaspace("▁", prepend_scheme="always"),
    "Metaspace, wide": pre_tokenizers.Metaspace("\U0001f600", prepend_scheme="always"),
    "Whitespace": pre_tokenizers.Whitespace(),
    "Punctuation": pre_tokenizers.Punctuation(),
    "Split": pre_tokenizers.Split(Regex("a+"), "isolated"),
    "Digits": pre_tokenizers.Digits(individual_digits=True),
}


def state(part: Any) -> dict[str, Any]:
    return json.loads(part.__getstate__())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NORMALIZERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS.filter(bool))
def test_no_normalizer_grows_beyond_its_bound(name: str, text: str) -> None:
    step = state(NORMALIZERS[name])
    bound = text_growth._NORMALIZERS[step["type"]](step)
    assert len(NORMALIZERS[name].normalize_str(text).encode()) <= bound * len(text.encode())


@pytest.mark.parametrize("name", SPLITTERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS.filter(bool))
def test_no_pre_tokenizer_grows_beyond_its_bound(name: str, text: str) -> None:
    step = state(SPLITTERS[name])
    bound = text_growth._PRE_TOKENIZERS[step["type"]](step)
    pieces = SPLITTERS[name].pre_tokenize_str(text)
    assert sum(len(piece.encode()) for piece, _ in pieces) <= bound * len(text.encode())


@pytest.mark.parametrize(
    ("module", "base", "known"),
    [
        (normalizers, normalizers.Normalizer, text_growth._NORMALIZERS),
        (pre_tokenizers, pre_tokenizers.PreTokenizer, text_growth._PRE_TOKENIZERS),
    ],
)
def test_every_step_of_the_library_has_a_bound(module: Any, base: type, known: Any) -> None:
    kinds = {name for name, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, base)}
    assert kinds - {base.__name__, "Sequence"} == set(known)


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(replacement: bytes) -> str:
    """A table whose search tree is empty."""
    tree = bytes(4)
    return base64.b64encode(len(tree).to_bytes(4, "little") + tree + replacement + b"\0").decode()


DOUBLE = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PADDED = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": chain(*[DOUBLE] * 18)}, "makes .* bytes or more of one letter"),
        ({"normalizer": chain(*[DOUBLE] * 60)}, "makes .* of one letter|multiply the added tokens"),
        ({"normalizer": chain(*[replace({"Regex": ""}, "ab")] * 8)}, "of one letter|multiply the added tokens"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 4000}}, "makes 4,001 bytes or more of one letter"),
        ({"normalizer": replace({"String": ""}, "x")}, "an empty pattern"),
        ({"normalizer": {"type": "Unheard"}}, "has a step 'Unheard', which Octavo does not support"),
        ({"normalizer": {"no": "type"}}, "is not a tokenizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * (1 << 20))}},
         "may multiply the added tokens by"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "is not a tokenizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x")}}, "cannot encode text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}},
         "may multiply a text by 1,073,741,824"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [PADDED] * 300}}, "more than 256 steps"),
    ],
)  # fmt: skip
def test_files_that_multiply_texts_are_refused(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = changed(**parts)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=words):
        read_directory_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"dropout": 0.1}, "model.dropout is 0.1, which leaves out merges at random"),
        ({"continuing_subword_prefix": "#" * 100}, "continuing_subword_prefix has 100 characters"),
        ({"end_of_word_suffix": "#" * 100}, "end_of_word_suffix has 100 characters"),
    ],
)
def test_models_that_draw_or_multiply_are_refused(part: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = {**json.loads(changed())["model"], **part}
    (tmp_path / "tokenizer.json").write_bytes(changed(model=model))
    with pytest.raises(ModelLoadError, match=words):
        read_directory_tokenizer(tmp_path)


def test_growth_that_only_some_texts_meet_is_measured_before_it_happens(tmp_path: Path) -> None:
    """2^20 bytes of each small é, which no text of the start has."""
    steps = [replace({"String": "é"}, "éé")] * 20
    (tmp_path / "tokenizer.json").write_bytes(changed(normalizer=chain(*steps), added_tokens=[]))
    tokenizer = read_directory_tokenizer(tmp_path)
    assert tokenizer.encode("plain " * 10_000)
    with pytest.raises(UsageError, match="normalizer makes more than 33,554,432 bytes of this text; send less"):
        tokenizer.encode("é" * 100)


def test_a_published_kind_of_normalizer_takes_long_texts() -> None:
    """As of T5 and XLM-R: SentencePiece's own table, and runs of spaces."""
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(sentencepiece_model(normalization_rule_name="nmt_nfkc").serialized_model_proto())
    table = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": table}
    growth = growth_of("file", {"normalizer": chain(precompiled, replace({"Regex": " {2,}"}, "▁"))})
    assert growth.measure("\ufdfa") == len(unicodedata.normalize("NFKC", "\ufdfa").encode()) == growth.factors[0]
    assert growth.factor > 100
    text = "some words  and more " * 100_000
    assert 4 * len(text) * growth.factor > text_growth.MAX_NORMALIZED_BYTES
    growth.check(text)
    # Two spaces become three bytes, but for those at the borders of the measured chunks.
    assert growth.measure(text) == pytest.approx(len(text.encode()) + 100_000, abs=100)
    with pytest.raises(GrowthError):
        growth.check("x" * (text_growth.MAX_NORMALIZED_BYTES + 1))


def test_the_last_of_two_equal_names_counts_for_both_readers(tmp_path: Path) -> None:
    """Otherwise a file could show one normalizer to the check and another one to the library."""
    hidden = json.dumps(chain(*[DOUBLE] * 18)).encode()
    for first, second in ((b"null", hidden), (hidden, b"null")):
        doubled = b'{"normalizer": %b, ' % first + changed(normalizer=None)[1:-1] + b', "normalizer": %b}' % second
        (tmp_path / "tokenizer.json").write_bytes(doubled)
        if second == hidden:
            with pytest.raises(ModelLoadError, match="of one letter"):
                read_directory_tokenizer(tmp_path)
        else:
            assert read_directory_tokenizer(tmp_path).encode("a")
            assert tokenizers.Tokenizer.from_buffer(doubled).normalizer is None


def test_the_text_of_a_panic_reaches_no_terminal(tmp_path: Path) -> None:
    """Once while the file is loaded and once for a text; the process keeps its standard error."""
    for name, pattern in (("load", "(a+)+$"), ("encode", "(ä+)+$")):
        (tmp_path / name).mkdir()
        content = changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": pattern}})
        (tmp_path / name / "tokenizer.json").write_bytes(content)
    program = """if True:
        import sys
        from pathlib import Path
        from octavo.errors import ModelLoadError, UsageError
        from octavo.tokenizer.directory_vocab import read_directory_tokenizer
        try:
            read_directory_tokenizer(Path(sys.argv[1]) / "load")
        except ModelLoadError as error:
            print(error)
        try:
            read_directory_tokenizer(Path(sys.argv[1]) / "encode").encode("ä" * 100 + "!")
        except UsageError as error:
            print(error)
        print("still here", file=sys.stderr)
    """
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert "cannot encode text" in ended.stdout
    assert "cannot split this text" in ended.stdout
    assert ended.stderr == "still here\n"


def test_a_quiet_call_gives_its_result_or_its_error_and_leaves_all_files_open() -> None:
    with open(__file__) as file:
        assert run_quietly(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            run_quietly(lambda: 1 // 0)
        assert file.readline().startswith('"""Bounds')


def test_no_normalizer_no_bound() -> None:
    assert growth_of("file", {}) == TextGrowth([], [])
