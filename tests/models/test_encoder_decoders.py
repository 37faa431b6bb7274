"""Models with an encoder and a decoder against transformers: rows of the encoder, then logits of the decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.batch import Batch, DomainRows
from octavo.engine.encoding.source_encoder import SourceEncoder
from octavo.errors import ModelLoadError
from octavo.graph.passes import optimize
from octavo.graph.source import SOURCE, source_width
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.models import build_encoder_graph, build_graph
from octavo.prompt import SourceText
from tests.support.batches import Request, step
from tests.support.tiny_encoder_decoders import CONFIGS, GGUF_CONFIGS, expected_logits, save_gguf, tiny_encoder_decoder

BLOCK = 16
SOURCES = [np.random.default_rng(i).integers(2, 96, n).tolist() for i, n in enumerate((45, 1, 19))]
ANSWERS = [np.random.default_rng(9 + i).integers(2, 96, n).tolist() for i, n in enumerate((30, 40, 3))]
LIMITS = ExecutorLimits(128, 4, 128, 128, further_rows={SOURCE: 128})
BACKENDS = [("reference", 2e-5), ("cpu", 6e-3), ("torch:cpu", 6e-3)]  # caches are of 16 bits


@pytest.mark.parametrize(("backend", "tolerance"), BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_safetensors(name: str, backend: str, tolerance: float, tmp_path: Path) -> None:
    model = tiny_encoder_decoder(name)
    model.save_pretrained(tmp_path)
    assert_logits(open_checkpoint(tmp_path), backend, model, tolerance)


@pytest.mark.parametrize("name", GGUF_CONFIGS)
def test_gguf(name: str, tmp_path: Path) -> None:
    model = tiny_encoder_decoder(name, relative_attention_max_distance=128)
    checkpoint = open_checkpoint(save_gguf(model, tmp_path / "model.gguf"))
    assert_logits(checkpoint, "reference", model, 2e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_proj", "gated-mish"),
        ("decoder_start_token_id", 96),
        ("relative_attention_max_distance", 12),
        ("d_kv", 1 << 20),
        ("num_layers", 0),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(key: str, value: object, tmp_path: Path) -> None:
    tiny_encoder_decoder("t5").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(tmp_path)


def assert_logits(checkpoint: Checkpoint, backend: str, model: Any, tolerance: float) -> None:
    """Texts side by side; answers in two steps, the second of which has no rows of sources."""
    start = getattr(model.config, "decoder_start_token_id", getattr(model.config, "bos_token_id", None))
    assert checkpoint.config.start_token_id == start  # type: ignore[attr-defined]
    answers = [[start, *answer] for answer in ANSWERS]
    found = logits_of(checkpoint, backend, answers)
    for source, answer, logits in zip(SOURCES, answers, found, strict=True):
        expected = expected_logits(model, source, answer)
        assert expected.std() > 0.1
        assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


def logits_of(checkpoint: Checkpoint, backend: str, answers: list[list[int]]) -> list[NDArray[np.float32]]:
    config, shapes = checkpoint.config, checkpoint.weights.shapes
    compiler = get_backend(backend)
    reader = optimize(build_encoder_graph(checkpoint.architecture, config, shapes), PASSES)
    assert reader.takes_whole_texts
    assert not reader.kv_caches
    encoder = SourceEncoder(compiler.compile(reader, checkpoint.weights, LIMITS), 128)
    encoder.executor.allocate_cache(1, BLOCK)
    encoder.begin([SourceText(tuple(source)) for source in SOURCES])
    rows = [rows for _, rows in encoder.run(None)]
    encoder.close()
    graph = optimize(build_graph(checkpoint.architecture, config, shapes), PASSES)
    width = source_width(graph)
    assert width == rows[0].shape[1]
    executor = compiler.compile(graph, checkpoint.weights, LIMITS)
    executor.allocate_cache(40, BLOCK)
    blocks = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    texts = [Request(answer, own) for answer, own in zip(answers, blocks, strict=True)]
    found: list[list[NDArray[np.float32]]] = [[] for _ in answers]
    groups = graph.cache_layout.groups
    for counts in ([2, 17, 1], [len(answer) - n for answer, n in zip(answers, (2, 17, 1), strict=True)]):
        batch = step(list(zip(texts, counts, strict=True)), block_size=BLOCK, num_groups=len(groups))
        add_rows(batch, rows, is_first=counts[2] == 1, width=width)
        logits = executor.submit(batch).wait().logits
        assert logits is not None
        for own, part in zip(found, np.split(logits, batch.query_start_loc[1:-1]), strict=True):
            own.append(part)
    executor.close()
    return [np.concatenate(parts) for parts in found]


def add_rows(batch: Batch, rows: list[NDArray[np.float32]], *, is_first: bool, width: int) -> None:
    lengths = np.array([len(own) for own in rows], np.int32)
    if not is_first:
        batch.inputs = (np.zeros((0, width), np.float32),)
        batch.domains = {SOURCE.name: DomainRows(0, lengths=lengths)}
        return
    batch.inputs = (np.concatenate(rows),)
    every = [np.arange(n) for n in lengths]
    tables = batch.block_tables
    slots = [tables[:, i, at // BLOCK] * BLOCK + at % BLOCK for i, at in enumerate(every)]
    places = np.ascontiguousarray(np.concatenate(slots, axis=1), np.int32)
    batch.domains = {SOURCE.name: DomainRows(len(batch.inputs[0]), lengths=lengths, slots=places)}
