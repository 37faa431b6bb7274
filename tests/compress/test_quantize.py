"""Files of smaller types: which tensor gets which, the command, and that nothing else changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from octavo.backends.quantizers import quantize as encoded
from octavo.cli.quantize import quantize
from octavo.compress.mixtures import MIXTURES, can_be_quantized, fallback
from octavo.compress.quantize import TypeOptions, choose_types
from octavo.compress.source import open_source
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from tests.compress.models import write_model
from tests.support.processes import octavo_here

# What `llama_model_quantize` of llama.cpp (0.5.0) wrote for models of `write_model` with 16 layers: every tensor whose
# type is not that of most tensors. Three shapes of models, with and without an importance matrix.
LLAMA_CPP = json.loads(Path(__file__).with_name("llama_cpp_types.json").read_text())
SHAPES = {
    "gqa2": {"gqa": 2},
    "gqa4": {"gqa": 4, "tied": False},
    "experts8": {"gqa": 4, "experts": 8, "tied": False},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quantize") / "model.gguf")


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and error of the command; errors of Octavo as text."""
    result = CliRunner().invoke(quantize, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


def expanded(text: str) -> dict[str, str]:
    """`attn_v Q6_K 0,1; output Q6_K -` as types by name."""
    found = {}
    for part in filter(None, text.split("; ")):
        name, type_name, layers = part.split()
        found |= {f"blk.{i}.{name}.weight" if i != "-" else f"{name}.weight": type_name for i in layers.split(",")}
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_mixture_has_llama_cpps_types(shape: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", layers=16, width=256, **SHAPES[shape])  # type: ignore[arg-type]
    with open_source(path) as model:
        for name, mixture in MIXTURES.items():
            for has_importance in (False, True):
                key = f"{shape} {name} {'importance' if has_importance else 'plain'}"
                if key not in LLAMA_CPP:  # llama.cpp refuses it
                    continue
                choices = choose_types(model, mixture, TypeOptions(), has_importance=has_importance)
                found = {c.tensor.name: c.type_name for c in choices if c.type_name not in ("F32", mixture.base)}
                assert found == expanded(LLAMA_CPP[key]), key


def test_widths_that_do_not_fit_have_llama_cpps_substitutes() -> None:
    pairs = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q3_K": "Q4_0", "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL"}
    assert {name: fallback(name, 96) for name in pairs} == pairs
    assert fallback("Q4_K", 512) == "Q4_K"
    assert fallback("Q4_K", 40) == fallback("Q8_0", 40) == "F16"
    assert not can_be_quantized("blk.0.attn_norm.weight", (4, 4))
    assert not can_be_quantized("blk.0.ffn_gate_inp.weight", (4, 256))


def test_the_file_has_the_quantizers_bytes_and_everything_else_as_before(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    code, out, error = run(source, path, "--type", "q4_k_m")
    assert code == 0, error
    assert out.startswith("463.4 KiB, 4.81 bits per weight; tensors: 12 Q4_K, 5 F32, 3 Q6_K")
    before, after, judge = open_gguf(source), open_gguf(path), gguf.GGUFReader(path)
    assert list(before.tensors) == list(after.tensors) == [tensor.name for tensor in judge.tensors]
    changed = {"general.file_type": 15, "general.quantization_version": 2}
    assert after.metadata.keys() == before.metadata.keys() | changed.keys()
    for key, value in after.metadata.items():
        np.testing.assert_array_equal(value, changed.get(key, before.metadata.get(key)))
    for name, info in after.tensors.items():
        if info.type_name == "F32":
            np.testing.assert_array_equal(after.array(name), before.array(name))
        else:
            x = before.weight(name).dequantize()
            np.testing.assert_array_equal(after.array(name), encoded(info.type_name, x))
    assert {info.type_name for info in after.tensors.values()} == {"Q4_K", "Q6_K", "F32"}
    open_checkpoint(path).close()


def test_threads_and_parts_change_no_byte_of_a_tensor(source: Path, tmp_path: Path) -> None:
    one, many, parts = tmp_path / "one.gguf", tmp_path / "many.gguf", tmp_path / "parts.gguf"
    assert run(source, one, "--type", "iq3_m", "--threads", 1)[0] == 0
    assert run(source, many, "--type", "iq3_m", "--threads", 3)[0] == 0
    assert one.read_bytes() == many.read_bytes()
    assert run(source, parts, "--type", "iq3_m", "--max-part-size", "100KiB")[0] == 0
    whole = open_gguf(tmp_path / "parts-00001-of-00004.gguf")
    for name, info in open_gguf(one).tensors.items():
        np.testing.assert_array_equal(whole.array(name), open_gguf(one).array(name))
        assert whole.tensors[name].type_name == info.type_name


def test_overrides_and_kept_tensors(source: Path, tmp_path: Path) -> None:
    options = ("--tensor-type", "blk.1.ffn_down=q8_0", "--tensor-type", "ffn_down=iq4_nl", "--keep", "attn_q")
    code, out, _ = run(source, tmp_path / "m.gguf", "--type", "q4_k_s", *options, "--json")
    assert code == 0
    types = json.loads(out)["tensors"]
    assert types["blk.0.ffn_down.weight"] == "IQ4_NL"
    assert types["blk.1.ffn_down.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "F16"
    assert types["blk.0.attn_k.weight"] == "Q4_K"


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "m.gguf", "--type", "q8_0", "--dry-run")[0] == 0
    assert not list(tmp_path.iterdir())


def test_quantizing_again_is_done_with_a_warning(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert run(source, first, "--type", "q8_0")[0] == 0
    code, _, error = run(first, second, "--type", "q4_0")
    assert code == 0
    assert "quantizing the float model gives a better result" in error
    assert "tensors are already quantized" in error
    code, _, error = run(second, tmp_path / "c.gguf", "--type", "q8_0")
    assert code == 0
    assert re.search(
        r"the result is larger than SRC, [\d.]+ .iB instead of [\d.]+ .iB: choose a type with fewer", error
    )
    result = octavo_here("convert", first, tmp_path / "d.gguf", "--dtype", "f16")
    assert "their floats are only as exact as the quantized weights" in result.stderr
    assert "larger" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--type", "q4_k_x"), "type 'q4_k_x' is unknown; choose one of f32, f16"),
        (
            ("--type", "gptq-5bit", "--group-size", "64"),
            "; for checkpoints gptq-2bit, gptq-3bit, gptq-4bit, gptq-8bit, rtn",
        ),
        (("--type", "q4_0", "--tensor-type", "ffn_down"), "write PATTERN=TYPE"),
        (("--type", "q4_0", "--tensor-type", "ffn=q9"), "type 'q9' is unknown; a tensor can be BF16, F16"),
        (("--type", "q4_0", "--tensor-type", "(=q8_0"), "is not a regular expression"),
        (("--type", "q4_0", "--keep", "attention"), "pattern 'attention' matches no tensor name"),
        (("--type", "q4_0", "--max-part-size", "big"), "--max-part-size is 'big'; write a size in bytes"),
        (("--type", "tq2_0"), "cannot become TQ2_0: each block of 256 may contain only -d, 0 and d"),
    ],
)
def test_mistakes_end_in_one_line(source: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, error = run(source, tmp_path / "m.gguf", *arguments)
    assert code != 0
    assert message in error
    assert not list(tmp_path.iterdir())


def test_destinations_that_are_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    assert "already exists; --force replaces it" in run(source, path, "--type", "q8_0")[2]
    assert path.read_bytes() == b"mine"
    assert "this is the source" in run(source, source, "--type", "q8_0", "--force")[2]
    assert "no such directory" in run(source, tmp_path / "a" / "m.gguf", "--type", "q8_0")[2]
    assert "must end with .gguf" in run(source, tmp_path / "m.bin", "--type", "q8_0")[2]
    assert run(source, path, "--type", "q8_0", "--force")[0] == 0


def test_a_width_that_an_override_does_not_allow(tmp_path: Path) -> None:
    path = write_model(tmp_path / "narrow.gguf", width=96)
    code, _, error = run(path, tmp_path / "m.gguf", "--type", "q8_0", "--tensor-type", "ffn_down=q4_k")
    assert code != 0
    assert "rows of 96 values, not a multiple of the Q4_K block size 256; choose Q5_0" in error
    code, out, error = run(path, tmp_path / "m.gguf", "--type", "q4_k_m", "--json")
    assert "Q4_K does not fit rows of 96, so it is Q5_0" in error
    assert json.loads(out)["tensors"]["blk.0.ffn_down.weight"] in ("Q5_0", "Q8_0")


def test_weights_that_are_no_numbers_are_named(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "nan.gguf"
    data = bytearray(source.read_bytes())
    info = open_gguf(source).tensors["blk.1.ffn_up.weight"]
    data[info.offset + 2 : info.offset + 4] = np.float16(np.nan).tobytes()
    damaged.write_bytes(data)
    code, _, error = run(damaged, tmp_path / "m.gguf", "--type", "q4_k_m")
    assert code != 0
    assert "tensor 'blk.1.ffn_up.weight' cannot become Q4_K: row 0, column 1 is nan" in error
    assert [p.name for p in tmp_path.iterdir()] == ["nan.gguf"]


def test_the_command_itself(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "quantize", source, tmp_path / "m.gguf", "--type"]
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
