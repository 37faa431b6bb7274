"""The names of cached blocks: what they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.kv.cache_identity import CacheIdentity, block_key
from octavo.engine.load import load_engine
from octavo.prompt import SPAN_TOKEN_ID, Prompt, Span
from tests.support.text_models import save_decoder

IDENTITY = CacheIdentity(b"model", b"layout")

OPTIONS = {"num_threads": 1, "max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory": "1MiB"}


def identity_of(path: Path, **options: object) -> CacheIdentity:
    loaded = load_engine(EngineConfig(model=str(path), **{**OPTIONS, **options}))
    loaded.executor.close()
    return loaded.engine.scheduler.kv_cache.identity


def test_a_loaded_model_names_its_content_and_the_way_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = save_decoder(tmp_path / "a"), save_decoder(tmp_path / "b")
    assert identity_of(model) != identity_of(model)  # just written: it might still change
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    found = [
        identity_of(model),
        identity_of(model, kv_dtype="int8"),
        identity_of(model, block_size=32),
        identity_of(model, dtype="bfloat16"),
        identity_of(model, backend="reference"),
        identity_of(other),
    ]
    assert len(set(found)) == len(found)
    assert identity_of(model, max_num_seqs=1, max_num_batched_tokens=32) == found[0]
    config = (model / "config.json").read_text()
    assert '"rope_theta": 10000.0' in config
    (model / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert identity_of(model) not in found
    monkeypatch.setenv("OCTAVO_ISA", "scalar")
    assert len({identity_of(other), *found}) == len(found) + 1


def test_everything_that_a_block_depends_on_changes_its_name() -> None:
    roots = [
        IDENTITY.root(),
        replace(IDENTITY, model=b"other").root(),
        replace(IDENTITY, layout=b"other").root(),
        CacheIdentity(b"modellayout", b"").root(),  # parts do not run into each other
        IDENTITY.root("salt"),
        IDENTITY.root(adapter=b"salt"),
        CacheIdentity.unique().root(),
        CacheIdentity.unique().root(),
    ]
    assert len(set(roots)) == len(roots)
    first = block_key(roots[0], [1, 2])
    keys = [
        first,
        *(block_key(root, [1, 2]) for root in roots[1:]),
        block_key(first, [1, 2]),
        block_key(roots[0], [2, 1]),
    ]
    assert len(set(keys)) == len(keys)
    assert block_key(IDENTITY.root(), (1, 2)) == first


def test_spans_are_a_part_of_the_name() -> None:
    def key(*spans: Span) -> bytes:
        prompt = Prompt([SPAN_TOKEN_ID] * 8, spans)
        return block_key(IDENTITY.root(), prompt.token_ids[:4], prompt.marks(0, 4))

    keys = [key(), key(Span(0, 4, b"cat")), key(Span(0, 4, b"dog")), key(Span(0, 3, b"cat")), key(Span(1, 3, b"cat"))]
    assert len(set(keys)) == len(keys)
    assert key(Span(5, 2, b"cat")) == key()  # it lies in the next block
