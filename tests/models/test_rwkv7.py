"""RWKV 7 against its definition in numpy, in all backends and both formats, written as GGUF, and its tokenizer."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from octavo.backends import get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.cli.quantize import convert
from octavo.errors import ModelLoadError
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.tensor_names import renamed
from octavo.models import build_graph
from octavo.models._reading import ConfigReader
from octavo.models.rwkv7 import Config
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.rwkv_vocab import escaped, unescaped
from octavo.tokenizer.tokenizer import Tokenizer
from tests.models.test_parity import LIMITS, TOKENS, assert_close, logits_of
from tests.support import tiny_rwkv
from tests.support.batches import Request, step

TOLERANCES = {"reference": 1e-4, "cpu": 1e-3, "torch": 1e-3}
TEXTS = ("there the then\n\nthe end", "你好 你 \x00\xff 'it\" \\x \\n", "", "t", "User: hi\n\nAssistant:", "é" * 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_rwkv.save(tmp_path_factory.mktemp("rwkv"))


@pytest.mark.parametrize("backend", TOLERANCES)
def test_logits_of_safetensors(backend: str, checkpoint: Path) -> None:
    with closing(open_checkpoint(checkpoint)) as opened:
        found = logits_of(opened, backend)
    assert_close(found, tiny_rwkv.expected_logits(TOKENS), TOLERANCES[backend])


def test_logits_of_gguf(tmp_path: Path) -> None:
    with closing(open_checkpoint(tiny_rwkv.save_gguf(tmp_path / "m.gguf"))) as opened:
        assert_close(logits_of(opened), tiny_rwkv.expected_logits(TOKENS))
        assert_close(logits_of(opened, "cpu"), tiny_rwkv.expected_logits(TOKENS), TOLERANCES["cpu"])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_chunks_and_tokens_one_by_one(backend: str, checkpoint: Path) -> None:
    """A layer keeps the last row of each mix and the state of the rule."""
    with closing(open_checkpoint(checkpoint)) as opened:
        graph = optimize(build_graph(opened.architecture, opened.config, opened.weights.shapes), PASSES)
        with closing(get_backend(backend).compile(graph, opened.weights, LIMITS)) as executor:
            executor.allocate_cache(4, 16, 4)
            request, found = Request(TOKENS, [1, 2]), []
            for count in (7, 1, 1, 12, len(TOKENS) - 21):
                logits = executor.submit(step([(request, count)], block_size=16, num_groups=1)).wait().logits
                assert logits is not None
                found.append(logits.copy())
    assert_close(np.concatenate(found), tiny_rwkv.expected_logits(TOKENS), TOLERANCES[backend])


def test_written_as_gguf(checkpoint: Path, tmp_path: Path) -> None:
    """The tensors and keys that llama.cpp's converter writes, and the same tokens."""
    result = CliRunner().invoke(convert, [str(checkpoint), str(tmp_path / "m.gguf"), "--to", "gguf"])
    assert result.exit_code == 0, result.stderr + str(result.exception)
    found = gguf.GGUFReader(tmp_path / "m.gguf")
    judge = gguf.GGUFReader(tiny_rwkv.save_gguf(tmp_path / "judge.gguf"))
    expected = {tensor.name: tensor for tensor in judge.tensors}
    assert {tensor.name for tensor in found.tensors} == expected.keys()
    for tensor in found.tensors:
        assert tensor.data.size == expected[tensor.name].data.size
        np.testing.assert_array_equal(tensor.data.reshape(-1), expected[tensor.name].data.reshape(-1))
    for key, field in judge.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.", "general.")):
            assert found.fields[key].contents() == pytest.approx(field.contents(), rel=1e-6), key
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.token_type"):
        assert found.fields[key].contents() == judge.fields[key].contents()
    assert found.fields["tokenizer.ggml.tokens"].contents()[1:] == judge.fields["tokenizer.ggml.tokens"].contents()[1:]
    with closing(open_checkpoint(tmp_path / "m.gguf")) as after, closing(open_checkpoint(checkpoint)) as before:
        np.testing.assert_array_equal(logits_of(after), logits_of(before))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn", {"layers": [1]}, "attn is .*: must be None"),
        ("norm_first", False, "norm_first is False: must be True"),
        ("hidden_act", "relu", "hidden_act is 'relu': must be sqrelu"),
        ("value_dim", [128, 64, 128], "value_dim is .*: must be hidden_size, 128"),
        ("head_dim", 24, "head_dim is 24: does not divide hidden_size, 128"),
    ],
)
def test_configurations_that_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Config.from_hf(ConfigReader({**tiny_rwkv.config(96), key: value}))


def greedy(text: bytes) -> list[int]:
    """The tokens of a text by the rule itself: at each place the longest that fits."""
    found = []
    while text:
        token = max((word for word in tiny_rwkv.WORDS if text.startswith(word)), key=len)
        found.append(1 + tiny_rwkv.WORDS.index(token))
        text = text[len(token) :]
    return found


def texts() -> list[str]:
    source = random.Random(3)
    parts = ["t", "h", "e", "r", " ", "\n", "你", "好", "佡", "'", '"', "\\", "x", "User: "]
    return [*TEXTS, *("".join(source.choices(parts, k=60)) for _ in range(40))]


def check_tokens(tokenizer: Tokenizer) -> None:
    for text in texts():
        ids = tokenizer.encode(text)
        assert ids == greedy(text.encode()), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {0}


def test_the_tokens_of_both_files(checkpoint: Path, tmp_path: Path) -> None:
    for path in (checkpoint, tiny_rwkv.save_gguf(tmp_path / "m.gguf")):
        with closing(open_checkpoint(path)) as opened:
            check_tokens(load_tokenizer(opened))


def test_a_long_text_is_cut_where_its_tokens_are(checkpoint: Path) -> None:
    with closing(open_checkpoint(checkpoint)) as opened:
        tokenizer = load_tokenizer(opened)
    text = " there the\n\n你好" * 4000
    assert tokenizer.encode(text) == tokenizer.encode(" there the\n\n你好") * 4000


def test_escapes_go_there_and_back() -> None:
    for token in tiny_rwkv.WORDS:
        assert unescaped(escaped(token)) == token
    assert unescaped(r"\t\'\x00\\n") == b"\t'\x00\\n"


@pytest.mark.parametrize(
    "line",
    [
        "3 'b' 1",
        "2 'b' 2",
        "2 b 1",
        "2 '' 0",
        "2 open('x') 1",
        "2 'a' 'b' 2",
        "2 '\\ud800' 3",
        b"2 '\xff' 1",
        pytest.param(f"2 1{'+1' * 20000} 1", id="deep"),
        pytest.param(f"2 'b' {'1' * 5000}", id="huge"),
    ],
)
def test_a_damaged_vocabulary_is_refused_with_its_line(line: str | bytes, tmp_path: Path) -> None:
    path = tiny_rwkv.save(tmp_path) / "rwkv_vocab_v20230424.txt"
    path.write_bytes(b"1 'a' 1\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with closing(open_checkpoint(tmp_path)) as opened, pytest.raises(ModelLoadError, match="line 2, "):
        load_tokenizer(opened)


def test_a_vocabulary_has_no_more_tokens_than_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.tokenizer.rwkv_vocab.MAX_TOKENS", 257)
    (tiny_rwkv.save(tmp_path) / "rwkv_vocab_v20230424.txt").write_text(
        "\n".join(f"{i + 1} {bytes([i])!r} 1" for i in range(256)) + "\n"
    )
    with closing(open_checkpoint(tmp_path)) as opened:
        load_tokenizer(opened)
        monkeypatch.setattr("octavo.tokenizer.rwkv_vocab.MAX_TOKENS", 256)
        with pytest.raises(ModelLoadError, match=r"line 256 is one too many; a vocabulary has 256 tokens"):
            load_tokenizer(opened)


def test_the_usual_width_is_rounded_up() -> None:
    """As flash-linear-attention does with hidden_ratio."""
    values = {key: value for key, value in tiny_rwkv.config(96).items() if key != "intermediate_size"}
    assert Config.from_hf(ConfigReader({**values, "hidden_ratio": 3.3})).width == 448  # 422.4
    assert Config.from_hf(ConfigReader(values)).width == 512


def test_a_vocabulary_without_a_byte_is_refused(tmp_path: Path) -> None:
    (tiny_rwkv.save(tmp_path) / "rwkv_vocab_v20230424.txt").write_text("1 'a' 1\n")
    with (
        closing(open_checkpoint(tmp_path)) as opened,
        pytest.raises(ModelLoadError, match="0x00 is not a token"),
    ):
        load_tokenizer(opened)


def test_names_may_keep_their_last_numbers() -> None:
    stems = {"layers.*.x.lora.0": "layers.*.x_in", "layers.0.norm": "first", "layers.*.x.lora.*": "layers.*.y.*"}
    assert renamed("layers.7.x.lora.0.weight", stems) == "layers.7.y.0.weight"
    del stems["layers.*.x.lora.*"]
    assert renamed("layers.7.x.lora.0.weight", stems) == "layers.7.x_in.weight"
    assert renamed("layers.0.norm.bias", stems) == "first.bias"
    assert renamed("layers.1.norm.bias", stems) is None
