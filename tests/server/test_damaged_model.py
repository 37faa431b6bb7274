"""Models with something wrong that no request is at fault for: an error for who asked, and a live server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.gguf_writer import Tensor
from tests.support.server import running_server
from tests.support.tiny_gguf import tiny_gguf, tiny_tensors
from tests.support.witness import COMPLETIONS, body, figures

CACHE = ("--kv-cache-memory", "64MiB")


def damaged(tensor: Tensor, value: float) -> Tensor:
    """The last number of a vector is this one."""
    numbers = np.frombuffer(tensor.data, np.float32).copy()
    numbers[-1] = value
    return replace(tensor, data=numbers.tobytes())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    """The model loads, because only its use finds them. Each answer is an error with the reason, never a text."""
    path = tmp_path / "damaged.gguf"
    tensors = [damaged(item, value) if item.name == "output_norm.weight" else item for item in tiny_tensors()]
    path.write_bytes(tiny_gguf(tensors=tensors))
    with running_server(f"damaged={path}", *CACHE) as server, server.client as client:
        for _ in range(2):
            answer = client.post(COMPLETIONS, json=body(4, prompt=[0, 2, 3]))
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "numerical_error")
            answer = client.post("/v1/embeddings", json={"input": [0, 2, 3]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "numerical_error")
        model = figures(server)
        assert (model["num_running"], model["num_used_blocks"], model["num_restarts"]) == (0, 0, 0)
