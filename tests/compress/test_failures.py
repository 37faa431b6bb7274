"""Commands that write a model, on a full disk, killed, and with hopeless input."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from octavo.cli.compare import compare
from octavo.cli.distill import distill
from octavo.cli.evaluate import evaluate
from octavo.cli.prune import prune
from octavo.cli.quantize import convert, quantize
from octavo.errors import ModelLoadError, ModelWriteError, OctavoError, UsageError
from octavo.loader.atomic_file import mapped_array
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from tests.compress.models import write_model
from tests.compress.test_convert import save

TEXT = "ab cd a b dcab abcd bb cc " * 20
CALIBRATION = ("--calibration", "text.txt")
# command, name of its source, name of its result, other arguments
CASES: dict[str, tuple[click.Command, str, str, tuple[str, ...]]] = {
    "quantize": (quantize, "m.gguf", "out.gguf", ("--type", "q8_0")),
    "quantize-folder": (quantize, "model", "out", ("--type", "fp8")),
    "convert": (convert, "model", "out.gguf", ("--dtype", "f32")),
    "convert-folder": (convert, "model", "out", ("--to", "safetensors", "--dtype", "f32")),
    "prune": (prune, "m.gguf", "out.gguf", (*CALIBRATION, "--layers", "1")),
    "distill": (distill, "m.gguf", "out.gguf", ("--data", "text.txt", "--length", "32", "--steps", "1")),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources, as the current folder."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.gguf")
    save("llama", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def arguments_of(case: str) -> list[str]:
    command, source, result, more = CASES[case]
    return [*([source] * (2 if command is distill else 1)), result, *more]


def run(case: str, *more: str) -> tuple[int, str]:
    """Exit code and error of the command. Anything but an error of Octavo is raised."""
    result = CliRunner().invoke(CASES[case][0], [*arguments_of(case), *more])
    if result.exception is not None and not isinstance(result.exception, OctavoError | SystemExit):
        raise result.exception
    return result.exit_code, result.stderr + str(result.exception or "")


def contents(folder: Path) -> dict[str, bytes]:
    """The files beside the cache."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("had_result", [False, True])
def test_a_disk_that_is_full_in_the_middle(
    folder: Path, case: str, had_result: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the reason; no file is new, and an older result is as it was."""
    if had_result:
        code, error = run(case)
        assert code == 0, error
    before, real, left = contents(folder), os.write, 20_000

    def write(file: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, data[:left])
        left -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        code, error = run(case, "--force")
    assert code != 0
    assert "No space left on device" in error
    kept = {name: data for name, data in contents(folder).items() if not name.startswith("out.partial/")}
    assert kept == before
    with pytest.raises(ModelLoadError):
        open_checkpoint(folder / "out.partial")
    assert run(case, "--force")[0] == 0
    assert not (folder / "out.partial").exists()


@pytest.mark.parametrize("case", ["quantize", "convert", "prune", "distill"])
def test_a_kill_in_the_middle_leaves_the_older_result(folder: Path, case: str) -> None:
    """Killed before the last bytes; what is left is no model, and the next attempt writes over it."""
    (folder / "out.gguf").write_bytes(b"older")
    code = (
        "import os, signal, octavo.loader.atomic_file as f\n"
        "f.AtomicFile.complete = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from octavo.cli.main import main; main()"
    )
    name = case.partition("-")[0]
    command = [sys.executable, "-c", code, name, *arguments_of(case), "--force"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    assert (folder / "out.gguf").read_bytes() == b"older"
    (folder / "out.gguf.partial").rename(folder / "left.gguf")
    with pytest.raises(ModelLoadError):
        open_checkpoint(folder / "left.gguf")
    (folder / "left.gguf").rename(folder / "out.gguf.partial")
    assert run(case, "--force")[0] == 0
    assert not (folder / "out.gguf.partial").exists()


@pytest.mark.parametrize("case", ["quantize-folder", "convert-folder"])
def test_a_kill_in_the_middle_of_a_folder(folder: Path, case: str) -> None:
    """Killed before the configuration, which comes last: an older result stays, and what is left is no model."""
    assert run(case)[0] == 0
    before = {name: data for name, data in contents(folder).items() if name.startswith("out/")}
    code = (
        "import json, os, signal\n"
        "import octavo.compress.checkpoints.write as w, octavo.compress.to_safetensors as s\n"
        "kill = lambda path, *_: os.kill(os.getpid(), signal.SIGKILL) if path.name == 'config.json' else None\n"
        "w.write_text = s.write_text = kill\n"
        "from octavo.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, case.partition("-")[0], *arguments_of(case), "--force"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    assert {name: data for name, data in contents(folder).items() if name.startswith("out/")} == before
    assert (folder / "out.partial").is_dir()
    with pytest.raises(ModelLoadError):
        open_checkpoint(folder / "out.partial")
    assert run(case, "--force")[0] == 0
    assert not (folder / "out.partial").exists()


def spoil(path: Path, tensor: str, value: float) -> None:
    """Puts a number into a float16 or float32 tensor of a GGUF file."""
    data = bytearray(path.read_bytes())
    info = open_gguf(path).tensors[tensor]
    number = np.array(value, np.float32 if info.type_name == "F32" else np.float16).tobytes()
    data[info.offset + 4 : info.offset + 4 + len(number)] = number
    path.write_bytes(data)


SPOILT: dict[str, tuple[click.Command, tuple[str, ...]]] = {
    "quantized": (quantize, ("m.gguf", "out.gguf", "--type", "q8_0")),
    "copied": (quantize, ("m.gguf", "out.gguf", "--type", "f16")),
    "kept": (quantize, ("m.gguf", "out.gguf", "--type", "q8_0", "--keep", "blk.1")),
    "importance": (quantize, ("m.gguf", "out.gguf", "--type", "f16", "--imatrix", "text.txt")),
    "by size": (quantize, ("m.gguf", "out.gguf", "--bpw", "6", *CALIBRATION)),
    "converted": (convert, ("m.gguf", "out.gguf")),
    "folder": (convert, ("m.gguf", "out", "--to", "safetensors")),
    "layers": (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--layers", "1")),
    "heads": (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--heads", "0.5")),
    "columns": (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--ffn", "0.5")),
    "wanda": (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--sparsity", "0.5")),
    "sparsegpt": (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--sparsity", "2:4", "--method", "sparsegpt")),
    "distilled": (distill, ("m.gguf", "m.gguf", "out.gguf", "--data", "text.txt", "--length", "32", "--steps", "1")),
    "judged": (evaluate, ("m.gguf", "--text", "text.txt", "--window", "32", "--per-token", "out.jsonl")),
    "compared": (compare, ("m.gguf", "--text", "text.txt", "--window", "32", "--turns", "0", "--plots", ".")),
}


@pytest.mark.parametrize(
    ("case", "tensor", "value"),
    [
        *((case, "blk.1.ffn_up.weight", np.nan) for case in SPOILT),
        *((case, "blk.1.attn_norm.weight", np.nan) for case in SPOILT),
        *((case, "blk.1.attn_v.weight", np.inf) for case in SPOILT if "out.gguf" in SPOILT[case][1]),
    ],
)
def test_weights_that_are_no_numbers(folder: Path, case: str, tensor: str, value: float) -> None:
    """One line, and no file; whether the numbers are computed with or copied."""
    spoil(folder / "m.gguf", tensor, value)
    before = contents(folder)
    command, arguments = SPOILT[case]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, OctavoError)
    error = str(result.exception)
    assert "nan" in error.lower() or "inf" in error or "not finite" in error
    assert "\n" not in error
    assert contents(folder) == before


def test_a_vector_that_stays_as_it_is(folder: Path) -> None:
    """A norm of a checkpoint is copied bit by bit, but not with a NaN in it."""
    path = folder / "model/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    code, error = run("quantize-folder")
    assert code != 0
    assert "tensor 'model.norm.weight' cannot become F32: it contains NaN or infinity; use an intact model" in error
    assert not [path for path in folder.glob("out*/**/*") if path.name == "config.json"]
    with pytest.raises(ModelLoadError):
        open_checkpoint(folder / "out.partial")


@pytest.mark.parametrize("text", ["", " \n\n ", "a"])
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--layers", "1")),
        (prune, ("m.gguf", "out.gguf", *CALIBRATION, "--sparsity", "0.5")),
        (distill, ("m.gguf", "m.gguf", "out.gguf", "--data", "text.txt", "--length", "32", "--steps", "1")),
        (quantize, ("m.gguf", "out.gguf", "--type", "q8_0", "--imatrix", "text.txt")),
        (quantize, ("m.gguf", "out.gguf", "--bpw", "6", *CALIBRATION)),
        (quantize, ("model", "out", "--type", "gptq-4bit", "--group-size", "32", *CALIBRATION)),
        (quantize, ("model", "out", "--type", "awq", "--group-size", "32", *CALIBRATION)),
        (quantize, ("model", "out", "--type", "w8a8", *CALIBRATION)),
        (evaluate, ("m.gguf", "--text", "text.txt", "--window", "32")),
        (compare, ("m.gguf", "--text", "text.txt", "--window", "32", "--turns", "0")),
    ],
)
def test_a_text_without_tokens(folder: Path, command: click.Command, arguments: tuple[str, ...], text: str) -> None:
    (folder / "text.txt").write_text(text)
    before = contents(folder)
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, UsageError)
    assert re.search(r"is empty; give|the text has \d tokens", str(result.exception))
    assert "\n" not in str(result.exception)
    assert contents(folder) == before


def test_a_type_for_another_width(folder: Path) -> None:
    write_model(folder / "m.gguf", width=96)
    code, error = run("quantize", "--tensor-type", "ffn_down=q4_k")
    assert code != 0
    assert "rows of 96 values, not a multiple of the Q4_K block size 256; choose Q5_0" in error
    assert not list(folder.glob("out*"))


def test_the_space_of_a_mapped_file_is_taken_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kind = np.dtype(np.float16)
    array = mapped_array(tmp_path / "a.npy", kind, (1000, 1000))
    assert (tmp_path / "a.npy").stat().st_blocks * 512 >= array.nbytes
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelWriteError, match=r"b.npy: No space left on device"):
        mapped_array(tmp_path / "b.npy", kind, (1000, 1000))
    assert not (tmp_path / "b.npy").exists()
