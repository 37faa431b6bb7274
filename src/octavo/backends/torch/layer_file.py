"""Streamed layers on disk, kept for the next start: each layer's bytes as they are laid out in a buffer of the ring.

As with the CPU's file (`octavo.backends.cpu.pack_cache`), the key must match the model's, and the size, checksum and
structure that the file gives for each layer are only checked, never relied on. The first layer of each kind is laid out
again at every start, and the structures in the file are compared with it. A file written by different code is therefore
detected even if nobody raised the version.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import torch
from torch import Tensor

from octavo.backends import PackCacheOptions
from octavo.backends.kept_files import KeptFile, WrongFileError, padded
from octavo.backends.parameters import fingerprint_of, parameter_info
from octavo.backends.torch.layer_ring import FileLayer
from octavo.backends.torch.weights import DeviceWeights
from octavo.errors import InsufficientMemoryError, ModelLoadError
from octavo.graph.values import Parameter
from octavo.platform import files
from octavo.quantization.packed import Weight

_MAGIC = b"octavo layers 1\n"
_ENTRY = struct.Struct("<QQ16s")  # size of a layer, checksum of its bytes, digest of its structure

_ATTEMPTS = 3  # another process may be writing the file, fail, or replace it

Maker = Callable[[Sequence[Parameter]], tuple[DeviceWeights, Tensor]]
LayersReport = Callable[[int], None]


class LayerFile:
    """The file of a model's streamed layers."""

    def __init__(
        self,
        options: PackCacheOptions,
        place: str,
        weights: Mapping[str, Weight],
        layers: Sequence[Sequence[Parameter]],
    ) -> None:
        """place: identifies the types and the device of the computation.
        layers: the weights of each streamed layer.
        """
        digest = hashlib.blake2b(f"{place} {options.identity}\n".encode(), digest_size=32)
        for parameter in (parameter for layer in layers for parameter in layer):
            digest.update(f"{parameter.label} {parameter.shape}\n".encode() + fingerprint_of(weights, parameter))
        self._weights, self._layers = weights, layers
        self._key = _MAGIC + digest.digest()
        self._header_bytes = len(self._key) + len(layers) * _ENTRY.size
        self._file = KeptFile(digest.digest(), options.limit_bytes)

    def check_limit(self, num_bytes: int) -> None:
        """Raise InsufficientMemoryError if a layer file of about `num_bytes` would be too large."""
        if not self._file.fits(size := padded(self._header_bytes) + num_bytes):
            raise InsufficientMemoryError(
                f"the streamed layers do not fit in main memory, and on disk they take {size / 2**30:.1f} GiB, more "
                "than pack_cache_size allows: raise it, or set gpu_offload to cpu"
            )

    def layers(self, make: Maker, num_bytes: int, report: LayersReport) -> list[tuple[DeviceWeights, FileLayer]]:
        """Return each layer with its location in the file, which is written if it is missing or damaged.

        make: lays a layer out on the host.
        num_bytes: approximate size of all layers.
        report: called with the number of layers checked.
        Raises InsufficientMemoryError if the file cannot be kept, and ModelLoadError if the model's own file cannot be
        read.
        """

        def make_it(parameters: Sequence[Parameter]) -> tuple[DeviceWeights, Tensor]:
            try:
                return make(parameters)
            except OSError as error:  # the error concerns the model's file, not ours
                raise ModelLoadError(f"the model's weights cannot be read: {error}") from error

        for _ in range(_ATTEMPTS):
            found = self._file.read(lambda file: self._read(file, make_it, report))
            if found is not None:
                return found
            size = padded(self._header_bytes) + num_bytes
            if not self._file.write(size, lambda file: self._write(file, make_it), waits=True):
                break
        raise InsufficientMemoryError(
            f"{self._file.path}: the streamed layers do not fit in main memory and could not be saved to disk; "
            "the warnings say why: free disk space, raise pack_cache_size, or set gpu_offload to cpu"
        )

    def _write(self, file: int, make: Maker) -> int:
        """Write the layers one after another, and then the header. Return the size of the file."""
        entries = []
        with open(file, "wb", closefd=False) as out:
            out.seek(padded(self._header_bytes))
            for parameters in self._layers:
                layer, buffer = make(parameters)
                data = buffer.numpy().data
                out.write(data)
                entries.append(_ENTRY.pack(len(data), zlib.crc32(data), _structure(layer, parameters)))
                out.seek(padded(out.tell()))
            end = out.tell()
            out.seek(0)
            out.write(b"".join([self._key, *entries]))
        return end

    def _read(self, file: int, make: Maker, report: LayersReport) -> list[tuple[DeviceWeights, FileLayer]]:
        header = files.pread(file, self._header_bytes, 0)
        if len(header) != self._header_bytes or not header.startswith(self._key):
            raise WrongFileError("not the streamed layers of this model, or damaged")
        entries = [*_ENTRY.iter_unpack(header[len(self._key) :])]
        end = padded(self._header_bytes) + sum(padded(nbytes) for nbytes, _, _ in entries)
        if (size := os.fstat(file).st_size) != end:
            raise WrongFileError(f"it has {size} bytes instead of {end}")
        kept = os.fdopen(os.dup(file), "rb")
        try:
            return self._checked(kept, entries, make, report)
        except BaseException:
            kept.close()
            raise

    def _checked(
        self, kept: IO[bytes], entries: Sequence[tuple[int, int, bytes]], make: Maker, report: LayersReport
    ) -> list[tuple[DeviceWeights, FileLayer]]:
        """Check the layers and return them.

        Raises WrongFileError if a layer differs from its entry or from this code's layout.
        """
        examples: dict[object, tuple[DeviceWeights, Sequence[Parameter], int]] = {}
        found, offset = [], padded(self._header_bytes)
        for number, (parameters, (nbytes, checksum, structure)) in enumerate(zip(self._layers, entries, strict=True)):
            kind = tuple((parameter_info(self._weights, p).type_name, p.shape) for p in parameters)
            layer = None
            if kind in examples:
                other, names, other_bytes = examples[kind]
                layer = other.as_those_of(dict(zip(names, parameters, strict=True)))
                if (other_bytes, _structure(layer, parameters)) != (nbytes, structure):
                    layer = None  # other contents, such as a column order
            if layer is None:
                layer, buffer = make(parameters)
                made = (len(buffer), zlib.crc32(buffer.numpy().data), _structure(layer, parameters))
                if made != (nbytes, checksum, structure):
                    raise WrongFileError(f"streamed layer {number} has a different layout")
                examples.setdefault(kind, (layer, parameters, nbytes))
                layer = layer.as_those_of({p: p for p in parameters})  # the example keeps its own addresses
            source = FileLayer(kept, self._file.path, offset, nbytes)
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            source.read_into(buffer)
            if zlib.crc32(buffer.numpy().data) != checksum:
                raise WrongFileError(f"the bytes of streamed layer {number} are damaged")
            found.append((layer, source))
            offset += padded(nbytes)
            report(number + 1)
        return found


def _structure(layer: DeviceWeights, parameters: Sequence[Parameter]) -> bytes:
    return hashlib.blake2b(layer.structure(parameters).encode(), digest_size=16).digest()
