"""GGUF adapters of tiny models against llama.cpp, through the server of xllamacpp."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from octavo.adapters.read import read_adapter
from octavo.loader.checkpoint import open_checkpoint
from tests.compress import test_convert
from tests.compress.test_llama_cpp import EXACT, LEAST, logprobs, normalized, served
from tests.models.test_parity import TOKENS
from tests.support import adapted_steps
from tests.support.gguf_adapters import save_adapter


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3moe"])
def test_llama_cpp_has_the_same_logits(name: str, tmp_path: Path) -> None:
    """With the adapter and without: permuted rows of q and k, stacks of experts and their routers."""
    source, path = test_convert.save(name, tmp_path / "model"), tmp_path / "m.gguf"
    code, _, error = test_convert.run(source, path, "--to", "gguf")
    assert code == 0, error
    adapter = save_adapter(path, tmp_path / "a.gguf")
    with closing(open_checkpoint(path)) as checkpoint:
        executor = adapted_steps.executor_of(checkpoint)
        adapted_steps.load(executor, {0: read_adapter(adapter, adapted_steps.base_of(checkpoint))})
        adapted, plain = adapted_steps.logits_of(executor, [TOKENS, TOKENS], [0, -1])
    for logits, adapters in ((adapted, [adapter]), (plain, [])):
        with served(path, *adapters) as server:
            found, own = logprobs(server, TOKENS, logits.shape[1]), normalized(logits[-1])
        assert len(found) == len(own)
        errors = [abs(own[token] - value) for token, value in found.items() if own[token] > LEAST]
        assert max(errors) < EXACT * np.abs(logits[-1]).max()
    assert np.abs(adapted - plain)[-1].max() > 0.1 * np.abs(plain).max()
