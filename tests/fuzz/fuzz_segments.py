"""Coverage-guided fuzzing of the reader of kept prompts with atheris; `docs/fuzzing.md` has the command.

An input is a whole segment. Whatever it holds, the store opens it and goes on: each record that it gives is one that
was written, under its key, or fails its digest; and a record that is saved then is there after a restart.
"""

from __future__ import annotations

import random
import shutil

import atheris
import numpy as np

with atheris.instrument_imports(include=["octavo.engine.kv"]):
    from octavo.engine.kv.block_tier import opened, sealed
    from octavo.engine.kv.disk_store import DiskStore
    from octavo.engine.kv.segment import RecordHead, SegmentHead

from tests.fuzz.target import run, scratch

IDENTITY = bytes(range(32))
BLOCK = 40
KEYS = [bytes([i]) * (32 + 2 * (i % 2) + 6 * (i % 3 // 2)) for i in range(5)]
DIRECTORY = scratch() / "kept"


def data_of(key: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(BLOCK, key[0], np.uint8)


def record(key: bytes, *, is_gone: bool = False) -> bytes:
    content = b"" if is_gone else sealed(key, data_of(key))
    return RecordHead(key, len(content), is_gone).content + content


def open_bytes(content: bytes) -> None:
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(mode=0o700)
    (DIRECTORY / "00000000.octkv").write_bytes(content)
    store = DiskStore(DIRECTORY, IDENTITY, 1 << 20)
    records = store.load(KEYS).wait(10)
    if records is None:
        raise AssertionError("nothing came")
    for key, found in zip(KEYS, records, strict=True):
        data = None if found is None else opened(key, found, BLOCK)
        if data is not None and not (data == data_of(key)).all():
            raise AssertionError(f"wrong bytes under {key[:1]!r}")
        if found is not None and data is None:
            store.discard(key)
    for key in KEYS:
        store.save(key, data_of(key))
    store.close()
    again = DiskStore(DIRECTORY, IDENTITY, 1 << 20)
    records = again.load(KEYS).wait(10)
    if records is None or any(r is None or opened(k, r, BLOCK) is None for k, r in zip(KEYS, records, strict=True)):
        raise AssertionError("a record that was saved has not come back")
    again.close()


def mutate(content: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own changes; half of the time then a whole record, so that the digest of a header is right."""
    changed = bytearray(atheris.Mutate(content, max_size))
    rng = random.Random(seed)
    if rng.random() < 0.5:
        new = RecordHead(rng.choice(KEYS), rng.choice((0, 56, 57, 1 << 40)), rng.random() < 0.2).content
        new = rng.choice((new, record(rng.choice(KEYS))))
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.choice((0, len(new)))] = new
    return bytes(changed[:max_size])


def seeds() -> dict[str, bytes]:
    """Small good segments to start from."""
    head = SegmentHead(IDENTITY, "fuzz").content
    whole = head + b"".join(record(key) for key in KEYS)
    return {
        "empty": head,
        "whole": whole,
        "gone": whole + record(KEYS[1], is_gone=True),
        "again": whole + record(KEYS[1], is_gone=True) + record(KEYS[1]),
        "foreign": SegmentHead(bytes(32), "fuzz").content + record(KEYS[0]),
    }


if __name__ == "__main__":
    run(open_bytes, seeds(), mutate)
