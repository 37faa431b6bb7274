"""Headers of hub models that are not here, from a hub on loopback. See test_hub.py for why these are processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.loader.test_hub import environment
from tests.support.fake_servers import Behaviour, serve
from tests.support.gguf_writer import Tensor, write_split
from tests.support.text_models import save_decoder
from tests.support.tiny_gguf import plain_tensors, tiny_gguf, tiny_keys, wide_gguf

FIRST_BYTES = 256  # so that headers of tiny models take several requests
PROGRAM = """
import json, sys
from contextlib import closing
from octavo.errors import OctavoError
from octavo.loader import remote_headers
from octavo.loader.checkpoint import open_checkpoint
remote_headers._FIRST_BYTES = int(sys.argv[2])
try:
    with remote_headers.remote_headers(sys.argv[1]) as path:
        if path is None:
            print(json.dumps(None))
            raise SystemExit
        with closing(open_checkpoint(path)) as checkpoint:
            frequencies = checkpoint.config.rope.params.frequencies
            shapes = {name: list(w.shape) for name, w in checkpoint.weights.items()}
        files = [file for file in (path if path.is_dir() else path.parent).rglob("*") if file.is_file()]
        sizes = {file.name: file.stat().st_size for file in files}
    print(json.dumps([shapes, list(map(float, frequencies)), sizes, path.exists(), ""]))
except OctavoError as error:
    print(json.dumps([{}, [], {}, False, str(error)]))
"""


def octavo(*words: str, cache: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=environment(cache, endpoint),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def headers(hub: Behaviour, cache: Path, name: str = "org/name") -> list:
    with serve(hub) as endpoint:
        result = octavo("-c", PROGRAM, name, str(FIRST_BYTES), cache=cache, endpoint=endpoint)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def content_bytes(hub: Behaviour, ending: str) -> int:
    """The bytes asked for of files with this ending."""
    asked = [h["range"] for m, path, h in hub.requests if m == "GET" and path.endswith(ending) and "range" in h]
    spans = [span.removeprefix("bytes=").split("-") for span in asked]
    return sum(int(last) + 1 - int(first) for first, last in spans)


def test_a_gguf_file(tmp_path: Path) -> None:
    divisors = np.array([1, 2, 4, 8], np.float32)
    content = tiny_gguf(tensors=[*plain_tensors(), Tensor("rope_freqs.weight", "F32", (4,), divisors.tobytes())])
    hub = Behaviour({"m-Q8_0.gguf": content})
    shapes, frequencies, sizes, is_left, error = headers(hub, tmp_path, "org/name:Q8_0")
    assert (error, is_left, sizes) == ("", False, {"m-Q8_0.gguf": len(content)})
    assert shapes["embed_tokens.weight"] == [8, 32]
    assert np.allclose(frequencies, [1e4 ** (-i / 4) / 2**i for i in range(4)])  # head size 8: divided, so not zeros
    assert content_bytes(hub, ".gguf") < len(content)
    assert not list((tmp_path / "octavo").rglob("*.gguf"))


def test_a_gguf_file_in_parts(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    tensors = plain_tensors()
    parts = write_split(tmp_path / "here", "m", tiny_keys(), [tensors[:4], tensors[4:8], tensors[8:]])
    hub = Behaviour({part.name: part.read_bytes() for part in parts})
    shapes, _, sizes, _, error = headers(hub, tmp_path)
    assert (error, len(sizes)) == ("", 3)
    assert shapes["layers.0.mlp.up_proj.weight"] == [64, 32]


def test_a_safetensors_directory(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model")
    hub = Behaviour({file.name: file.read_bytes() for file in folder.iterdir()})
    shapes, _, sizes, is_left, error = headers(hub, tmp_path)
    assert (error, is_left) == ("", False)
    assert sizes["model.safetensors"] == len(hub.files["model.safetensors"])
    assert "layers.0.self_attn.q_proj.weight" in shapes
    assert 0 < content_bytes(hub, ".safetensors") < len(hub.files["model.safetensors"]) // 2


def test_the_plan_of_a_split_model_that_is_not_downloaded(tmp_path: Path) -> None:
    """The parts on the GPU and on the CPU, and a speed, from the headers alone."""
    folder = save_decoder(tmp_path / "model")
    hub = Behaviour({file.name: file.read_bytes() for file in folder.iterdir()})
    program = """
import sys
from octavo.cli.main import main
from octavo.loader import remote_headers
remote_headers._FIRST_BYTES = int(sys.argv[1])
main(sys.argv[2:])
"""
    options = ("--ctx", "64", "--backend", "torch:cpu", "--gpu-layers", "1")
    with serve(hub) as endpoint:
        words = ("-c", program, str(FIRST_BYTES), "plan", "org/name", *options)
        result = octavo(*words, cache=tmp_path, endpoint=endpoint)
    assert result.returncode == 0, result.stderr
    written = " ".join(result.stdout.split())
    assert "1 of 2 layers, weights" in written
    assert "tokens/s" in written
    assert 0 < content_bytes(hub, ".safetensors") < len(hub.files["model.safetensors"]) // 2


@pytest.mark.parametrize("damage", ["no ranges", "not a model", "refused"])
def test_hubs_that_misbehave(damage: str, tmp_path: Path) -> None:
    hub = Behaviour({"m.gguf": tiny_gguf()})
    if damage == "no ranges":
        hub.has_ranges = False
    elif damage == "not a model":
        hub.files["m.gguf"] = b"<html>" * 1000
    else:
        hub.status_of_files = 403
    shapes, _, _, _, error = headers(hub, tmp_path)
    expected = {"no ranges": "", "not a model": "offset 0", "refused": "the header of m.gguf could not be fetched"}
    assert expected[damage] in error
    assert bool(shapes) == (damage == "no ranges")


@pytest.mark.parametrize("name", ["smollm2", "./model.gguf"])
def test_what_is_no_model_of_the_hub(name: str, tmp_path: Path) -> None:
    hub = Behaviour()
    assert headers(hub, tmp_path, name) is None
    assert not hub.requests


def test_the_commands_download_nothing(tmp_path: Path) -> None:
    content = wide_gguf(3)
    hub, here = Behaviour({"m.gguf": content}), tmp_path / "m.gguf"
    here.write_bytes(content)
    with serve(hub) as endpoint:
        for command in (["plan", "--ctx", "64"], ["show"]):
            remote, local = (
                octavo("-m", "octavo", *command, model, "--json", cache=tmp_path, endpoint=endpoint)
                for model in ("org/name", str(here))
            )
            assert remote.returncode == local.returncode == 0, remote.stderr
            facts = [json.loads(result.stdout) for result in (remote, local)]
            place = [found.pop("model" if command[0] == "plan" else "path") for found in facts]
            assert place == ["org/name, not downloaded yet", str(here)]
            changing = {"available_bytes", "headroom_bytes", "largest_context", "largest_users"}
            assert all(facts[0][key] == facts[1][key] for key in facts[1].keys() - changing)
    assert content_bytes(hub, ".gguf") < len(content) // 2
    assert not [file for file in (tmp_path / "octavo").rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]
