"""The importance of the columns of a model's matrices: the mean square of the inputs that a column is multiplied by.

A rounding error in a column affects the matrix's output in proportion to the column's importance. The files have the
formats of llama.cpp's `llama-imatrix`: the older binary format or the GGUF one. Source: `tools/imatrix/README.md` and
the loader of `llama-quantize`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError, UsageError
from octavo.loader.gguf import open_gguf
from octavo.loader.gguf_writer import MetadataValue, OutputTensor, write_gguf

if TYPE_CHECKING:
    from octavo.backends.layers import Tokens

CHUNK_TOKENS = 512
MAX_FILE_BYTES = 1 << 30
_MAX_NAME_BYTES = 4096
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True, slots=True)
class ColumnSquares:
    """Sums of squared inputs of one matrix, or of one matrix per expert.

    sums: sums of squares, float64 [matrices, columns].
    counts: number of rows, [matrices].
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]

    def means(self) -> NDArray[np.float32]:
        """Return the means, [columns] or [experts, columns].

        An expert that no token chose gets the mean of the other experts.
        """
        found = self.sums / np.maximum(self.counts, 1)[:, None]
        visited = self.counts > 0
        if visited.any():
            found[~visited] = found[visited].mean(axis=0)
        else:
            found[:] = 1
        means = found.astype(np.float32)
        return means[0] if len(means) == 1 else means


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """The importance of a model's columns, measured on a text.

    squares: sums of squares by the tensor's name in GGUF files.
    dataset: name of the text.
    chunks: number of pieces of text.
    """

    squares: Mapping[str, ColumnSquares]
    file: str = ""
    dataset: str = ""
    num_chunks: int = 0
    chunk_tokens: int = CHUNK_TOKENS

    def columns(self) -> dict[str, NDArray[np.float32]]:
        """Return the importance of each tensor's columns."""
        return {name: squares.means() for name, squares in self.squares.items()}


def split_text(ids: Sequence[int], max_chunks: int, first: int | None = None) -> list[Tokens]:
    """Split tokens into at most `max_chunks` pieces of exactly `CHUNK_TOKENS` tokens. A shorter text becomes one piece.

    first: token that replaces each piece's first one.

    Raises UsageError for a text of fewer than two tokens.
    """
    if len(ids) < 2:
        raise UsageError("the calibration text is empty; give a few pages of text like the model will see")
    length = min(CHUNK_TOKENS, len(ids))
    chunks = [np.array(ids[i : i + length], np.int32) for i in range(0, len(ids) - length + 1, length)][:max_chunks]
    if first is not None:
        for chunk in chunks:
            chunk[0] = first
    return chunks


def is_text(path: Path) -> bool:
    """Return True for a text file, False for an importance matrix. Raises ModelLoadError if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    return not start.startswith(b"GGUF") and b"\0" not in start


def read_importance(path: Path) -> ImportanceMatrix:
    """Read either of llama.cpp's formats. Raises ModelLoadError naming file and reason."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"{path}: {path.stat().st_size} bytes; the limit for an importance matrix is 1 GiB")
        return _read_gguf(path) if magic == b"GGUF" else _read_legacy(path, path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error


def _read_gguf(path: Path) -> ImportanceMatrix:
    squares = {}
    with closing(open_gguf(path)) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise ModelLoadError(f"{path}: general.type is {file.metadata.get('general.type')!r:.40}, not 'imatrix'")
        for tensor, info in file.tensors.items():
            if not tensor.endswith(_SUMS):
                continue
            name = tensor.removesuffix(_SUMS)
            if name + _COUNTS not in file.tensors or info.type_name != "F32":
                raise ModelLoadError(f"{path}: {tensor!r:.80} has no counts, or is not F32")
            counts = file.weight(name + _COUNTS).dequantize().reshape(-1).astype(np.float64)
            sums = file.weight(tensor).dequantize().astype(np.float64)
            sums = sums.reshape(-1, sums.shape[-1])
            if len(counts) != len(sums):
                raise ModelLoadError(f"{path}: {name!r:.80} has {len(counts)} counts for {len(sums)} matrices")
            squares[name] = _checked(path, name, sums, counts)
        datasets = file.metadata.get("imatrix.datasets")
        chunks, size = (file.metadata.get(f"imatrix.chunk_{key}", 0) for key in ("count", "size"))
    dataset = datasets[0] if isinstance(datasets, list) and datasets else ""
    return ImportanceMatrix(
        squares,
        path.name,
        dataset,
        chunks if isinstance(chunks, int) else 0,
        size if isinstance(size, int) and size else CHUNK_TOKENS,
    )


def _checked(path: Path, name: str, sums: NDArray[np.float64], counts: NDArray[np.float64]) -> ColumnSquares:
    for array in (sums, counts):
        if not np.isfinite(array).all() or (array < 0).any():
            raise ModelLoadError(f"{path}: {name!r:.80} has a negative number, or one that is not finite")
    return ColumnSquares(sums, counts)


def _read_legacy(path: Path, data: bytes) -> ImportanceMatrix:
    """Read the older format.

    For each entry it has a name, the number of calls, and the mean squares multiplied by that number. The number of
    chunks and the name of the text follow at the end.
    """
    at = 0

    def take(count: int, what: str) -> bytes:
        nonlocal at
        if not 0 <= count <= len(data) - at:
            raise ModelLoadError(f"{path}: offset {at}: {what} takes {count} bytes, but only {len(data) - at} are left")
        at += count
        return data[at - count : at]

    def integer(what: str) -> int:
        return int(struct.unpack("<i", take(4, what))[0])

    squares = {}
    num_entries = integer("the number of entries")
    if not 0 < num_entries <= 1 << 16:
        raise ModelLoadError(f"{path}: {num_entries} entries; not llama.cpp's importance matrix")
    for _ in range(num_entries):
        length = integer("the length of a name")
        if not 0 < length <= _MAX_NAME_BYTES:
            raise ModelLoadError(
                f"{path}: offset {at}: a name of {length} bytes; not an importance matrix of llama.cpp"
            )
        name = take(length, "a name").decode(errors="replace")
        calls, values = integer("the number of calls"), integer("the number of values")
        sums = np.frombuffer(take(4 * values, f"the values of {name!r:.80}"), "<f4").astype(np.float64)
        squares[name] = _checked(path, name, sums[None], np.array([max(calls, 1)], np.float64))
    chunks = integer("the number of chunks") if at + 4 <= len(data) else 0
    dataset = take(integer("the length of a name"), "a name").decode(errors="replace") if at + 4 <= len(data) else ""
    return ImportanceMatrix(squares, path.name, dataset, chunks)


def write_importance(path: Path, matrix: ImportanceMatrix) -> None:
    """Write the GGUF format, which llama.cpp reads. Raises ModelWriteError naming file or tensor."""
    metadata: dict[str, MetadataValue] = {
        "general.type": "imatrix",
        "imatrix.datasets": [matrix.dataset],
        "imatrix.chunk_count": np.uint32(matrix.num_chunks),
        "imatrix.chunk_size": np.uint32(matrix.chunk_tokens),
    }
    tensors = []
    for name, squares in sorted(matrix.squares.items()):
        for suffix, array in ((_SUMS, squares.sums), (_COUNTS, squares.counts[:, None])):
            data = array.astype(np.float32)
            tensors.append(OutputTensor(name + suffix, "F32", data.shape, lambda data=data: [data.tobytes()]))  # type: ignore[misc]
    write_gguf(path, metadata, tensors)


def fitted(columns: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Reshape the importance to fit a tensor. The older format stores the columns of all experts in one row."""
    if len(shape) > 2 and columns.ndim == 1 and columns.size == shape[0] * shape[-1]:
        return columns.reshape(shape[0], shape[-1])
    return columns
