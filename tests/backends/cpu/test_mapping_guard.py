"""Failed reads of mapped weights: an error that names the file, not the end of the process."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import Executor, ExecutorLimits, PackCacheOptions, get_backend
from octavo.backends.cpu import _native
from octavo.errors import EngineDeadError
from tests.support import tiny_models
from tests.support.batches import Request, step
from tests.support.native_sources import CSRC, platform_sources, run_stress

PAGE = mmap.PAGESIZE
STRESS = Path(__file__).with_name("weight_stream_stress.cpp")


def mapped(path: Path, pages: int = 8) -> NDArray[np.uint8]:
    path.write_bytes(b"\x07" * pages * PAGE)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def test_a_truncated_file_reads_as_zeros_and_is_known(tmp_path: Path) -> None:
    whole, cut = mapped(tmp_path / "a"), mapped(tmp_path / "b")
    guards = [_native.MappingGuard(data, name) for data, name in ((whole, "a"), (cut, "b"))]
    os.truncate(tmp_path / "b", 3 * PAGE)
    assert whole.sum() == 8 * 7 * PAGE
    assert cut.sum() == 3 * 7 * PAGE
    assert [(guard.path, guard.is_damaged) for guard in guards] == [("a", False), ("b", True)]


def test_a_guard_of_another_file_in_the_same_slot_knows_nothing(tmp_path: Path) -> None:
    cut = mapped(tmp_path / "a")
    guard = _native.MappingGuard(cut, "a")
    os.truncate(tmp_path / "a", PAGE)
    assert cut[-1] == 0
    assert guard.is_damaged
    del guard
    assert not _native.MappingGuard(mapped(tmp_path / "b"), "b").is_damaged


@pytest.mark.parametrize("cause", ["data[-1]", "os.kill(os.getpid(), signal.SIGBUS)"])
@pytest.mark.parametrize("handler", ["", "faulthandler.enable()"])
def test_other_causes_end_the_process_as_before(handler: str, cause: str, tmp_path: Path) -> None:
    code = f"""
import faulthandler, mmap, os, signal, sys
import numpy as np
from pathlib import Path
from octavo.backends.cpu import _native
from tests.backends.cpu.test_mapping_guard import mapped
{handler}
guarded = mapped(Path(sys.argv[1]) / "guarded")
guard = _native.MappingGuard(guarded, "x")
data = mapped(Path(sys.argv[1]) / "other")
os.truncate(Path(sys.argv[1]) / "other", 0)
{cause}
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert result.returncode == -signal.SIGBUS, result.stderr
    assert ("Fatal Python error: Bus error" in result.stderr) == bool(handler)


def test_a_step_on_truncated_weights_fails_and_the_next_start_packs_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    graph, weights = tiny_models.tiny_graph("llama")
    batch = step([(Request([1, 5, 9], [2]), 3)], block_size=16)

    def start() -> tuple[Executor, NDArray[np.float32]]:
        limits, kept = ExecutorLimits(16, 2, 16, 64), PackCacheOptions("m", 1 << 30)
        executor = get_backend("cpu").compile(graph, weights, limits, pack_cache=kept)
        executor.allocate_cache(8, 16)
        output = executor.submit(batch).wait()
        assert output.logits is not None
        return executor, output.logits

    executor, expected = start()
    (file,) = (tmp_path / "packed").glob("*.packed")
    os.truncate(file, PAGE)
    with pytest.raises(EngineDeadError, match=rf"{file}: the packed weights could not be read: the file was truncated"):
        executor.submit(batch).wait()
    executor.close()
    executor, found = start()
    executor.close()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_weight_stream_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """Workers read weights that the stream drops and fetches, also after the file was truncated."""
    sources = [STRESS, CSRC / "weight_stream.cpp", CSRC / "mapping_guard.cpp", *platform_sources()]
    run_stress(sources, tmp_path, str(tmp_path / "weights"), "60", sanitizer=sanitizer, has_kernels=False)
